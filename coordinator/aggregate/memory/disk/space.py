"""Disk space of a memory, checked before it is needed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from coordinator.aggregate.memory.contract import MemoryType
from coordinator.aggregate.memory.values import VALUE_TYPES
from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.plan import ModelPlan

SHARE_LIVE = 2
"""A folder holds at most this many bytes for one that is live: less, and a segment is rewritten."""

ROW_BYTES = 512
"""An index row with its entries in the table's indices, generously, without its bit set."""


def estimate_bytes(
    plan: ModelPlan, devices: int, memory_type: MemoryType, *, sums: bool = True
) -> int:
    """Return the most bytes in a folder between commits, with every device held in full.

    A commit may need as much again as it stores and rewrites, until it has deleted what that
    replaced.
    """
    kind = VALUE_TYPES[memory_type]
    scales = 8 * plan.block_count if kind.scaled else 0
    movement = plan.parameters * kind.dtype.itemsize + scales
    index = 4 * plan.block_count + SHARE_LIVE * (ROW_BYTES + plan.block_count // 8)
    totals = 2 * (8 * plan.parameters + 16 * plan.block_count) if sums else 16 * plan.block_count
    return devices * (SHARE_LIVE * movement + index) + totals


def check_space(folder: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Raise `ConfigError` unless the folder can grow to `needed_bytes` and leave the reserve.

    What the folder holds already counts as there.
    """
    used = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    free = shutil.disk_usage(folder).free
    if used + free < needed_bytes + reserve_bytes:
        raise ConfigError(
            f"the memory in {folder} may grow to {_gigabytes(needed_bytes)}; there is room for "
            f"{_gigabytes(max(0, used + free - reserve_bytes))}, with {_gigabytes(reserve_bytes)} "
            "kept in reserve: name a larger disk, a shorter memory_type (fp16, int8) or fewer "
            "devices"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
