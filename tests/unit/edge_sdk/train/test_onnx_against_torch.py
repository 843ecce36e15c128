"""The onnx backend on compiled graphs against the torch backend on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch.nn import functional as F

from benchmarks.models import FAMILIES, Family, LeNet, ViT, cnn
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job
from edge_sdk.train.inference import Predictor
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.unit.coordinator.task.graphs.oracle import compiled_once

TOLERANCE = 1e-5
"""Of the largest movement, after five steps. Both sum the same float32 terms in another order:
6e-8 a rounding, some hundred terms, a dozen layers. A wrong factor or mask is off by 1e-2."""

TOLERANCE_50 = 1e-4
"""After 50 steps: rounding grows with every step, and faster where momentum carries it on."""

ROUNDING = 2.0**-23
"""Of the largest weight, a step: a movement is a difference of weights that are rounded."""

PLAIN = LocalRule(learning_rate=0.05, rescale=0)
RULES = {
    "plain": PLAIN,
    "momentum": replace(PLAIN, momentum=0.9, weight_decay=0.02),
    "clip": replace(PLAIN, clip_norm=0.2),
    "sam": replace(PLAIN, sam_radius=0.1),
    "proximal": replace(PLAIN, learning_rate=0.1, proximal=0.5),
    "rescale": replace(PLAIN, rescale=0.5),
    "all": LocalRule(
        learning_rate=0.1,
        momentum=0.5,
        weight_decay=0.01,
        clip_norm=0.2,
        sam_radius=0.1,
        proximal=0.2,
        rescale=0.5,
    ),
}
TRAINED: dict[str, Family] = {
    "mlp": FAMILIES["mlp"],
    "lenet-28": FAMILIES["lenet-28"],
    "lenet-dropout": Family(lambda: LeNet(1, 28, dropout=0.4), (1, 28, 28), 10),
    "cnn": Family(lambda: cnn(side=16), (3, 16, 16), 10),
    "depthwise-cnn": replace(FAMILIES["depthwise-cnn"], shape=(3, 16, 16)),
    "text": FAMILIES["text"],
    "sensor-cnn": FAMILIES["sensor-cnn"],
    "resnet-gn": replace(FAMILIES["resnet-gn"], shape=(3, 12, 12)),
    "resnet-bn": replace(FAMILIES["resnet-bn"], shape=(3, 12, 12)),
    "vit": Family(lambda: ViT(depth=1), (3, 32, 32), 10),
}
Choice = dict[str, tuple[int, ...]]
CompiledModel = Callable[[str], CompiledGraphs]


@pytest.fixture(autouse=True, scope="module")
def smooth() -> Iterator[None]:
    """No kinks while these tests run: GELU for ReLU, mean for max.

    At a kink a difference in the last bit turns a whole gradient on or off. That the graphs
    compute ReLU and max is checked where they are compiled.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "relu", lambda x, inplace=False: F.gelu(x))
        patch.setattr(F, "hardtanh", lambda x, *_, **__: F.gelu(x))  # ReLU6
        patch.setattr(F, "max_pool1d", lambda x, size, *_, **__: F.avg_pool1d(x, size))
        patch.setattr(F, "max_pool2d", lambda x, size, *_, **__: F.avg_pool2d(x, size))
        yield


@cache
def task_of(name: str) -> Task:
    """A task whose norms and biases are not the zeros and ones they start as."""
    model = TRAINED[name].model(seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(torch.empty_like(tensor).uniform_(-0.1, 0.1, generator=generator))
    return make_task(model, TRAINED[name].inputs(2), groups=4)


@pytest.fixture(scope="module")
def compiled(shared: Path) -> CompiledModel:
    """Gives a model's graphs."""
    return cache(lambda name: compiled_once(task_of(name), shared, levels=(1.0, 0.5)))


def some_groups(task: Task, graphs: CompiledGraphs, seed: int) -> Choice:
    """One to three of the four groups of every axis; two where graphs are made for a level."""
    rng = np.random.default_rng(seed)
    symbolic = all(entry.kept is None for entry in graphs.manifest.graphs)
    return {
        axis.name: tuple(
            sorted(rng.permutation(4)[: rng.integers(1, 4) if symbolic else 2].tolist())
        )
        for axis in task.plan.axes
    }


def job_of(task: Task, choice: Choice, rule: LocalRule) -> Job:
    return Job(
        groups=choice,
        weights=task.plan.cut(task.weights, choice),
        buffers=task.plan.cut_buffers(task.buffers, choice),
        rule=rule,
        mask_stream=stream(4, "masks"),
    )


def batches_of(name: str, sizes: list[int]) -> list[Batch]:
    rng = np.random.default_rng(3)
    family = TRAINED[name]
    return [
        Batch((family.inputs(size, seed=step).numpy(),), rng.integers(family.classes, size=size))
        for step, size in enumerate(sizes)
    ]


def assert_close(
    got: Mapping[str, Array],
    wanted: Mapping[str, Array],
    start: Mapping[str, Array],
    relative: float,
    steps: int,
) -> None:
    assert set(got) == set(wanted)
    movement, weight = (max(np.abs(a).max() for a in each.values()) for each in (wanted, start))
    assert movement > 1e-3
    bound = relative * movement + steps * ROUNDING * weight
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=bound, err_msg=name)


def compare(
    name: str, graphs: CompiledGraphs, rule: LocalRule, seed: int, sizes: list[int], relative: float
) -> None:
    task = task_of(name)
    choice = some_groups(task, graphs, seed)
    backends: list[Backend] = [
        TorchBackend(task),
        OnnxBackend(task.plan, graphs.manifest, graphs.files),
    ]
    batches = batches_of(name, sizes)
    wanted, got = (each.train(job_of(task, choice, rule), batches) for each in backends)
    start = job_of(task, choice, rule).weights
    assert_close(got.movement, wanted.movement, start, relative, len(sizes))
    assert set(got.statistics) == set(wanted.statistics)
    for key, array in wanted.statistics.items():
        assert got.statistics[key].dtype == array.dtype
        np.testing.assert_allclose(got.statistics[key], array, rtol=10 * relative, atol=relative)
    for field in ("first_loss", "mean_loss", "last_loss"):
        there, here = getattr(wanted.metrics, field), getattr(got.metrics, field)
        assert here == pytest.approx(there, rel=relative)
    assert (got.metrics.steps, got.metrics.samples) == (len(sizes), sum(sizes))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TRAINED)
def test_movement_equals_torch(name: str, rule: str, seed: int, compiled: CompiledModel) -> None:
    compare(name, compiled(name), RULES[rule], 10 * seed + len(name), [8, 8, 8, 8, 3], TOLERANCE)


@pytest.mark.parametrize("name", TRAINED)
def test_movement_equals_torch_after_50_steps(name: str, compiled: CompiledModel) -> None:
    compare(name, compiled(name), RULES["all"], len(name), [4] * 50, TOLERANCE_50)


@pytest.mark.parametrize("name", TRAINED)
def test_predictions_equal_torch(name: str, compiled: CompiledModel) -> None:
    task, graphs = task_of(name), compiled(name)
    inputs = batches_of(name, [7])[0].inputs
    predictor = Predictor(task.plan, graphs.manifest, graphs.files)
    got = predictor.predict(task.weights, task.buffers, inputs, batch_size=4)
    wanted = task.traced.predict(task.weights, task.buffers, inputs)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
