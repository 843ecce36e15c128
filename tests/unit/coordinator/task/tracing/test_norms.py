"""Norms with a copy for every level, against a dense model whose norms are ordinary ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn
from torch.nn import functional as F

from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError, TraceError
from coordinator.masks import level_choices, level_groups, make_masks
from coordinator.simulate.federation import Member
from coordinator.task.export import pick_level
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.levels import level_model
from coordinator.task.saved_model import SavedModel
from coordinator.task.task import Task, make_task
from coordinator.task.tracing.norms import NormCopies, decouple_norms
from coordinator.task.tracing.trace import trace_plan
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.errors import TensorError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job
from edge_sdk.train.inference import Predictor
from edge_sdk.train.local import axis_scales
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import make_federation, random_data

COPIES = 4
NORMS = ("batch", "group", "layer")
LEVELS = {1.0: 3, 0.5: 1, 0.25: 0}
"""Copy of each level."""
RULE = LocalRule(learning_rate=0.3, rescale=0.5)


def plain(norm: str) -> nn.Sequential:
    """Hidden layers of eight units in four groups; LayerNorm keeps what it norms whole."""
    norms: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: nn.BatchNorm1d(8),
        "group": lambda: nn.GroupNorm(4, 8),
        "layer": lambda: nn.LayerNorm(8),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = nn.Sequential(
            nn.Linear(6, 8), norms[norm](), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
        )
        for parameter in model[1].parameters():
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


@cache
def compiled(norm: str) -> tuple[Task, CompiledGraphs]:
    task = make_task(decouple_norms(plain(norm), COPIES), torch.randn(4, 6), groups=4)
    return task, compile_graphs(task)


def backends(norm: str) -> dict[str, Backend]:
    task, graphs = compiled(norm)
    return {
        "torch": TorchBackend(task),
        "onnx": OnnxBackend(task.plan, graphs.manifest, graphs.files),
    }


def trained_weights(task: Task) -> dict[str, Array]:
    """Weights in which all copies differ."""
    random = np.random.default_rng(5)
    return {
        name: array + random.normal(0, 0.2, array.shape).astype(np.float32)
        for name, array in task.weights.items()
    }


class Dense:
    """The ordinary model with the norms of one copy; other groups are multiplied by zero."""

    def __init__(self, norm: str, weights: dict[str, Array], level: float) -> None:
        self.copy = LEVELS[level]
        self.model = plain(norm).train()
        self.units = torch.zeros(8)
        self.units[: int(8 * level)] = 1
        self.first = torch.ones(8) if norm == "layer" else self.units
        self.scale = level**-RULE.rescale
        values = {name.replace("1.norm", "1"): torch.tensor(each) for name, each in weights.items()}
        for name in ("1.weight", "1.bias"):
            values[name] = values[name][self.copy]
        self.model.load_state_dict(values, strict=False)

    def __call__(self, inputs: Array) -> torch.Tensor:
        """The forward pass written out, rescaled where a narrowed width is summed over."""
        first, norm, _, second, _, last = self.model
        hidden = torch.relu(norm(first(torch.tensor(inputs)))) * self.first
        hidden = hidden * (1 if self.first.all() else self.scale)
        hidden = torch.relu(second(hidden)) * self.units * self.scale
        outputs: torch.Tensor = last(hidden)
        return outputs


def batch_of(seed: int = 7) -> Batch:
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(9, 6)).astype(np.float32)
    return Batch((inputs,), random.integers(3, size=9))


@pytest.mark.parametrize("norm", NORMS)
def test_copies_are_one_axis_of_alternatives(norm: str) -> None:
    plan = compiled(norm)[0].plan
    (copies,) = [axis for axis in plan.axes if axis.alternatives]
    assert (copies.name, copies.groups) == ("copies", (1,) * COPIES)
    number = plan.axes.index(copies)
    copied = {tensor.name for tensor in plan.tensors if tensor.dims[0].axis == number}
    assert copied == {"1.weight", "1.bias"}
    widths = [len(axis.groups) for axis in plan.axes if not axis.alternatives]
    assert widths == ([4] if norm == "layer" else [4, 4])


@pytest.mark.parametrize("backend", ["torch", "onnx"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("norm", NORMS)
def test_level_trains_as_a_dense_model_with_its_own_norms(
    norm: str, level: float, backend: str
) -> None:
    task, _ = compiled(norm)
    plan, weights = task.plan, trained_weights(task)
    groups = level_groups(make_masks("nested"), plan, level)
    assert groups["copies"] == (LEVELS[level],)
    batch = batch_of()
    job = Job(
        groups=groups,
        weights=plan.cut(weights, groups),
        buffers=plan.cut_buffers(task.buffers, groups),
        rule=RULE,
        mask_stream=stream(1, "masks"),
    )
    got = backends(norm)[backend].train(job, [batch])

    dense = Dense(norm, weights, level)
    F.cross_entropy(dense(batch.inputs[0]), torch.tensor(batch.targets)).backward()  # type: ignore[no-untyped-call]
    wanted = {name: np.zeros_like(array) for name, array in weights.items()}
    for name, parameter in dense.model.named_parameters():
        assert parameter.grad is not None
        step = -RULE.learning_rate * parameter.grad.numpy()
        wanted[name][dense.copy if name in ("1.weight", "1.bias") else ...] = step
    moved = {name: np.zeros_like(array) for name, array in weights.items()}
    plan.paste(moved, got.movement, groups)
    assert np.abs(wanted["1.weight"][dense.copy]).max() > 1e-3
    for name, array in wanted.items():
        np.testing.assert_allclose(moved[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_level_is_evaluated_and_exported_with_its_own_norms(norm: str, level: float) -> None:
    """The level's statistics are those of its training data; so dense and cut normalise alike."""
    task, graphs = compiled(norm)
    plan, weights = task.plan, trained_weights(task)
    groups = level_groups(make_masks("nested"), plan, level)
    (samples,), _ = batch_of()
    dense = Dense(norm, weights, level)
    wanted = dense(samples).detach().numpy()
    runtimes = (task.traced, Predictor(plan, graphs.manifest, graphs.files))
    for runtime in runtimes:
        model = level_model(
            runtime, weights, task.buffers, level, groups, rescale=RULE.rescale, samples=[samples]
        )
        got = runtime.predict(
            model.weights, model.buffers, [samples], groups=groups, rescale=RULE.rescale
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    if level == 1:
        saved = SavedModel(plan, weights, task.buffers, graphs.manifest, graphs.files)
        part = pick_level(saved, samples=[samples])
        assert part.groups == groups == plan.full_groups()
        assert part.weights["1.weight"].tolist() == weights["1.weight"][[3]].tolist()
        for runtime in runtimes:  # no groups: the whole model
            got = runtime.predict(part.weights, part.buffers, [samples])
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
            with pytest.raises(TensorError, match=r"'1\.weight' has shape \(4, 8\), not \(1, 8\)"):
                runtime.predict(weights, task.buffers, [samples])


@pytest.mark.parametrize("rule", ["ra-fed", "ram-fed"])
def test_fleet_of_mixed_levels_trains_only_its_levels_copies(rule: str) -> None:
    task, _ = compiled("batch")
    random = np.random.default_rng(3)
    policies = [Policy(level=level) for level in (1.0, 0.5, 0.5)]
    members = [Member(f"d{n}", p, random_data(random, 20)) for n, p in enumerate(policies)]
    federation = make_federation(
        task,
        members,
        lambda: TorchBackend(task),
        rule=rule,
        mask="nested",
        length=2,
        local_rule=RULE,
        steps=2,
        batch_size=8,
        min_devices=3,
        seed=0,
        levels=tuple(LEVELS),
    )
    *_, report = federation.run()
    moved = federation.model.weights["1.weight"] != task.weights["1.weight"]
    half = np.arange(8) < 4
    assert moved.tolist() == [[False] * 8, half.tolist(), [False] * 8, [True] * 8]
    assert report.gap_bound is None
    assert (report.coverage_min, report.trained_coverage_min) == (0, 1)
    copied = {level: line.devices for level, line in zip(LEVELS, report.levels, strict=True)}
    assert copied == {1.0: 1, 0.5: 2, 0.25: 0}


def test_statistics_are_averaged_over_devices_of_the_full_level() -> None:
    task, _ = compiled("batch")
    members = [Member("d0", Policy(level=1.0), random_data(np.random.default_rng(3), 20))]
    federation = make_federation(
        task, members, lambda: TorchBackend(task), mask="nested", length=1, local_rule=RULE,
        steps=1, batch_size=8, min_devices=1, seed=0,
    )  # fmt: skip
    list(federation.run())
    model: GlobalModel = federation.model
    assert (model.buffers["1.norm.running_mean"] != task.buffers["1.norm.running_mean"]).any()


def test_alternatives_are_neither_rescaled_nor_counted_as_width() -> None:
    plan = compiled("batch")[0].plan
    choices = level_choices(make_masks("nested"), plan, tuple(LEVELS))
    assert list(choices) == list(LEVELS)
    for level, groups in choices.items():
        scales = axis_scales(plan, groups, 1.0)
        assert scales.pop("copies") == 1
        assert set(scales.values()) == {1 / level}
        cost = plan.cost_at(level)
        assert cost.parameters == plan.submodel_parameters(groups)
    dense = sum(parameter.numel() for parameter in plain("batch").parameters())
    assert plan.cost_at(1.0).parameters == dense
    assert plan.parameters == dense + 3 * 16


def test_decoupled_model_leaves_the_given_one_alone() -> None:
    model = plain("batch")
    before = copy.deepcopy(model.state_dict())
    made = decouple_norms(model, 2)
    assert isinstance(made.get_submodule("1"), NormCopies)
    assert type(model[1]) is nn.BatchNorm1d
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    weight = made.get_parameter("1.weight")
    assert torch.equal(weight, model[1].weight.expand(2, 8))
    alone = decouple_norms(nn.BatchNorm1d(3), 2)
    assert isinstance(alone, NormCopies)


def test_norm_used_twice_stays_one_norm() -> None:
    norm = nn.BatchNorm1d(4)
    made = decouple_norms(nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 4), norm), 2)
    assert isinstance(made.get_submodule("1"), NormCopies)
    assert made.get_submodule("1") is made.get_submodule("3")


