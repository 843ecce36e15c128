"""Memory of this process: what it has, and the most it had."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)


def resident_bytes() -> int:
    """What this process has in memory now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most this process ever had in memory, or since `forget_peak` where that works."""
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
    """Let the peak start anew, where the system allows it; elsewhere it is too high, never low."""
    if os.path.exists("/proc/self/clear_refs"):
        try:
            with open("/proc/self/clear_refs", "w") as refs:
                refs.write("5")
        except OSError as error:
            log.debug("the peak of memory is that since the start: %s", error)
