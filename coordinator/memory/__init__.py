"""Memory: the newest movement of every device, block by block, in RAM or on disk."""

from __future__ import annotations

from coordinator.memory.contract import Dtype, Made, Memory, MemoryConfig, Piece
from coordinator.memory.disk import DiskMemory
from coordinator.memory.errors import MemoryBusy, MemoryDamaged, MemoryStoreError
from coordinator.memory.ram import RamMemory
from coordinator.memory.space import estimate_bytes

__all__ = [
    "DiskMemory",
    "Dtype",
    "Made",
    "Memory",
    "MemoryBusy",
    "MemoryConfig",
    "MemoryDamaged",
    "MemoryStoreError",
    "Piece",
    "RamMemory",
    "estimate_bytes",
]