def test_norms_that_cannot_be_decoupled_are_refused() -> None:
    with pytest.raises(TraceError, match="no BatchNorm, GroupNorm or LayerNorm"):
        decouple_norms(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), 2)
    with pytest.raises(TraceError, match="at least 2 copies, not 1"):
        decouple_norms(plain("batch"), 1)
    uneven = nn.Sequential(
        nn.Linear(6, 8),
        NormCopies(nn.BatchNorm1d(8), 2),
        nn.Linear(8, 8),
        NormCopies(nn.BatchNorm1d(8), 3),
        nn.Linear(8, 2),
    )
    with pytest.raises(TraceError, match=r"different numbers of copies: \[2, 3\]"):
        trace_plan(uneven, torch.randn(4, 6), groups=2)


def test_rules_that_cannot_follow_copies_are_refused() -> None:
    task, _ = compiled("batch")

    def made(**config: object) -> object:
        settings = {"steps": 1, "batch_size": 8, "min_devices": 1, "seed": 0, **config}
        return make_federation(task, [], lambda: TorchBackend(task), **settings)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="every level of this model has norms of its own"):
        made(mask="nested", local_rule=LocalRule(learning_rate=0.1, widths="sandwich"))
    with pytest.raises(ConfigError, match="fragments have no level, and every level"):
        made(rule="fed-raa", mask="gre-raa", local_rule=RULE)
