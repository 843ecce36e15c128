"""Memory of this process: current and peak."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)


def resident_bytes() -> int:
    """Bytes this process has in memory now."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(256).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """Peak memory of this process, since its start or since `forget_peak` where that works."""
    import psutil

    now = psutil.Process().memory_info()
    if sys.platform == "win32":
        return int(now.peak_wset)
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(int(now.rss), most if sys.platform == "darwin" else most * 1024)


def forget_peak() -> None:
    """Reset the peak where the system allows it; elsewhere it is too high, never too low."""
    if os.path.exists("/proc/self/clear_refs"):
        try:
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")
        except OSError as error:
            log.debug("cannot reset the memory peak, it counts from the start: %s", error)
