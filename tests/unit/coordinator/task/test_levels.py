"""Every level is a model: its own BatchNorm statistics, against torch's own layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.levels import (
    LevelScores,
    best_level,
    evaluate_levels,
    level_model,
    pack_levels,
    score_levels,
    unpack_levels,
)
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.protocol.task.graphs import Port, SizeTerm
from edge_sdk.train.inference import Predictor

CLASSES, CHANNELS = 3, 4


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv1d(CHANNELS, 8, 3),
        nn.BatchNorm1d(8, momentum=0.3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv1d(8, 8, 3),
        nn.BatchNorm1d(8, momentum=0.01),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


@cache
def made() -> tuple[Task, CompiledGraphs]:
    task = make_task(network(), torch.randn(2, CHANNELS, 12), groups=4)
    return task, compile_graphs(task, levels=(1.0, 0.5))


def predictor() -> Predictor:
    task, graphs = made()
    return Predictor(task.plan, graphs.manifest, graphs.files)


def samples(count: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    values: Array = rng.normal(2, 3, (count, CHANNELS, 12)).astype(np.float32)
    return values


def hooked(module: nn.Sequential, x: Array, batch: int) -> dict[str, Array]:
    """Mean and variance of everything that each BatchNorm of a real module saw, batch by batch."""
    seen: dict[str, list[Array]] = {}

    def note(name: str, given: torch.Tensor) -> None:
        rows = given.detach().double().numpy()
        seen.setdefault(name, []).append(np.moveaxis(rows, 1, -1).reshape(-1, rows.shape[1]))

    for name, layer in module.named_children():
        if isinstance(layer, nn.BatchNorm1d):
            layer.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    module.train()
    with torch.no_grad():
        for at in range(0, len(x), batch):
            module(torch.from_numpy(x[at : at + batch]))
    found = {}
    for name, rows in seen.items():
        found[f"{name}.running_mean"] = np.concatenate(rows).mean(0)
        found[f"{name}.running_var"] = np.concatenate(rows).var(0)
    return found


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_moments_are_what_the_layers_of_a_torch_module_see(runtime: str) -> None:
    task, _ = made()
    runs = predictor() if runtime == "onnx" else task.traced
    x = samples(53)
    found = runs.moments(task.weights, task.buffers, [x], batch_size=20)
    assert found is not None
    assert found.count == 53
    filled = found.fill(task.buffers)
    for name, wanted in hooked(network(), x, 20).items():
        np.testing.assert_allclose(filled[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_statistics_of_a_level_are_those_of_its_narrow_module(runtime: str) -> None:
    """The submodel as a torch module of its own: BatchNorm after the first layer is unscaled."""
    task, _ = made()
    runs = predictor() if runtime == "onnx" else task.traced
    groups = {axis.name: (1, 3) for axis in task.plan.axes}
    x = samples(40)
    own = task.plan.cut(task.weights, groups)
    buffers = task.plan.cut_buffers(task.buffers, groups)
    found = runs.moments(own, buffers, [x], groups=groups, batch_size=40)
    assert found is not None
    narrow = nn.Sequential(nn.Conv1d(CHANNELS, 4, 3), nn.BatchNorm1d(4))
    narrow.load_state_dict({**narrow.state_dict(), **_tensors(own, ("0.", "1."))})
    filled, wanted = found.fill(buffers), hooked(narrow, x, 40)
    for name in ("1.running_mean", "1.running_var"):
        np.testing.assert_allclose(filled[name], wanted[name], rtol=1e-5, atol=1e-6)


def _tensors(arrays: dict[str, Array], layers: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {n: torch.tensor(a) for n, a in arrays.items() if n.startswith(layers)}


def test_level_uses_its_own_statistics_not_those_of_the_whole_model() -> None:
    task, _ = made()
    spoiled = {
        name: array + np.float32(50) if name.endswith("running_mean") else array
        for name, array in task.buffers.items()
    }
    data = ArrayData((samples(120),), np.zeros(120, dtype=np.int64))
    groups = {axis.name: (0, 1) for axis in task.plan.axes}
    choices: dict[float, Groups] = {1.0: task.plan.all_groups(), 0.5: groups}
    scores = [
        score_levels(task.traced, task.weights, buffers, choices, data, rescale=0.5)
        for buffers in (task.buffers, spoiled)
    ]
    assert scores[0] == scores[1]
    assert scores[0] is not None
    assert set(scores[0]) == {1.0, 0.5}
    models = [
        level_model(
            task.traced, task.weights, task.buffers, 0.5, groups, rescale=r, samples=data.inputs
        )
        for r in (0.0, 0.5)
    ]
    outputs = [
        task.traced.predict(m.weights, m.buffers, data.inputs, groups=m.groups, rescale=m.rescale)
        for m in models
    ]
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3  # a level is used as it was trained


def test_both_runtimes_find_the_same_statistics_and_accuracies() -> None:
    task, _ = made()
    random = np.random.default_rng(3)
    data = ArrayData((samples(600),), random.integers(0, CLASSES, 600))
    choices: dict[float, Groups] = {
        1.0: task.plan.all_groups(),
        0.5: {axis.name: (0, 1) for axis in task.plan.axes},
    }
    onnx, traced = (
        evaluate_levels(runtime, task.weights, task.buffers, choices, data, rescale=0.5)
        for runtime in (predictor(), task.traced)
    )
    for one, two in zip(onnx.levels, traced.levels, strict=True):
        assert one.accuracy == pytest.approx(two.accuracy, abs=1 / 600)
        assert one.statistics.keys() == two.statistics.keys() != set()
        for name, values in two.statistics.items():
            np.testing.assert_allclose(one.statistics[name], values, rtol=1e-4, atol=1e-5)
    whole = traced.by_level[1.0]
    buffers = {**task.buffers, **whole.statistics}
    outputs = task.traced.predict(task.weights, buffers, data.inputs)
    assert whole.accuracy == float(np.mean(outputs.argmax(1) == data.targets))


def test_level_without_a_graph_has_no_accuracy_but_the_whole_model_must_have_one() -> None:
    task, _ = made()
    whole = task.plan.all_groups()

    class Static:
        """A task whose graphs are for the whole model alone."""

        plan, moments = task.plan, task.traced.moments

        def predict(self, *arguments: Any, **options: Any) -> Array:
            if options["groups"] != only:
                raise GraphError("no graph")
            return task.traced.predict(*arguments, **options)

    only: Groups = whole
    data = ArrayData((samples(40),), np.zeros(40, dtype=np.int64))
    half = {axis.name: (0, 1) for axis in task.plan.axes}
    choices: dict[float, Groups] = {1.0: whole, 0.5: half}
    scores = evaluate_levels(Static(), task.weights, task.buffers, choices, data, rescale=0)
    assert list(scores.accuracies) == [scores.deploy] == [1.0]
    only = half
    with pytest.raises(GraphError):
        evaluate_levels(Static(), task.weights, task.buffers, choices, data, rescale=0)


@pytest.mark.parametrize("runtime", ["onnx", "torch"])
def test_single_sample_makes_a_batch_by_repetition(runtime: str) -> None:
    task, _ = made()
    runs = predictor() if runtime == "onnx" else task.traced
    x = samples(1)
    found = runs.moments(task.weights, task.buffers, [x])
    twice = runs.moments(task.weights, task.buffers, [np.concatenate([x, x])])
    assert found is not None
    assert twice is not None
    for name, mean in twice.means.items():
        np.testing.assert_array_equal(found.means[name], mean)


def test_norm_shared_by_inputs_of_two_sizes_weighs_them_by_their_positions() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(CHANNELS, 8, 1)
            self.norm = nn.BatchNorm1d(8)
            self.second = nn.Conv1d(8, 8, 3, stride=2)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x)).relu()
            x = self.norm(self.second(x)).relu()
            out: torch.Tensor = self.head(x.mean(2))
            return out

    torch.manual_seed(2)
    task = make_task(Shared(), torch.randn(2, CHANNELS, 12), groups=2)
    graphs = compile_graphs(task)  # compares its graphs with torch
    assert [entry.kind for entry in graphs.manifest.graphs].count("statistics") == 1


def test_level_that_no_statistics_graph_was_made_for_is_a_graph_error() -> None:
    task, graphs = made()
    only = [entry for entry in graphs.manifest.graphs if entry.kind == "statistics"]
    fixed = replace(
        only[0],
        kept=(8, 8),
        inputs=(),
        outputs=_fixed_ports(only[0].outputs),
        masks=(),
        activations=(),
        products=(),
    )
    manifest = replace(graphs.manifest, graphs=(fixed,))
    runs = Predictor(task.plan, manifest, {})
    groups = {axis.name: (0,) for axis in task.plan.axes}
    own, buffers = task.plan.cut(task.weights, groups), task.plan.cut_buffers(task.buffers, groups)
    with pytest.raises(GraphError, match="no statistics graph fits"):
        runs.moments(own, buffers, [samples(8)], groups=groups)


def _fixed_ports(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    return tuple(replace(port, dims=(SizeTerm(8),)) for port in ports)


def test_model_without_batch_norm_has_no_moments() -> None:
    task = make_task(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(2, 4), groups=2
    )
    assert task.traced.moments(task.weights, task.buffers, [np.ones((4, 4), np.float32)]) is None


def test_level_to_deploy_is_the_most_accurate_and_the_smallest_of_equals() -> None:
    assert best_level({1.0: 0.8, 0.5: 0.9, 0.25: 0.9}) == 0.25
    assert best_level({1.0: 0.91, 0.5: 0.9}) == 1.0


def test_deviation_between_devices_is_over_each_ones_own_test_data() -> None:
    task, _ = made()
    labels = np.random.default_rng(3).integers(0, CLASSES, 70)
    data = ArrayData((samples(70),), labels)
    own = [np.arange(0, 10), np.arange(10, 45), np.arange(45, 70), np.empty(0, np.int64)]
    choices: dict[float, Groups] = {1.0: task.plan.all_groups()}
    runtime = predictor()
    found = evaluate_levels(
        runtime, task.weights, task.buffers, choices, data, rescale=0.0, own=own
    ).by_level[1.0]
    model = level_model(
        runtime, task.weights, task.buffers, 1.0, choices[1.0], rescale=0.0, samples=data.inputs
    )
    shares = []
    for rows in own[:3]:
        outputs = runtime.predict(
            model.weights, model.buffers, [data.inputs[0][rows]], groups=choices[1.0], rescale=0.0
        )
        right = 0
        for scores, label in zip(outputs, labels[rows], strict=True):
            right += int(scores.argmax() == label)
        shares.append(right / len(rows))
    mean = sum(shares) / 3
    assert found.own_accuracy == pytest.approx(mean)
    assert found.own_deviation == pytest.approx(
        (sum((share - mean) ** 2 for share in shares) / 3) ** 0.5
    )
    assert found.own_deviation != 0
    plain = evaluate_levels(runtime, task.weights, task.buffers, choices, data, rescale=0.0)
    assert plain.by_level[1.0].own_deviation is None
    assert plain.by_level[1.0].accuracy == pytest.approx(found.accuracy)
    assert unpack_levels(*pack_levels(LevelScores((found,)))).levels[0].own_deviation == (
        found.own_deviation
    )
