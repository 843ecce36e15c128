"""Memory that a process can give back: code of libraries that only their start needed, free heap.

A page of a library that was looked at once counts as memory of this process until the system takes
it. Such pages are never written to, so letting go of them is safe at any time: what is used again
comes back from the file, which is mostly in memory anyway. Linux alone has the means; elsewhere
nothing happens. It is a saving only, so no failure of it is an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) +(.*)\n")
_AS_IN_FILE = {"Anonymous:": "0", "Swap:": "0"}
"""KiB of a mapping whose pages are all as in its file: none was written to, in memory or not."""
_DONTNEED = 4
"""Linux's number of `MADV_DONTNEED`, on every architecture that runs Python."""


def release_code(path: str) -> int:
    """Let go of the code of the loaded library in this file; returns the bytes that were mapped."""
    ranges = _code_ranges(os.path.realpath(path))
    advise = _libc("madvise") if ranges else None
    if advise is None:
        return 0
    import ctypes

    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return sum(size for start, size in ranges if advise(start, size, _DONTNEED) == 0)


def release_heap() -> None:
    """Give memory that was freed back to the system, where the C library can (glibc)."""
    trim = _libc("malloc_trim")
    if trim is not None:
        import ctypes

        trim.argtypes = (ctypes.c_size_t,)
        trim(0)


def _libc(function: str) -> Any:
    """Return a function of the C library; None: there is none, or no way to call it."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        return getattr(ctypes.CDLL(None), function)
    except (ImportError, OSError, AttributeError):
        return None


@lru_cache(maxsize=4)
def _code_ranges(path: str) -> tuple[tuple[int, int], ...]:
    """Find the addresses and sizes of a library's pages that are as in its file.

    Those that were written to once, as the dynamic linker does, would be lost.
    """
    try:
        with open(
            "/proc/self/smaps",
            encoding=sys.getfilesystemencoding(),
            errors="surrogateescape",
        ) as lines:
            return tuple(clean_ranges(lines, path))
    except OSError:
        return ()


def clean_ranges(lines: Iterable[str], path: str) -> Iterator[tuple[int, int]]:
    """Yield the addresses and sizes of a file's mappings that were never written to.

    `lines` are those of `/proc/self/smaps`. A mapping without a word on that is left out.
    """
    current: tuple[int, int] | None = None
    told: dict[str, str] = {}
    for line in lines:
        if (mapped := _MAPPED.fullmatch(line)) is None:
            words = line.split()
            told |= dict([words[:2]]) if len(words) > 1 else {}
            continue
        if current is not None and told.items() >= _AS_IN_FILE.items():
            yield current
        start, end = int(mapped[1], 16), int(mapped[2], 16)
        mine = mapped[5] == path and "w" not in mapped[3]
        current, told = (start, end - start) if mine else None, {}
    if current is not None and told.items() >= _AS_IN_FILE.items():
        yield current
