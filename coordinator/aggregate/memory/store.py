"""Interface of the place where a memory keeps movements."""

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
    """Its number in the store."""
    made: Made
    ids: Indices
    values: Held
    scales: Float64
    """Scale of every block; empty for a type without scales."""
    segment: int = 0
    """File that it lies in; 0 in a store without files."""

    def live(self, rounds: Rounds) -> NDArray[np.bool_]:
        """Mark the blocks that are the device's newest."""
        live: NDArray[np.bool_] = rounds[self.ids] == self.made.round
        return live


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """Movements kept of one device."""

    rounds: Rounds
    """A copy that the caller may change."""
    movements: Sequence[Stored]
    """By round made, then by arrival."""


class Slot(Protocol):
    """Room for one movement's values."""

    def put(self, at: int, values: Held) -> None:
        """Keep values for a position, counted in values. Safe from several threads.

        Read-only values are perhaps written by `Store.prepare` alone.
        """


class Store(Protocol):
    """A place that keeps movements. An `OSError` from any method leaves it unusable."""

    def kept(self, device: str) -> DeviceMemory:
        """Return what is kept of a device; nothing for an unknown one."""

    def made_before(self, round: int, most: int) -> list[str]:
        """Return the devices of the `most` oldest movements made before a round, oldest first."""

    def oldest(self) -> int | None:
        """Return the earliest round made of any movement."""

    def add(self, device: str, made: Made, ids: Indices, scales: Float64, size: int) -> Slot:
        """Keep one more movement, of `size` values that will be put before anything is read."""

    def update(self, device: str, rounds: Rounds, lost: Sequence[tuple[Stored, int, int]]) -> None:
        """Set a device's rounds; `lost` is (movement, values that died, values left).

        A movement with none left is dropped, and so is a device with no round above 0.
        """

    def prepare(self, sums: Sequence[NDArray[np.generic]]) -> None:
        """Bring to disk what `commit` needs, with the memory's sums; nothing changes after it."""

    def commit(self, now: int) -> None:
        """Make all changes durable, with the present round; they were prepared."""

    def tidy(self) -> None:
        """Remove what no commit needs any more. A store that is opened again does it, too."""

    def close(self) -> None:
        """Close all files. Closing again does nothing."""
