"""Code of libraries leaves memory, and comes back when it is used."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.machine import libraries
from edge_sdk.machine.libraries import clean_ranges, release_code, release_heap
from edge_sdk.machine.resident import resident_bytes

LIBRARY = str(next((Path(np.__file__).resolve().parent / "_core").glob("_multiarray_umath*.so")))


def resident_code(path: str) -> tuple[int, int]:
    """KiB of a library in memory: as in its file, and written to since."""
    clean = written = 0
    mine = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            mine = line.endswith(path)
        elif mine and line.startswith("Rss:"):
            clean += int(line.split()[1])
        elif mine and line.startswith("Anonymous:"):
            clean -= int(line.split()[1])
            written += int(line.split()[1])
    return clean, written


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_code_leaves_memory_and_what_was_written_stays() -> None:
    values = np.arange(5000.0)
    expected = float(np.sort(np.cos(values) * values).sum())
    clean, written = resident_code(LIBRARY)
    assert written > 0  # the dynamic linker wrote there
    assert release_code(LIBRARY) >= 1024 * clean
    after, kept = resident_code(LIBRARY)
    assert after < clean / 2
    assert kept == written
    assert float(np.sort(np.cos(values) * values).sum()) == expected


def test_library_that_is_not_loaded_has_no_code(tmp_path: Path) -> None:
    assert release_code(str(tmp_path / "none.so")) == 0


def mapping(start: int, access: str, path: str, *facts: str) -> list[str]:
    head = f"{start:x}-{start + 4096:x} {access} 00000000 fe:00 42 {path}\n"
    return [head, *(f"{fact} kB\n" for fact in ("Rss: 4", *facts)), "VmFlags: rd mr mw me\n"]


CLEAN = ("Anonymous: 0", "Swap: 0")


@pytest.mark.parametrize(
    "facts",
    [
        ("Anonymous: 4", "Swap: 0"),
        ("Anonymous: 0", "Swap: 4"),
        ("Anonymous: 0",),
        ("Swap: 0",),
        (),
    ],
)
def test_pages_that_may_have_been_written_to_stay(facts: tuple[str, ...]) -> None:
    """One that was swapped out is not in memory, so it is not among the anonymous ones."""
    lines = [
        *mapping(0x1000, "r-xp", "/lib/a.so", *CLEAN),
        *mapping(0x3000, "r--p", "/lib/a.so", *facts),
        *mapping(0x5000, "r--p", "/lib/a.so", *CLEAN),
        *mapping(0x7000, "rw-p", "/lib/a.so", *CLEAN),
        *mapping(0x9000, "r-xp", "/lib/b.so", *CLEAN),
    ]
    assert list(clean_ranges(lines, "/lib/a.so")) == [(0x1000, 4096), (0x5000, 4096)]
    last = mapping(0x1000, "r-xp", "/lib/a.so", *facts)
    assert list(clean_ranges(last, "/lib/a.so")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_path_that_is_not_utf_8_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "smaps"
    odd = b"\x00".join(line.encode() for line in mapping(0x1000, "r-xp", "/tmp/X.so", *CLEAN))
    file.write_bytes(odd.replace(b"\x00", b"").replace(b"X", b"\xff"))
    real = open
    monkeypatch.setattr(libraries, "open", lambda _, **more: real(file, **more), raising=False)
    libraries._code_ranges.cache_clear()
    try:
        assert libraries._code_ranges("/tmp/\udcff.so") == ((0x1000, 4096),)
    finally:
        libraries._code_ranges.cache_clear()


@pytest.mark.skipif(sys.platform != "linux", reason="does nothing elsewhere")
@pytest.mark.parametrize("missing", ["ctypes", "library", "function"])
def test_memory_is_only_let_go_of_where_that_works(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a saving: a system that lacks a part of it trains all the same."""
    import ctypes

    class Bare:
        """A C library without the functions."""

    def load(_: object) -> Bare:
        if missing == "library":
            raise OSError("no such library")
        return Bare()

    monkeypatch.setattr(ctypes, "CDLL", load)
    if missing == "ctypes":
        monkeypatch.setitem(sys.modules, "ctypes", None)
    assert release_code(LIBRARY) == 0
    release_heap()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone gives it back")
def test_memory_that_was_freed_leaves() -> None:
    pieces = [bytes(2000) for _ in range(50_000)]
    guard = bytes(2000)  # above them, so that they stay when they are freed
    full = resident_bytes()
    del pieces
    release_heap()
    assert resident_bytes() < full - 50e6
    assert len(guard) == 2000
