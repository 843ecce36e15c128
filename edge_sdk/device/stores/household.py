"""Everything that the tasks of one device share: its owner's pause, its energy, its one training.

<state_dir>/_device/<device>/     no task has such a name
    paused          the owner's pause (`pause.py`)
    energy.json     joules of the day (`edge_sdk.decide.account`)
    turns.json      which task was served last (`slot.py`)
    control.sock    of a device with several tasks, while it runs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_sdk.decide.account import EnergyAccount
from edge_sdk.device.stores.pause import Pause
from edge_sdk.device.stores.slot import TrainingSlot

SHARED = "_device"
"""Folder of what tasks share. The name of a task begins with a letter or a digit."""


def shared_path(state_dir: Path, device: str) -> Path:
    """Return the folder of what the tasks of a device share."""
    return state_dir / SHARED / device


class Household:
    """The shared part of one device. Opening it makes no files."""

    def __init__(
        self, state_dir: Path, device: str, priorities: Mapping[str, int] | None = None
    ) -> None:
        """`priorities` of several tasks, the lower number first; None: there is one task."""
        self.path = shared_path(state_dir, device)
        self.pause = Pause(self.path / "paused")
        self.account = EnergyAccount(self.path / "energy.json")
        self.slot = (
            None if priorities is None else TrainingSlot(priorities, self.path / "turns.json")
        )
