"""Graphs that multiply in float16: against autograd in float32, and node by node."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

import coordinator.task.graphs.compilation as compilation
from coordinator.task.graphs.check import HALF_TOLERANCE, difference
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.half import MULTIPLYING
from coordinator.task.task import make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.errors import NonFiniteError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.task.graphs import GraphEntry
from edge_sdk.train.backend import Job
from edge_sdk.train.onnx import OnnxBackend
from tests.unit.coordinator.task.graphs.oracle import (
    LEVELS,
    MODELS,
    Compiled,
    autograd,
    feeds_of,
    task_of,
)

NAMES = ("mlp", "cnn", "vit-small", "text", "depthwise-cnn", "resnet-bn", "lstm", "channel-shuffle")
"""Products and convolutions, attention, lookups, sizes inside the file, norms, loops."""
Arrays = dict[str, Array]
ROUNDING = 2.0**-11
"""Largest relative error of one rounding to float16."""


@cache
def halved(name: str) -> Compiled:
    task = task_of(MODELS[name])
    return Compiled(MODELS[name], task, compile_graphs(task, levels=LEVELS, half=True))


def entry_of(made: Compiled) -> GraphEntry:
    return next(each for each in made.graphs.manifest.graphs if each.kind == "gradient-fp16")


def run_literally(made: Compiled, entry: GraphEntry, data: bytes, feeds: Arrays) -> Arrays:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in entry.outputs]
    values = session.run(names, {port.name: feeds[port.name] for port in entry.inputs})
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_autograds_within_rounding(name: str) -> None:
    made, errors = halved(name), []
    for level in LEVELS:
        for batch in (2, 6):
            groups = made.groups(level, seed=batch)
            feeds = feeds_of(made, groups, batch)
            entry = made.entry("gradient-fp16", groups, batch)
            got = run_literally(made, entry, made.file(entry, groups), feeds)
            wanted = autograd(made.task, groups, feeds)
            assert set(got) == set(wanted)
            assert all(array.dtype == np.float32 for array in got.values())
            assert difference(got, wanted) < HALF_TOLERANCE
            gradients = [key for key in wanted if key.startswith("g:")]
            off = sum(np.square(got[key] - wanted[key]).sum() for key in gradients)
            errors.append(np.sqrt(off / sum(np.square(wanted[key]).sum() for key in gradients)))
    assert ROUNDING / 100 < max(errors) < 0.03  # it did round


@pytest.mark.parametrize("name", NAMES)
def test_products_are_in_half_and_what_needs_range_is_not(name: str) -> None:
    made = halved(name)
    model = onnx.load_from_string(made.file(entry_of(made), made.groups(1.0, seed=0)))
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {each.name: each.type.tensor_type.elem_type for each in graph.value_info}
    types |= {each.name: each.type.tensor_type.elem_type for each in (*graph.input, *graph.output)}
    whole = {"Softmax", "LogSoftmax", "ReduceSum", "ReduceMean", "Exp", "Log", "Sqrt", "Scan"}
    products = 0
    for node in graph.node:
        kinds = {types[each] for each in node.output if each in types}
        if node.op_type in MULTIPLYING:
            products += 1
            assert kinds == {TensorProto.FLOAT16}, node.op_type
        if node.op_type in whole:
            assert TensorProto.FLOAT16 not in kinds, node.op_type
    assert products > 1
    assert TensorProto.FLOAT16 not in {types[each.name] for each in (*graph.input, *graph.output)}


def test_another_runtime_that_adds_up_in_half_agrees() -> None:
    """The reference of the ONNX project, which adds up in float16, too."""
    made = halved("mlp")
    groups = made.groups(0.5, seed=1)
    feeds, entry = feeds_of(made, groups, 6), entry_of(made)
    evaluator = ReferenceEvaluator(onnx.load_from_string(made.file(entry, groups)))
    names = [port.name for port in entry.outputs]
    values = evaluator.run(names, {port.name: feeds[port.name] for port in entry.inputs})
    got = dict(zip(names, values, strict=True))
    assert difference(got, autograd(made.task, groups, feeds)) < HALF_TOLERANCE


class Faint(nn.Module):
    """Gradients of its first layer pass a value of some 1e-8, which float16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.last.weight *= 1e-7

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def test_small_gradients_survive() -> None:
    torch.manual_seed(0)
    task = make_task(Faint(), torch.zeros(2, 6), loss="mse", groups=2)
    graphs = compile_graphs(task, half=True)
    rng = np.random.default_rng(0)
    entry = next(each for each in graphs.manifest.graphs if each.kind == "gradient-fp16")
    feeds = {f"w:{name}": array for name, array in task.weights.items()}
    feeds |= {f"s:{axis.name}": np.array(1, np.float32) for axis in task.plan.axes}
    feeds["x0"] = rng.normal(size=(4, 6)).astype(np.float32)
    feeds["targets"] = rng.normal(size=(4, 3)).astype(np.float32)
    feeds["sample_weights"] = np.ones(4, np.float32)
    made = Compiled(MODELS["mlp"], task, graphs)
    got = run_literally(made, entry, graphs.files[entry.sha256], feeds)["g:first.weight"]
    weights = {name: torch.tensor(array) for name, array in task.weights.items()}
    weights["first.weight"].requires_grad_()
    hidden = torch.tensor(feeds["x0"]) @ weights["first.weight"].T + weights["first.bias"]
    outputs = torch.tanh(hidden) @ weights["last.weight"].T + weights["last.bias"]
    torch.nn.functional.mse_loss(outputs, torch.tensor(feeds["targets"])).backward()  # type: ignore[no-untyped-call]
    wanted = weights["first.weight"].grad
    assert wanted is not None
    assert 1e-10 < wanted.abs().max() < 6e-8
    assert np.abs(got - wanted.numpy()).max() < 0.05 * float(wanted.abs().max())


