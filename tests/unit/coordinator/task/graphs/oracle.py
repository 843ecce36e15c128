"""Compiled tasks, random cases, and the same numbers from torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from benchmarks.models import Family
from coordinator.task.graphs.cache import compiled_graphs
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.protocol.task.codec import fitted
from edge_sdk.protocol.task.graphs import GraphEntry, Kind
from tests.unit.coordinator.task.tracing.zoo import MODELS
from tests.waiting import locked

__all__ = [
    "LEVELS",
    "MODELS",
    "Compiled",
    "CompiledModel",
    "assert_close",
    "autograd",
    "compile_family",
    "compiled_once",
    "feeds_of",
    "task_of",
]

LEVELS = (1.0, 0.5)


@dataclass(frozen=True)
class Compiled:
    """A task with its graphs."""

    family: Family
    task: Task
    graphs: CompiledGraphs

    def groups(self, level: float, seed: int) -> dict[str, list[int]]:
        """A random submodel of this level."""
        rng = np.random.default_rng(seed)
        return {
            axis.name: rng.permutation(len(axis.groups))[: axis.wanted(level)].tolist()
            for axis in self.task.plan.axes
        }

    def entry(self, kind: Kind, groups: Groups, batch: int) -> GraphEntry:
        plan = self.task.plan
        return self.graphs.manifest.pick(kind, plan.kept_atoms(plan.choose(groups)), batch)

    def file(self, entry: GraphEntry, groups: Groups) -> bytes:
        """The graph's file as a device loads it for this submodel."""
        plan = self.task.plan
        kept = plan.kept_atoms(plan.choose(groups))
        return fitted(entry, self.graphs.files[entry.sha256], kept)

    def run(self, kind: Kind, groups: Groups, feeds: dict[str, Array]) -> dict[str, Array]:
        """What the device computes: exactly the manifest's inputs go in."""
        entry = self.entry(kind, groups, len(feeds["x0"]))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            self.file(entry, groups), options, providers=["CPUExecutionProvider"]
        )
        names = [port.name for port in entry.outputs]
        values = session.run(names, {port.name: feeds[port.name] for port in entry.inputs})
        return dict(zip(names, values, strict=True))


CompiledModel = Callable[[str], Compiled]
"""Gives a model of the zoo with its graphs, by its name."""


def task_of(family: Family) -> Task:
    """A task that trains a model of this family."""
    return make_task(family.model(), family.inputs(2), groups=2)


def compile_family(family: Family) -> Compiled:
    """A model of this family with its graphs."""
    task = task_of(family)
    return Compiled(family, task, compile_graphs(task, levels=LEVELS))


def compiled_once(task: Task, shared: Path, levels: Sequence[float]) -> CompiledGraphs:
    """A task's graphs, compiled by one of the workers that share this folder."""
    with locked(shared / f"{task.plan.hash}.lock"):
        return compiled_graphs(task, cache_dir=shared / "graphs", levels=levels)


def feeds_of(made: Compiled, groups: Groups, batch: int, seed: int = 0) -> dict[str, Array]:
    """Random numbers for every input a gradient graph may have."""
    plan, rng = made.task.plan, np.random.default_rng(seed)
    feeds: dict[str, Array] = {
        "x0": made.family.inputs(batch, seed).numpy(),
        "targets": rng.integers(0, made.family.classes, batch),
        "sample_weights": rng.uniform(0.2, 2, batch).astype(np.float32),
    }
    for name, array in plan.cut(made.task.weights, groups).items():
        feeds[f"w:{name}"] = array + rng.normal(0, 0.02, array.shape).astype(np.float32)
    for name, array in plan.cut_buffers(made.task.buffers, groups).items():
        feeds[f"b:{name}"] = array
    for axis in plan.axes:
        feeds[f"s:{axis.name}"] = np.array(rng.uniform(0.8, 1.5), dtype=np.float32)
    kept = plan.kept_atoms(plan.choose(groups))
    for index, (p, shape) in enumerate(made.task.train_program.at(kept, batch, True).masks):
        feeds[f"m{index}"] = (rng.random(shape) >= p).astype(np.float32) / np.float32(1 - p)
    return feeds


def autograd(task: Task, groups: Groups, feeds: dict[str, Array]) -> dict[str, Array]:
    """Loss, gradients and new statistics of the weighted batch, by torch."""
    plan = task.plan

    def tensors(prefix: str, names: list[str]) -> list[torch.Tensor]:
        return [torch.tensor(feeds[prefix + name]) for name in names]

    forward = task.train_program.at(plan.kept_atoms(plan.choose(groups)), len(feeds["x0"]), True)
    weights = tensors("w:", [tensor.name for tensor in plan.tensors])
    for weight in weights:
        weight.requires_grad_()
    buffers = tensors("b:", [buffer.name for buffer in plan.buffers])
    scales = tensors("s:", [axis.name for axis in plan.axes])
    masks = tensors("m", [str(index) for index in range(len(forward.masks))])
    outputs = forward(weights, buffers, [torch.tensor(feeds["x0"])], scales, masks)
    share = feeds["sample_weights"] / feeds["sample_weights"].sum()
    losses = task.loss(outputs, torch.tensor(feeds["targets"]))
    loss = torch.stack([losses[i] * float(share[i]) for i in range(len(share))]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    found: dict[str, Array] = {"loss": loss.detach().numpy()}
    for tensor, weight in zip(plan.tensors, weights, strict=True):
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found[f"g:{tensor.name}"] = grad.numpy()
    for buffer, value in zip(plan.buffers, buffers, strict=True):
        if buffer.statistic:
            found[f"n:{buffer.name}"] = value.numpy()
    return found


def assert_close(got: dict[str, Array], wanted: dict[str, Array], tolerance: float = 2e-5) -> None:
    """Gradients to within a share of the largest one; everything else of its own largest."""
    assert set(got) == set(wanted)
    largest = max(np.abs(array).max() for name, array in wanted.items() if name.startswith("g:"))
    for name, array in wanted.items():
        assert got[name].shape == array.shape, name
        assert got[name].dtype == array.dtype, name
        scale = largest if name.startswith("g:") else max(1e-3, np.abs(array).max())
        error = np.abs(got[name] - array).max() / scale
        assert error <= tolerance, f"{name}: {error:.1e}"
