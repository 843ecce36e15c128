"""Watches a run from outside: does the model go where honest devices lead it?

In every round, the model's step is compared with the mean of the honest devices' movements, over
the blocks that few devices hold and over all others apart. A cosine of 1 is the step that honest
devices alone would have made, 0 has nothing to do with it, below 0 leads away from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from time import process_time

import numpy as np
from numpy.typing import NDArray

from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Backend, Job, Trained

Float64 = NDArray[np.float64]

FEW = 2
"""Coverage up to which a robust mean means nothing: of two, nobody can say who is wrong."""


@dataclass(slots=True)
class Watch:
    """Notes the movements of a round as devices trained them, and the processor time it took."""

    plan: ModelPlan
    momentum: float
    """Momentum of the server, which is taken out of the model's steps."""
    train_s: float = 0.0
    """Processor time of all training."""
    made: dict[str, Blocks] = field(default_factory=dict)
    """Movements of the open round by device."""
    few: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)
    """Cosines of rounds, over the blocks that at most `FEW` hold, and over the others."""
    few_share: list[float] = field(default_factory=list)
    """Of every round, the share of the trained parameters that at most `FEW` hold."""
    _moment: Float64 | None = None

    def backend(self, backend: Backend, device: str) -> Backend:
        """Return the backend of a device, watched."""
        return _Watched(backend, self, device)

    def closed(
        self, before: Float32, after: Float32, counted: Collection[str], honest: Collection[str]
    ) -> None:
        """Compare the step of a round that counted these devices."""
        plan = self.plan
        step = after.astype(np.float64) - before
        total, holders = np.zeros(plan.parameters), np.zeros(plan.block_count)
        coverage = np.zeros(plan.block_count)
        for device, blocks in self.made.items():
            coverage[blocks.ids] += device in counted
            if device in honest:
                holders[blocks.ids] += 1
                for whole, within in block_runs(blocks.ids, plan.block_offsets):
                    total[whole] += blocks.values[within]
        self.made.clear()
        spread = np.repeat(coverage, plan.block_sizes)
        pushed = np.zeros(plan.parameters) if self._moment is None else self._moment
        movement = step - self.momentum * pushed
        self._moment = np.where(spread > 0, step, pushed)
        mean = total / np.maximum(1, np.repeat(holders, plan.block_sizes))
        for rows, found in (
            ((spread > 0) & (spread <= FEW), self.few),
            (spread > FEW, self.many),
        ):
            cosine = agreement(movement[rows], mean[rows])
            if cosine is not None:
                found.append(cosine)
        if trained := int((spread > 0).sum()):
            self.few_share.append(int(((spread > 0) & (spread <= FEW)).sum()) / trained)


class _Watched:
    """Trains with another backend and notes the movement."""

    def __init__(self, backend: Backend, watch: Watch, device: str) -> None:
        self._backend, self._watch, self._device = backend, watch, device

    @property
    def plan(self) -> ModelPlan:
        return self._backend.plan

    @property
    def data(self) -> DataSpec | None:
        return self._backend.data

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        started = process_time()
        try:
            trained = self._backend.train(job, batches, should_stop=should_stop)
        finally:
            self._watch.train_s += process_time() - started
        self._watch.made[self._device] = self.plan.scatter(trained.movement, job.groups)
        return trained


def agreement(one: Float64, other: Float64) -> float | None:
    """Return the cosine of two vectors; None if one of them is 0 or not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
        return float(np.dot(one, other)) / lengths if 0 < lengths < np.inf else None
