"""The error of a run's folder, and the words that name its cure."""

from __future__ import annotations

from pathlib import Path

from coordinator.errors import CoordinatorError


class RunError(CoordinatorError):
    """A run's folder cannot be used: it is open elsewhere, damaged, or belongs to another task."""


def repair_advice(folder: Path) -> str:
    """Return the words that name the cure for a damaged run."""
    return (
        f"restore it from a backup, or let tessera-coordinator repair {folder} say what it can "
        "save and what would be lost"
    )
