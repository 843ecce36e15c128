"""Limits of Linux control groups, versions 1 and 2, nested.

A limit may be set on any group from our own up to the mount, and each group has its own use, so the
smallest over all of them counts. psutil and `os` know nothing of this. Which groups we are in is
read every time; where they are mounted, and which files they have, changes so rarely that it is
read once a minute.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from edge_sdk.machine.sensors.files import Files, to_number

UNLIMITED = 2.0**60
"""Version 1 reports 9223372036854771712 for unlimited memory."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest of all groups. Infinite: no limit; None: a limit of unknown size."""

    cpus: float | None
    memory_bytes: float | None
    available_bytes: float | None


def read_limits(files: Files) -> CgroupLimits:
    """Read the limits of this process's groups."""
    limit, left = read_memory(files)
    return CgroupLimits(cpus=read_cpus(files), memory_bytes=limit, available_bytes=left)


def read_cpus(files: Files) -> float | None:
    """Read `CgroupLimits.cpus` alone."""
    return _least([_cpus(files, folder) for folder in group_folders(files)])


def read_memory(files: Files) -> tuple[float | None, float | None]:
    """Read `CgroupLimits.memory_bytes` and `available_bytes` alone."""
    bounds = [_memory(files, folder) for folder in group_folders(files)]
    return _least([limit for limit, _ in bounds]), _least([left for _, left in bounds])


def group_folders(files: Files) -> list[str]:
    """Return our groups' folders in every mounted hierarchy, each with all of its ancestors."""
    groups = files.text("proc/self/cgroup") or ""

    return files.lasting(("folders", groups), lambda: _mounted(files, groups))


def _mounted(files: Files, groups: str) -> list[str]:
    ours: dict[str, str] = {}
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            ours |= dict.fromkeys(controllers.split(","), path)
    found: dict[str, None] = {}
    for line in (files.text("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        for controller in [""] if kind[0] == "cgroup2" else kind[2].split(","):
            if controller in ours:
                found |= dict.fromkeys(
                    _chain(_unescaped(place[3]), _unescaped(place[4]), ours[controller])
                )
    return list(found)


def _chain(mounted: str, at: str, path: str) -> list[str]:
    """Return folders from our group up to the mount point `at`, which shows group `mounted`."""
    top = at.strip("/")
    below = path.removeprefix(mounted) if mounted != "/" else path
    inside = mounted == "/" or path == mounted or path.startswith(mounted + "/")
    parts = [part for part in below.split("/") if part]
    if not inside or ".." in parts:
        # Our group lies outside the mount, as in a container; the mount is then our own.
        return [top]
    return ["/".join([top, *parts[:depth]]) for depth in range(len(parts), -1, -1)]


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _least(limits: list[float | None]) -> float | None:
    known = [limit for limit in limits if limit is not None]
    return min(known, default=math.inf) if len(known) == len(limits) else None


def _cpus(files: Files, folder: str) -> float | None:
    if _has(files, f"{folder}/cpu.max"):
        quota, _, period = (files.text(f"{folder}/cpu.max") or "").partition(" ")
        if quota == "max":
            return math.inf
        return _share(to_number(quota), to_number(period))
    if _has(files, f"{folder}/cpu.cfs_quota_us"):
        quota_us = files.number(f"{folder}/cpu.cfs_quota_us")
        if quota_us == -1:
            return math.inf
        return _share(quota_us, files.number(f"{folder}/cpu.cfs_period_us"))
    return math.inf


def _share(quota: float | None, period: float | None) -> float | None:
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _memory(files: Files, folder: str) -> tuple[float | None, float | None]:
    """Return a group's limit, and what is left of it when file pages are dropped."""
    limit = _least(
        [
            _bytes(files, f"{folder}/{name}")
            for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
        ]
    )
    if limit is None or limit >= UNLIMITED:
        return (limit if limit is None else math.inf,) * 2
    used = files.number(f"{folder}/memory.current")
    if used is None:
        used = files.number(f"{folder}/memory.usage_in_bytes")
    if used is None:
        return limit, None
    statistics = files.text(f"{folder}/memory.stat") or ""
    # Version 1 also has a line for the group alone; the limit applies to the total.
    match = re.search(r"^total_inactive_file ([0-9]{1,20})$", statistics, re.M) or re.search(
        r"^inactive_file ([0-9]{1,20})$", statistics, re.M
    )
    droppable = float(match[1]) if match else 0.0
    return limit, min(limit, max(0.0, limit - used + droppable))


def _has(files: Files, path: str) -> bool:
    return files.lasting(path, lambda: files.exists(path))


def _bytes(files: Files, path: str) -> float | None:
    if not _has(files, path):
        return math.inf
    return math.inf if files.text(path) == "max" else files.number(path)
