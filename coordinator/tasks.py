"""A task: a torch model and its loss, traced once, ready to be trained in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from coordinator.errors import ConfigError
from coordinator.tracing.program import Program
from coordinator.tracing.trace import TracedModel, trace_model
from edge_sdk.protocol.layout import Array
from edge_sdk.protocol.plan import ModelPlan

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(outputs, targets) → one loss per sample."""


def _cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _per_sample(F.cross_entropy(outputs, targets.long(), reduction="none"))


def _mse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _per_sample(F.mse_loss(outputs, targets, reduction="none"))


def _bce(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _per_sample(F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"))


def _per_sample(losses: torch.Tensor) -> torch.Tensor:
    return losses.reshape(len(losses), -1).mean(1)


LOSSES: dict[str, Loss] = {
    "cross-entropy": _cross_entropy,
    "mse": _mse,
    "bce-with-logits": _bce,
}


@dataclass(frozen=True)
class Task:
    """What is trained. Made by `make_task`."""

    traced: TracedModel
    loss: Loss
    weights: dict[str, Array]
    """The initial weights."""
    buffers: dict[str, Array]

    @property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return self.traced.plan

    @property
    def train_program(self) -> Program:
        """The model in training mode, for the torch backend."""
        return self.traced.train


def make_task(
    model: torch.nn.Module,
    example_input: torch.Tensor | tuple[torch.Tensor, ...],
    *,
    loss: str | Loss = "cross-entropy",
    groups: int | None = None,
    ratios: Sequence[float] | None = None,
) -> Task:
    """Trace a model and remember its weights as the start.

    `loss` is a name from `LOSSES` or a function (outputs, targets) → one loss per sample.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(f"unknown loss {loss!r}; known are {', '.join(LOSSES)}")
        loss = LOSSES[loss]
    traced = trace_model(model, example_input, groups=groups, ratios=ratios)
    return Task(traced, loss, traced.weights_of(model), traced.buffers_of(model))
