"""What cannot be compiled is refused, by name."""

from __future__ import annotations

from collections import OrderedDict

import onnx
import pytest
import torch
from torch import Tensor, nn

from coordinator.errors import ConfigError, CoordinatorError
from coordinator.task.graphs.check import check_graph
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.operators import HANDLERS
from coordinator.task.task import make_task
from tests.unit.coordinator.task.graphs.oracle import CompiledModel


class Bessel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.i0(x)


def test_unknown_operator_is_named_with_its_module() -> None:
    layers = [("first", nn.Linear(6, 4)), ("odd", Bessel()), ("last", nn.Linear(4, 3))]
    task = make_task(nn.Sequential(OrderedDict(layers)), torch.zeros(2, 6), groups=2)
    with pytest.raises(GraphCompileError, match=r"aten\.i0 \(module 'odd'\)") as caught:
        compile_graphs(task)
    assert isinstance(caught.value, CoordinatorError)


def test_unknown_operator_of_the_backward_pass_is_named_with_its_module() -> None:
    table = nn.Embedding(5, 4, scale_grad_by_freq=True)
    layers = [("odd", table), ("flat", nn.Flatten()), ("last", nn.Linear(12, 3))]
    ids = torch.zeros(2, 3, dtype=torch.int64)
    task = make_task(nn.Sequential(OrderedDict(layers)), ids, groups=2)
    with pytest.raises(GraphCompileError, match=r"embedding_dense_backward \(module 'odd'\)"):
        compile_graphs(task)


def test_spectral_norm_is_refused_with_a_cure() -> None:
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
    model = nn.Sequential(normed, nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    task = make_task(model, torch.zeros(2, 6), groups=2)
    with pytest.raises(GraphCompileError, match=r"module '0.*in place of spectral_norm use weight"):
        compile_graphs(task)


def test_unknown_operator_of_the_loss_is_not_a_modules() -> None:
    def odd(outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.i0(outputs - targets).mean(1)

    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    targets = torch.zeros(2, 3)
    task = make_task(model, torch.zeros(2, 6), loss=odd, groups=2, example_targets=targets)
    with pytest.raises(GraphCompileError, match=r"aten\.i0 \(.*own forward.*the loss\)"):
        compile_graphs(task)


def test_operator_with_odd_arguments_is_named_with_its_module() -> None:
    middle = nn.ConvTranspose2d(8, 8, 3, 1, 0, 1, dilation=2)
    layers = [nn.Conv2d(3, 8, 3, padding=1), middle, nn.Flatten(), nn.LazyLinear(5)]
    model = nn.Sequential(*layers)
    model(torch.zeros(1, 3, 8, 8))
    task = make_task(model, torch.zeros(2, 3, 8, 8), groups=2)
    with pytest.raises(GraphCompileError, match=r"\(module '1'\): output_padding"):
        compile_graphs(task)


def test_unequal_groups_are_refused_where_each_level_needs_its_graph() -> None:
    task = make_task(
        nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)),
        torch.zeros(2, 6),
        loss=lambda outputs, targets: (outputs - targets).abs().mean(1) * (len(outputs) + 1),
        groups=3,
        example_targets=torch.zeros(2, 3),
    )
    with pytest.raises(GraphCompileError, match="number of groups that divides"):
        compile_graphs(task)


def test_own_loss_needs_example_targets() -> None:
    task = make_task(
        nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)),
        torch.zeros(2, 6),
        loss=lambda outputs, targets: (outputs - targets).abs().mean(1),
        groups=2,
    )
    with pytest.raises(ConfigError, match="example_targets"):
        compile_graphs(task)


@pytest.mark.parametrize(("levels", "batch_sizes"), [((), (32,)), ((1.0,), ()), ((1.0,), (0,))])
def test_no_level_or_batch_size_is_refused(
    levels: tuple[float, ...], batch_sizes: tuple[int, ...], compiled: CompiledModel
) -> None:
    with pytest.raises(GraphCompileError, match="at least one level"):
        compile_graphs(compiled("mlp").task, levels=levels, batch_sizes=batch_sizes)


@pytest.mark.parametrize("kind", ["gradient", "evaluate"])
@pytest.mark.parametrize("operator", ["Tanh", "Log"])  # another number; none at all
def test_graph_that_computes_something_else_is_refused(
    kind: str, operator: str, compiled: CompiledModel
) -> None:
    made = compiled("mlp")
    (entry,) = (e for e in made.graphs.manifest.graphs if e.kind == kind)
    model = onnx.load_from_string(made.graphs.files[entry.sha256])
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    assert check_graph(made.task, entry, model.SerializeToString()) <= 1e-4
    relu.op_type = operator
    with pytest.raises(GraphCompileError, match="differs from torch"):
        check_graph(made.task, entry, model.SerializeToString())


def test_batch_that_is_baked_in_is_found_by_the_check(compiled: CompiledModel) -> None:
    made = compiled("mlp")
    gradient = made.graphs.manifest.graphs[0]
    model = onnx.load_from_string(made.graphs.files[gradient.sha256])
    total = next(
        node
        for node in model.graph.node
        if node.op_type == "ReduceSum" and "sample_weights" in node.input
    )
    # The sum of the weights as it would be, had a batch of 32 full samples been traced in.
    constant = onnx.helper.make_tensor("baked", onnx.TensorProto.FLOAT, [], [32.0])
    for node in model.graph.node:
        node.input[:] = ["baked" if name == total.output[0] else name for name in node.input]
    model.graph.initializer.append(constant)
    with pytest.raises(GraphCompileError, match="differs from torch"):
        check_graph(made.task, gradient, model.SerializeToString())


def test_translation_that_fails_is_told_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "tanh", lambda builder, step: step.arguments["nonsense"])
    layers = [("first", nn.Linear(6, 4)), ("odd", nn.Tanh()), ("last", nn.Linear(4, 3))]
    task = make_task(nn.Sequential(OrderedDict(layers)), torch.zeros(2, 6), groups=2)
    with pytest.raises(GraphCompileError, match=r"tanh \(module 'odd'\): its .* KeyError: 'nonse"):
        compile_graphs(task)
