"""The interface of every training backend: submodel weights and batches in, a movement out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import NonFiniteError, TrainingError, TrainingStopped
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array, Raw
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.local import Arrays, LocalSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One device's training in one round.

    `weights` and `buffers` are the submodel's, cut to `groups`; buffers are never modified, and
    weights only with `subtract_start`.
    `mask_stream` draws dropout masks.

    `widths` are narrower submodels within `groups`, for a rule that trains several; `width_stream`
    draws from them. `passes`: 1 on a device that cannot afford two in a step; a sandwich then
    trains one drawn width a step, as ordered dropout does.

    `classes` are those of the device's samples, for a rule that leaves out the scores of others.

    `owned`: nobody else changes `weights` or `spare` meanwhile, so that no copy is needed to guard
    them. `spare`: memory that nobody needs any more; None: there is none. `subtract_start`, with
    `owned` alone, subtracts the weights that the job began with, and may use memory that it is
    given: then `weights` themselves may be trained, and no copy is kept. None: it is.

    `correction`, shaped as `weights`, is added to every step's gradient (SCAFFOLD's `c − c_n`).
    """

    groups: Groups
    weights: Mapping[str, Array]
    buffers: Mapping[str, Array]
    rule: LocalRule
    mask_stream: np.random.Generator
    widths: tuple[Groups, ...] = ()
    width_stream: np.random.Generator | None = None
    passes: int = 2
    classes: tuple[int, ...] = ()
    correction: Mapping[str, Array] | None = None
    owned: bool = False
    spare: Raw | None = None
    subtract_start: Callable[[Mapping[str, Array], Raw | None], None] | None = None

    @property
    def is_nested(self) -> bool:
        """True if steps train more than the submodel of `groups`."""
        return bool(self.widths) and self.rule.widths != "own"

    @property
    def distils(self) -> bool:
        """True if the outputs of `groups` are among the targets of the narrower ones."""
        return self.is_nested and self.passes > 1 and self.rule.distillation > 0

    def class_mask(self, count: int) -> NDArray[np.float32]:
        """Return a factor for the score of each of `count` classes: 1, or 0 to leave it out.

        Raises `TrainingError` if the rule wants the device's own classes and none is known.
        """
        if self.rule.classes == "all":
            return np.ones(count, dtype=np.float32)
        own = [number for number in self.classes if 0 <= number < count]
        if not own:
            raise TrainingError(f"none of the device's classes {self.classes} is among {count}")
        mask = np.zeros(count, dtype=np.float32)
        mask[own] = 1
        return mask

    def drawn(self) -> Iterator[tuple[int, ...]]:
        """Yield the widths of each step, without end: 0 is `groups`, n is `widths[n - 1]`.

        Widths are dealt like cards: each comes once, in a drawn order, before any comes again. A
        step's width is then uniform, and a round takes about the same time whatever was drawn.

        Everybody who asks gets the same ones; `width_stream` itself stays as it is. Raises
        `TrainingError` if there is none.
        """
        if not self.is_nested:
            yield from repeat((0,))
        if self.width_stream is None:
            raise TrainingError("a job with narrower widths needs a stream that draws from them")
        stream, narrower = deepcopy(self.width_stream), len(self.widths)
        both = self.rule.widths == "sandwich" and self.passes > 1
        while True:
            for width in stream.permutation(np.arange(both, 1 + narrower)).tolist():
                yield (0, width) if both else (width,)

    def step_macs(self, plan: ModelPlan) -> Iterator[int]:
        """Yield the multiply-accumulates of each step's forward passes, per sample."""
        macs = [plan.submodel_macs(groups) for groups in (self.groups, *self.widths)]
        return (sum(macs[width] for width in widths) for widths in self.drawn())


