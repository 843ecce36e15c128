"""Code of libraries leaves memory, and comes back when it is used."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.machine.libraries import release_code

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
