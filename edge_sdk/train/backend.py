"""What every training backend is: submodel weights and batches in, a movement out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from edge_sdk.protocol.errors import NonFiniteError
from edge_sdk.protocol.layout import Array
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.plan import Groups, ModelPlan


class Batch(NamedTuple):
    """One step's data: the model's inputs, each with the batch first, and the targets."""

    inputs: tuple[Array, ...]
    targets: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One device's training in one round.

    `weights` and `buffers` are the submodel's, cut to `groups`; they are never modified.
    `mask_stream` draws dropout masks.
    """

    groups: Groups
    weights: Mapping[str, Array]
    buffers: Mapping[str, Array]
    rule: LocalRule
    mask_stream: np.random.Generator


@dataclass(frozen=True, slots=True)
class Metrics:
    """What was seen while training."""

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


class Backend(Protocol):
    """Trains submodels of one task."""

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """Take one step per batch and return the movement.

        `should_stop` is polled before every step. Raises `TrainingStopped` when it says so,
        `NonFiniteError` when a loss or the movement is not finite, `TensorError` or `GroupError`
        when the job does not fit the plan, `TrainingError` when there is no batch; nothing is
        returned then.
        """


def check_loss(loss: float, step: int) -> float:
    """The loss, if it is finite."""
    if not np.isfinite(loss):
        raise NonFiniteError(
            f"the loss is {loss} at step {step}: lower the learning rate or set clip_norm"
        )
    return loss


def check_movement(movement: Mapping[str, Array]) -> None:
    """Raise `NonFiniteError` if any number is NaN or infinite."""
    for name, array in movement.items():
        if not np.isfinite(array).all():
            raise NonFiniteError(f"the movement of {name!r} is not finite")


def summarise(losses: list[float], samples: int) -> Metrics:
    """Metrics of a training from its losses."""
    return Metrics(len(losses), samples, losses[0], float(np.mean(losses)), losses[-1])
