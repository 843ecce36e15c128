"""Memory of libraries: pages of code that only their start needed.

A page of a library that was looked at once counts as memory of this process until the system takes
it. Such pages are never written to, so letting go of them is safe at any time: what is used again
comes back from the file, which is mostly in memory anyway. Linux alone has the means; elsewhere
nothing happens.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+) +(.*)\n")
_DONTNEED = 4
"""Linux's number of `MADV_DONTNEED`, on every architecture that runs Python."""


def release_code(path: str) -> int:
    """Let go of the code of the loaded library in this file; returns the bytes that were mapped."""
    ranges = _code_ranges(os.path.realpath(path))
    if not ranges:
        return 0
    import ctypes

    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return sum(size for start, size in ranges if advise(start, size, _DONTNEED) == 0)


@lru_cache(maxsize=4)
def _code_ranges(path: str) -> tuple[tuple[int, int], ...]:
    """Find the addresses and sizes of a library's pages that are as in its file.

    Those that were written to once, as the dynamic linker does, would be lost.
    """
    found, current = [], None
    try:
        with open("/proc/self/smaps") as lines:
            for line in lines:
                if (mapped := _MAPPED.fullmatch(line)) is not None:
                    start, end = int(mapped[1], 16), int(mapped[2], 16)
                    mine = mapped[5] == path and "w" not in mapped[3]
                    current = (start, end - start) if mine else None
                elif current is not None and line.split() == ["Anonymous:", "0", "kB"]:
                    found.append(current)
    except OSError:
        return ()
    return tuple(found)
