"""The global model: weights in block order, buffers, and how a round changes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from coordinator.rules import Rule
from edge_sdk.protocol.blocks import Blocks, Float32
from edge_sdk.protocol.layout import Array
from edge_sdk.protocol.messages import Assignment, Movement
from edge_sdk.protocol.plan import ModelPlan


class GlobalModel:
    """θ and the buffers of one task. Changes only in `commit`, and there all at once."""

    def __init__(
        self, plan: ModelPlan, weights: Mapping[str, Array], buffers: Mapping[str, Array]
    ) -> None:
        plan.check_buffers(buffers)
        self.plan = plan
        self.theta: Float32 = plan.flatten(weights)
        self.buffers = {name: array.copy() for name, array in buffers.items()}

    @property
    def weights(self) -> dict[str, Float32]:
        """The weights as tensors (copies)."""
        return self.plan.unflatten(self.theta)

    @property
    def digest(self) -> str:
        """SHA-256 over weights and buffers: equal if and only if all bits are."""
        sha = hashlib.sha256(self.theta.tobytes())
        for name in sorted(self.buffers):
            sha.update(self.buffers[name].tobytes())
        return sha.hexdigest()

    def fetch(self, assignment: Assignment) -> tuple[Blocks, dict[str, Array]]:
        """What a device needs to train its groups (an `edge_sdk.app.ModelSource`)."""
        groups = assignment.groups
        return self.plan.select(self.theta, groups), self.plan.cut_buffers(self.buffers, groups)

    def commit(self, rule: Rule, movements: Sequence[Movement]) -> None:
        """Apply a rule to movements in device-name order."""
        theta = self.theta + rule(self.plan, movements)
        buffers = mean_statistics(self.plan, self.buffers, movements)
        self.theta, self.buffers = theta, buffers


def mean_statistics(
    plan: ModelPlan, buffers: Mapping[str, Array], movements: Sequence[Movement]
) -> dict[str, Array]:
    """New buffers: statistics averaged over the devices that covered them, the rest unchanged."""
    totals = {buffer.name: np.zeros(buffer.shape) for buffer in plan.buffers if buffer.statistic}
    counts = {name: np.zeros(total.shape) for name, total in totals.items()}
    for movement in movements:
        for name, places in plan.statistic_places(movement.groups).items():
            totals[name][places] += movement.statistics[name]
            counts[name][places] += 1
    new = dict(buffers)
    for name, total in totals.items():
        mean = total / np.maximum(counts[name], 1)
        new[name] = np.where(counts[name] > 0, mean, buffers[name]).astype(buffers[name].dtype)
    return new
