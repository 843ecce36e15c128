"""Memory: the newest movement of every device, block by block, in RAM or on disk."""

from __future__ import annotations

from coordinator.aggregate.memory.contract import (
    NO_LIMIT,
    Made,
    MemoryConfig,
    MemoryType,
    Piece,
)
from coordinator.aggregate.memory.disk.memory import DiskMemory, stored_config
from coordinator.aggregate.memory.disk.space import estimate_bytes
from coordinator.aggregate.memory.errors import MemoryBusy, MemoryDamaged, MemoryStoreError
from coordinator.aggregate.memory.newest import Memory
from coordinator.aggregate.memory.ram import RamMemory

__all__ = [
    "NO_LIMIT",
    "DiskMemory",
    "Made",
    "Memory",
    "MemoryBusy",
    "MemoryConfig",
    "MemoryDamaged",
    "MemoryStoreError",
    "MemoryType",
    "Piece",
    "RamMemory",
    "estimate_bytes",
    "stored_config",
]