@dataclass(frozen=True, slots=True)
class Metrics:
    """Measurements of a training.

    Losses are those of the assigned submodel, in the steps that trained it; where none did, those
    of the narrower ones that were trained.
    """

    steps: int
    samples: int
    first_loss: float
    mean_loss: float
    last_loss: float


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A finished training: weights after minus weights before, and the new statistics."""

    movement: dict[str, Array]
    statistics: dict[str, Array]
    metrics: Metrics
    spare: Raw | None = None
    """Memory that the training does not need any more; None: there is none."""


class Backend(Protocol):
    """Trains submodels of one task."""

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""

    @property
    def data(self) -> DataSpec | None:
        """Format of the task's data; None: unknown."""

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """Take one step per batch and return the movement.

        `should_stop` is polled before every step. Raises `TrainingStopped` when it returns True,
        `NonFiniteError` when a loss or the movement is not finite, `TensorError` or `GroupError`
        when the job does not fit the plan, `TrainingError` when there is no batch; then nothing is
        returned.
        """


class TimedBackend:
    """Trains with another backend, and makes each step take its time.

    `stepping` returns what to call after every step of a job that is done; `finished` is called
    when a training has ended, in any way.
    """

    def __init__(
        self,
        backend: Backend,
        stepping: Callable[[Job], Callable[[Batch], object]],
        finished: Callable[[], object] = lambda: None,
    ) -> None:
        self._backend = backend
        self._stepping = stepping
        self._finished = finished

    @property
    def plan(self) -> ModelPlan:
        """See `Backend`."""
        return self._backend.plan

    @property
    def data(self) -> DataSpec | None:
        """See `Backend`."""
        return self._backend.data

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """See `Backend`."""
        stepped = self._stepping(job)

        def timed() -> Iterator[Batch]:
            for batch in batches:
                yield batch
                # Asked for the next batch: this one's step is done, unless it was stopped.
                stepped(batch)

        try:
            return self._backend.train(job, timed(), should_stop=should_stop)
        finally:
            self._finished()


class Objective(Protocol):
    """Loss and gradients of the current batch, as `LocalSteps` asks for them."""

    def batch(self, batch: Batch) -> bool:
        """Switch to the next batch; data, dropout masks and widths stay the same until the next
        call. Return True if its loss is the assigned submodel's.
        """

    def __call__(self, weights: Arrays) -> tuple[float, Arrays]:
        """Return (mean loss, gradients) at these weights."""


def take_steps(
    objective: Objective,
    steps: LocalSteps,
    weights: Arrays,
    batches: Iterable[Batch],
    should_stop: Callable[[], bool],
) -> Metrics:
    """Take one step per batch, in place; the loop of every backend. Raises as `Backend.train`."""
    losses: list[float] = []
    own: list[float] = []
    samples = 0
    for batch in batches:
        if should_stop():
            raise TrainingStopped(len(losses))
        is_own = objective.batch(batch)
        losses.append(_check_loss(steps.step(weights, objective), len(losses) + 1))
        own += losses[-1:] if is_own else []
        samples += len(batch.targets)
    if not losses:
        raise TrainingError("there is no batch to train on: the device has no data")
    told = own or losses
    return Metrics(len(losses), samples, told[0], float(np.mean(told)), told[-1])


def draw_mask(stream: np.random.Generator, probability: float, shape: tuple[int, ...]) -> Array:
    """Draw a dropout mask: 0 with this probability, else 1 / (1 − probability)."""
    kept = stream.random(shape, dtype=np.float32) >= probability
    mask: Array = np.asarray(kept.astype(np.float32) / np.float32(1 - probability))
    return mask


def check_movement(movement: Mapping[str, Array]) -> None:
    """Raise `NonFiniteError` if any number is NaN or infinite."""
    for name, array in movement.items():
        if not np.isfinite(array).all():
            raise NonFiniteError(f"the movement of {name!r} is not finite")


def _check_loss(loss: float, step: int) -> float:
    if not np.isfinite(loss):
        raise NonFiniteError(
            f"the loss is {loss} at step {step}: lower the learning rate or set clip_norm"
        )
    return loss