def job_of(made: Compiled) -> Job:
    plan = made.task.plan
    return Job(
        groups=plan.all_groups(),
        weights=made.task.weights,
        buffers=made.task.buffers,
        rule=LocalRule(learning_rate=0.05, momentum=0.5),
        mask_stream=stream(0),
    )


def test_training_in_half_goes_where_training_goes() -> None:
    made = halved("cnn")
    graphs, rng = made.graphs, np.random.default_rng(0)
    inputs = made.family.inputs(16, 0).numpy()
    batches = [Batch((inputs,), rng.integers(0, made.family.classes, 16))] * 12
    found = {}
    for precision in ("fp32", "fp16"):
        backend = OnnxBackend(
            made.task.plan,
            graphs.manifest,
            graphs.files,
            precision=precision,
        )
        assert backend.precision == precision
        found[precision] = backend.train(job_of(made), batches)
    exact, rough = found["fp32"], found["fp16"]
    assert rough.metrics.last_loss == pytest.approx(exact.metrics.last_loss, rel=0.02)
    assert rough.metrics.last_loss < 0.9 * rough.metrics.first_loss
    for name, array in exact.movement.items():
        assert rough.movement[name].dtype == np.float32
        off = np.linalg.norm(rough.movement[name] - array) / np.linalg.norm(array)
        assert off < 0.05
    assert any(not np.array_equal(rough.movement[n], a) for n, a in exact.movement.items())


def test_numbers_beyond_half_end_the_training() -> None:
    made = halved("cnn")
    graphs = made.graphs
    inputs = 1e6 * made.family.inputs(4, 0).numpy()
    batch = Batch((inputs,), np.zeros(4, dtype=np.int64))
    backend = OnnxBackend(made.task.plan, graphs.manifest, graphs.files, precision="fp16")
    with pytest.raises(NonFiniteError):
        backend.train(job_of(made), [batch])


def test_graph_that_is_too_coarse_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "HALF_TOLERANCE", 1e-7)
    caplog.set_level(logging.WARNING, "coordinator.task.graphs")
    graphs = compile_graphs(task_of(MODELS["mlp"]), levels=LEVELS, half=True)
    assert {each.kind for each in graphs.manifest.graphs} == {"gradient", "evaluate"}
    assert "no graphs in float16" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no float16 here"), GraphCompileError("no cast")])
def test_half_that_cannot_be_made_is_left_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It only saves time."""

    def fail(_: object) -> object:
        raise error

    monkeypatch.setattr(compilation, "in_half", fail)
    graphs = compile_graphs(task_of(MODELS["mlp"]), levels=LEVELS, half=True)
    assert {each.kind for each in graphs.manifest.graphs} == {"gradient", "evaluate"}
    assert f"no graphs in float16: {error}" in caplog.text


def test_half_is_made_only_if_asked_for() -> None:
    made = halved("mlp")
    plain = compile_graphs(made.task, levels=LEVELS)
    assert {each.kind for each in plain.manifest.graphs} == {"gradient", "evaluate"}
    more = [each for each in made.graphs.manifest.graphs if each.kind != "gradient-fp16"]
    assert tuple(more) == plain.manifest.graphs
    assert made.graphs.manifest.tolerance == plain.manifest.tolerance
    assert decode_manifest(made.graphs.manifest.encoded) == made.graphs.manifest
