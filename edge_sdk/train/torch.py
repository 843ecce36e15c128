"""The torch backend: trains the narrow model itself, on CPU or CUDA.

It is the oracle in tests, and the choice for machines that have the task's Python code. It knows
nothing about models: the task gives it a forward pass for each width (`coordinator.task.tracing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import TesseraError, TrainingError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Job, Objective, Trained, check_movement, draw_mask, take_steps
from edge_sdk.train.local import Arrays, LocalSteps, axis_scales
from edge_sdk.train.nested import NestedObjective


class Forward(Protocol):
    """A submodel's forward pass at one batch size, in training mode."""

    @property
    def masks(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """Probability and mask shape of every dropout."""

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        scales: Sequence[float | torch.Tensor],
        masks: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return outputs; buffers that are statistics are updated in place."""


class ModelProgram(Protocol):
    """A model at every width."""

    @property
    def at(self) -> Callable[[tuple[int, ...], int, bool], Forward]:
        """(atoms kept per axis, batch size, use scales) → forward pass."""


class TorchTask(Protocol):
    """The parts of a task that the backend needs."""

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""

    @property
    def train_program(self) -> ModelProgram:
        """The model in training mode."""

    @property
    def loss(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """(outputs, targets) → one loss per sample."""

    @property
    def loss_name(self) -> str:
        """Name of the loss."""

    @property
    def data(self) -> DataSpec:
        """Format of the task's data. May raise `TesseraError` if it is unknown."""


class TorchBackend:
    """A `Backend` on torch."""

    def __init__(self, task: TorchTask, *, device: str = "cpu", threads: int = 1) -> None:
        """`threads`: intra-op threads while training; torch's setting is restored afterwards."""
        if threads < 1:
            raise TrainingError(f"threads must be at least 1, not {threads}")
        self._task = task
        self._device = torch.device(device)
        self._threads = threads

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""
        return self._task.plan

    @property
    def data(self) -> DataSpec | None:
        """Format of the task's data; None for a custom loss without example targets."""
        try:
            return self._task.data
        except TesseraError:
            return None

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """See `Backend.train`."""
        plan = self.plan
        plan.check(job.weights, job.groups)
        plan.check_buffers(job.buffers, job.groups)
        if job.correction is not None:
            plan.check(job.correction, job.groups)
        if self._task.loss_name != "cross-entropy":
            for name, used, plain in (
                ("distillation", job.distils, "0"),
                ("classes", job.rule.classes != "all", "all"),
            ):
                if used:
                    raise TrainingError(
                        f"{name} needs scores of classes, but the loss is {self._task.loss_name}: "
                        f"set {name} to {plain}, or train with cross-entropy"
                    )
        with _threads(self._threads):
            start = self._tensors(job.weights)
            weights: Arrays = {name: tensor.clone() for name, tensor in start.items()}
            buffers = self._tensors(job.buffers)
            own = self._objective(job, buffers)
            objective: Objective = own
            if job.is_nested:
                objective = NestedObjective(
                    plan,
                    job,
                    own,
                    lambda narrow: self._objective(narrow, self._tensors(narrow.buffers)),
                    torch.zeros_like,
                )
            correction = None if job.correction is None else self._tensors(job.correction)
            steps = LocalSteps(job.rule, start, correction)
            metrics = take_steps(objective, steps, weights, batches, should_stop)
        movement = {name: _numpy(weights[name] - start[name]) for name in start}
        check_movement(movement)
        statistics = {
            buffer.name: _numpy(buffers[buffer.name]) for buffer in plan.buffers if buffer.statistic
        }
        check_movement(statistics)
        return Trained(movement, statistics, metrics)

    def _objective(self, job: Job, buffers: Mapping[str, torch.Tensor]) -> _Objective:
        return _Objective(self._task, job, buffers, self._device)

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Copy arrays to the device: neither side's later changes reach the other."""
        return {name: torch.tensor(array, device=self._device) for name, array in arrays.items()}


class _Objective:
    """Loss and gradients of the current batch, as `LocalSteps` asks for them."""

    def __init__(
        self,
        task: TorchTask,
        job: Job,
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        plan = task.plan
        self._task = task
        self._device = device
        self._kept = plan.kept_atoms(plan.choose(job.groups))
        by_axis = axis_scales(plan, job.groups, job.rule.rescale)
        self._scales = [by_axis[axis.name] for axis in plan.axes]
        self._scaled = any(scale != 1 for scale in self._scales)
        self._names = [tensor.name for tensor in plan.tensors]
        self._buffers = [buffers[buffer.name] for buffer in plan.buffers]
        self._stream = job.mask_stream
        self._kappa = job.rule.distillation
        self._job = job
        self.outputs: torch.Tensor | None = None
        self.teacher: torch.Tensor | None = None

    def batch(self, batch: Batch) -> bool:
        """See `Objective`."""
        # Copies: data may be read-only, and a model may change its input in place.
        self._inputs = [torch.tensor(array, device=self._device) for array in batch.inputs]
        self._targets = torch.tensor(batch.targets, device=self._device)
        self._forward = self._task.train_program.at(self._kept, len(batch.targets), self._scaled)
        self._masks = [self._mask(p, shape) for p, shape in self._forward.masks]
        return True

    def __call__(self, weights: Arrays) -> tuple[float, Arrays]:
        """Return (mean loss, gradients) at these weights."""
        leaves = [weights[name].detach().requires_grad_() for name in self._names]
        outputs = self._forward(leaves, self._buffers, self._inputs, self._scales, self._masks)
        if self._job.rule.classes != "all":
            mask = torch.from_numpy(self._job.class_mask(outputs.shape[1])).to(self._device)
            outputs = masked(outputs, mask)
        self.outputs = outputs.detach()
        losses = self._task.loss(outputs, self._targets)
        if self.teacher is not None:
            losses = distilled(losses, outputs, self.teacher, self._kappa)
        loss = losses.mean()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), dict(zip(self._names, _own(grads), strict=True))

    def _mask(self, probability: float, shape: tuple[int, ...]) -> torch.Tensor:
        mask = draw_mask(self._stream, probability, shape)
        return torch.as_tensor(mask).to(self._device)


def masked(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Multiply the score of each class by its entry of `classes`, 0 or 1."""
    return outputs * classes.reshape(-1, *[1] * (outputs.ndim - 2))


def distilled(
    losses: torch.Tensor,
    outputs: torch.Tensor,
    teacher: torch.Tensor,
    kappa: float | torch.Tensor,
) -> torch.Tensor:
    """Mix into every sample's loss the cross-entropy from a wider model's outputs, as scores."""
    cross = -(torch.softmax(teacher, 1) * torch.log_softmax(outputs, 1)).sum(1)
    return (1 - kappa) * losses + kappa * cross.reshape(len(cross), -1).mean(1)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return gradients that can be changed in place one by one.

    Autograd returns one tensor for two weights that are only added, and an expanded one for a
    weight that is only summed.
    """
    seen: set[int] = set()
    own = []
    for grad in grads:
        start = grad.untyped_storage().data_ptr()
        own.append(
            grad
            if start not in seen and grad.is_contiguous()
            else grad.clone(memory_format=torch.contiguous_format)
        )
        seen.add(start)
    return own


def _numpy(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array
