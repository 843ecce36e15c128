"""The memory's errors.

CoordinatorError
└── MemoryStoreError     a memory folder cannot be used; names the file and what to do
    ├── MemoryDamaged    a file of it is missing, cut short or not what it should be
    └── MemoryBusy       another process has it open

Events that cannot happen (a round that goes back, a movement from the future) are `StateError`.
"""

from __future__ import annotations

from coordinator.errors import CoordinatorError

ADVICE = (
    "restore the folder from a backup, or let tessera-coordinator repair say what it can save and "
    "what would be lost"
)
"""The cure for damage."""


class MemoryStoreError(CoordinatorError):
    """A memory folder cannot be used; the text names the file and says what to do."""


class MemoryDamaged(MemoryStoreError):
    """A file of a memory folder is missing, cut short or not what it should be."""


class MemoryBusy(MemoryStoreError):
    """Another process has the memory folder open."""
