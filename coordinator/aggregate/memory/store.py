"""What a memory needs of the place where movements are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Float64, Made, Rounds
from coordinator.aggregate.memory.values import Held
from edge_sdk.protocol.plan.layout import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One stored movement: the blocks that were taken of it, some perhaps replaced since.

    A block is live, that is the newest of its device, where the device's round array has this
    movement's round. No other movement of that round has the block: it would not have been taken.
    """

    key: int
    """What the store knows it by."""
    made: Made
    ids: Indices
    values: Held
    scales: Float64
    """Of every block; empty for a type without scales."""
    segment: int = 0
    """Of a store with files: the one it lies in."""

    def live(self, rounds: Rounds) -> NDArray[np.bool_]:
        """Which of its blocks are the device's newest."""
        live: NDArray[np.bool_] = rounds[self.ids] == self.made.round
        return live


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """What is kept of one device."""

    rounds: Rounds
    """A copy: the caller's to change."""
    movements: Sequence[Stored]
    """By round made, then by arrival."""


class Slot(Protocol):
    """Room for one movement's values."""

    def put(self, at: int, values: Held) -> None:
        """Write values at a position, counted in values. Safe from several threads."""


class Store(Protocol):
    """Where movements are kept. An `OSError` from any method leaves it unusable."""

    def kept(self, device: str) -> DeviceMemory:
        """What is kept of a device; nothing of an unknown one."""

    def made_before(self, round: int, most: int) -> list[str]:
        """The devices of the `most` oldest movements, if made before a round; oldest first."""

    def oldest(self) -> int | None:
        """The earliest round made of any movement."""

    def add(self, device: str, made: Made, ids: Indices, scales: Float64, size: int) -> Slot:
        """Keep one more movement, of `size` values that will be put before anything is read."""

    def update(self, device: str, rounds: Rounds, lost: Sequence[tuple[Stored, int, int]]) -> None:
        """A device's rounds have changed; `lost` is (movement, values that died, values left).

        A movement with none left is dropped, and so is a device with no round above 0.
        """

    def commit(self, now: int, sums: Sequence[NDArray[np.generic]]) -> None:
        """Make all changes durable, and with them the present round and the memory's sums."""

    def close(self) -> None:
        """Give up what is open."""
