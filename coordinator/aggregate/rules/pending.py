"""Movements that were accepted and have not moved the model yet (`fedbuff`).

Only sums are kept, in the order of arrival: a checkpoint holds all of it, and a run that is resumed
comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from edge_sdk.protocol.plan.blocks import Float32, block_runs
from edge_sdk.protocol.plan.layout import Array, Indices
from edge_sdk.protocol.plan.plan import ModelPlan

Floats = NDArray[np.float64]

_TOTAL, _HELD, _STATISTIC = "pending/total", "pending/held", "pending/statistic/"


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """Sums over the collected movements; its arrays are never changed. Made by `first`."""

    total: Floats
    """Sum of the movements, each times its trust, in block order."""
    held: Indices
    """Per block, the number of movements that hold it."""
    number: int = 0
    """Movements."""
    statistics: Mapping[str, Floats] = field(default_factory=dict)
    """Sums of the statistics of movements of the whole model, each times its trust."""
    whole: int = 0
    """Movements of the whole model."""
    trust: float = 0.0
    """Sum of their trust."""

    @classmethod
    def first(cls, plan: ModelPlan) -> Pending:
        """Return the sums over no movements."""
        return cls(np.zeros(plan.parameters), np.zeros(plan.block_count, dtype=np.int64))

    def adding(self, plan: ModelPlan, arrival: Arrival, trust: float) -> Pending:
        """Return the sums with one more movement."""
        part = arrival.contribution.blocks
        total, held, values = self.total.copy(), self.held.copy(), part.values
        for whole, within in block_runs(part.ids, plan.block_offsets):
            total[whole] += trust * values[within].astype(np.float64)
        held[part.ids] += 1
        statistics, number, trusted = dict(self.statistics), self.whole, self.trust
        if plan.choose(arrival.groups) == plan.choose(plan.full_groups()):
            for name, array in arrival.movement.statistics.items():
                zero = np.zeros(array.shape)
                statistics[name] = statistics.get(name, zero) + trust * array.astype(np.float64)
            number, trusted = number + 1, trusted + trust
        return Pending(total, held, self.number + 1, statistics, number, trusted)

    def movement(self, plan: ModelPlan, rate: float) -> Float32:
        """Return the movement of the model: for each block the mean over those that hold it."""
        each = np.repeat(np.maximum(self.held, 1), plan.block_sizes)
        movement: Float32 = (rate * self.total / each).astype(np.float32)
        return movement

    def mixed(self, plan: ModelPlan, buffers: Mapping[str, Array]) -> dict[str, Array]:
        """Return the model's buffers, each statistic moved by the mean of what it heard.

        A statistic `v` becomes the mean of `v + trust · (heard − v)`.
        """
        mixed = dict(buffers)
        for buffer in plan.buffers:
            if buffer.statistic and buffer.name in self.statistics:
                old, heard = buffers[buffer.name], self.statistics[buffer.name]
                new = old + (heard - self.trust * old) / self.whole
                mixed[buffer.name] = np.asarray(new, dtype=old.dtype)
        return mixed


def pack_pending(pending: Pending | None) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the sums as arrays and entries of a checkpoint; none without movements."""
    if pending is None:
        return {}, {}
    arrays: dict[str, Array] = {_TOTAL: pending.total, _HELD: pending.held}
    arrays |= {f"{_STATISTIC}{name}": array for name, array in pending.statistics.items()}
    numbers = {"number": pending.number, "whole": pending.whole, "trust": pending.trust}
    return arrays, {"pending": numbers}


def unpack_pending(state: Mapping[str, Any], arrays: Mapping[str, Array]) -> Pending | None:
    """Return what `pack_pending` packed. Raises `KeyError` if something is missing."""
    if "pending" not in state:
        return None
    numbers = state["pending"]
    statistics = {
        name.removeprefix(_STATISTIC): array
        for name, array in arrays.items()
        if name.startswith(_STATISTIC)
    }
    return Pending(
        arrays[_TOTAL],
        arrays[_HELD],
        numbers["number"],
        statistics,
        numbers["whole"],
        numbers["trust"],
    )
