"""CPU seconds and memory of a process, from Linux' /proc."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.report.figures import FigureError

MEASURABLE = Path("/proc/self/stat").exists()
"""True if there is a /proc to read."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_s(pid: int) -> float:
    """User and system time of a living process, all threads; in ticks of about 10 ms."""
    # The name of the program, in brackets, may have spaces.
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def peak_resident_bytes(pid: int) -> int:
    """Peak resident memory of the process (VmHWM)."""
    return _status(pid, "VmHWM")


def anonymous_bytes(pid: int) -> int:
    """Resident memory of the process that belongs to no file (RssAnon)."""
    return _status(pid, "RssAnon")


def threads_of(pid: int) -> int:
    """Threads of the process."""
    return _status(pid, "Threads", 1)


def _status(pid: int, key: str, unit: int = 1024) -> int:
    for line in _read(pid, "status").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * unit
    raise FigureError(f"/proc/{pid}/status has no {key}")


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise FigureError(f"process {pid} has ended while it was measured") from error
