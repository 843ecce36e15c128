"""A task: a torch model and its loss, traced once, ready to be trained in slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.nn import functional as F

from coordinator.errors import ConfigError
from coordinator.task.tracing.capture.calls import ExampleInput
from coordinator.task.tracing.capture.capture import named_arrays
from coordinator.task.tracing.program import TracedProgram
from coordinator.task.tracing.trace import LayerNorms, TracedModel, trace_model
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan, Regions
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription

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


CUSTOM = "custom"
"""Name of any loss that is not in `LOSSES`."""


@dataclass(frozen=True)
class Task:
    """A model to train, with its loss. Made by `make_task`."""

    traced: TracedModel
    loss: Loss
    weights: dict[str, Array]
    """The initial weights."""
    buffers: dict[str, Array]
    example_targets: torch.Tensor | None = None
    """A batch of targets; None: derived from the loss and the model's outputs."""
    classes: tuple[str, ...] = ()
    """Names of class 0, 1 …; empty: they have none."""
    descriptions: tuple[InputDescription, ...] = ()
    """What the inputs mean, in order; those that are not described take arrays in their form."""
    names: Mapping[str, str] = field(default_factory=dict)
    """See `SavedModel`."""

    @property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return self.traced.plan

    @property
    def train_program(self) -> TracedProgram:
        """The model in training mode, for the torch backend."""
        return self.traced.train

    @property
    def loss_name(self) -> str:
        """The loss's name in `LOSSES`, or `CUSTOM`."""
        return next((name for name, loss in LOSSES.items() if loss is self.loss), CUSTOM)

    @cached_property
    def data(self) -> DataSpec:
        """Format of the data a device must provide.

        Raises `ConfigError` when the targets of a custom loss are unknown, or when the loss or the
        description does not fit the model.
        """
        spec = DataSpec(self.train_program.inputs, self._targets())
        try:
            return spec.described(classes=self.classes, inputs=self.descriptions)
        except GraphError as error:
            raise ConfigError(f"the task's description does not fit its model: {error}") from error

    def _targets(self) -> ArraySpec:
        given, name, outputs = self.example_targets, self.loss_name, self.traced.train.output_shape
        if name == CUSTOM:
            if given is None:
                raise ConfigError(
                    "this is a custom loss: give make_task example_targets, a batch of targets"
                )
            return ArraySpec(_dtype(given), tuple(given.shape[1:]))
        if name == "cross-entropy":
            if not outputs:
                raise ConfigError(
                    "cross-entropy needs a score for each class, but the model gives one number "
                    "per sample; use 'bce-with-logits' or 'mse'"
                )
            derived = ArraySpec("int64", outputs[1:], outputs[0] - 1)
        else:
            derived = ArraySpec("float32", outputs, 1 if name == "bce-with-logits" else None)
        if given is None:
            return derived
        if tuple(given.shape[1:]) != derived.shape:
            raise ConfigError(
                f"example_targets have shape {tuple(given.shape[1:])} per sample, but {name} of "
                f"this model's outputs needs {derived.shape}"
            )
        return ArraySpec(_dtype(given), derived.shape, derived.highest)


def make_task(
    model: torch.nn.Module,
    example_input: ExampleInput,
    *,
    loss: str | Loss = "cross-entropy",
    groups: int | None = None,
    ratios: Sequence[float] | None = None,
    example_targets: torch.Tensor | None = None,
    output: str | int | None = None,
    layer_norm: LayerNorms = "whole",
    regions: Regions = "width",
    classes: Sequence[str] = (),
    inputs: InputDescription | Sequence[InputDescription] = (),
) -> Task:
    """Trace a model and take its weights as the initial ones.

    `example_input`, `output`, `layer_norm` and `regions` are those of `trace_plan`.
    `loss` is a name from `LOSSES` or a function (outputs, targets) → one loss per sample.
    `example_targets` is a batch of targets. A custom loss requires it; the named losses need it
    only when labels are not int64 or numbers are not float32.
    `classes` are the names of class 0, 1 …, and `inputs` says what the inputs mean, so that devices
    can read photos, tables, time series and sound without code (docs/data.md). Raises
    `ConfigError`.
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(f"unknown loss {loss!r}; choose one of {', '.join(LOSSES)}")
        loss = LOSSES[loss]
    if example_targets is not None and (example_targets.ndim == 0 or not len(example_targets)):
        raise ConfigError("example_targets must be a batch: at least one sample, in dimension 0")
    traced = trace_model(
        model,
        example_input,
        groups=groups,
        ratios=ratios,
        output=output,
        layer_norm=layer_norm,
        regions=regions,
    )
    weights, buffers = traced.weights_of(model), traced.buffers_of(model)
    described = (inputs,) if isinstance(inputs, InputDescription) else tuple(inputs)
    names = _state_names(model, traced.plan.unstacked({**weights, **buffers}))
    task = Task(traced, loss, weights, buffers, example_targets, tuple(classes), described, names)
    if classes or described:
        _ = task.data  # a description that does not fit is an error here, not when compiling
    return task


def _state_names(model: torch.nn.Module, known: Iterable[str]) -> dict[str, str]:
    """Return the known name for each of a `state_dict`; empty if all have the same names."""
    found = named_arrays(model)
    by_array = {id(found[name]): name for name in known if name in found}
    state = model.state_dict(keep_vars=True)
    names = {name: by_array[id(each)] for name, each in state.items() if id(each) in by_array}
    return {} if names == {name: name for name in known} else names


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
