"""Recurrent layers train as loops and predict by ONNX's layers: as torch's do, whole and narrow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Family
from edge_sdk.protocol.plan.layout import Array
from tests.unit.coordinator.task.graphs.oracle import (
    Compiled,
    assert_close,
    autograd,
    compile_family,
    feeds_of,
)

FEATURES, WIDTH, MIDDLE, CLASSES = 3, 6, 8, 5

Make = Callable[[int], nn.RNNBase]


class Sequences(nn.Module):
    """A recurrent layer read out by its steps and by a final state (the cell's, in an LSTM)."""

    def __init__(self, make: Make, width: int = WIDTH, middle: int = MIDDLE) -> None:
        super().__init__()
        self.recurrent = make(width)
        directions = 2 if self.recurrent.bidirectional else 1
        self.steps = nn.Linear(width * directions, middle)
        self.final = nn.Linear(width, middle)
        self.head = nn.Linear(middle, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        batch_first = self.recurrent.batch_first
        steps, states = self.recurrent(x if batch_first else x.transpose(0, 1))
        last = states[1] if isinstance(states, tuple) else states
        mean = steps.mean(1 if batch_first else 0)
        out: Tensor = self.head(torch.tanh(self.steps(mean) + self.final(last[-1])))
        return out


def lstm(width: int) -> nn.RNNBase:
    return nn.LSTM(FEATURES, width, 2, batch_first=True)


def gru(width: int) -> nn.RNNBase:
    return nn.GRU(FEATURES, width, 2, bias=False)


def both_ways(width: int) -> nn.RNNBase:
    return nn.GRU(FEATURES, width, batch_first=True, bidirectional=True)


def tanh(width: int) -> nn.RNNBase:
    return nn.RNN(FEATURES, width, batch_first=True)


def relu(width: int) -> nn.RNNBase:
    return nn.RNN(FEATURES, width, nonlinearity="relu")


def dropping(width: int) -> nn.RNNBase:
    return nn.LSTM(FEATURES, width, 2, batch_first=True, dropout=0.4)


@cache
def compiled(make: Make, length: int = 4) -> Compiled:
    return compile_family(Family(lambda: Sequences(make), (length, FEATURES), CLASSES))


def module_of(make: Make, feeds: dict[str, Array]) -> Sequences:
    """torch's own module of this width, in float64."""
    weights = {
        name[2:]: torch.tensor(array, dtype=torch.float64)
        for name, array in feeds.items()
        if name.startswith("w:")
    }
    width, middle = weights["recurrent.weight_hh_l0"].shape[1], len(weights["steps.bias"])
    model = Sequences(make, width, middle).double()
    model.load_state_dict(weights)
    return model


def module_gradient(make: Make, feeds: dict[str, Array]) -> dict[str, Array]:
    """Loss and gradients of torch's own module of this width, in float64."""
    model = module_of(make, feeds)
    share = torch.tensor(feeds["sample_weights"], dtype=torch.float64)
    outputs = model(torch.tensor(feeds["x0"], dtype=torch.float64))
    losses = F.cross_entropy(outputs, torch.tensor(feeds["targets"]), reduction="none")
    loss = (losses * share).sum() / share.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    found = {"loss": loss.detach()}
    for name, weight in model.named_parameters():
        found[f"g:{name}"] = torch.zeros_like(weight) if weight.grad is None else weight.grad
    return {name: value.float().numpy() for name, value in found.items()}


@pytest.mark.parametrize("make", [lstm, gru, both_ways, tanh, relu])
def test_gradient_graph_matches_torchs_own_layer_of_that_width(make: Make) -> None:
    made = compiled(make)
    assert {(entry.kept, entry.batch) for entry in made.graphs.manifest.graphs} == {(None, None)}
    for level, batch in ((1.0, 3), (0.5, 1)):
        groups = made.groups(level, seed=batch)
        feeds = feeds_of(made, groups, batch)
        feeds |= {name: np.ones((), np.float32) for name in feeds if name.startswith("s:")}
        assert_close(made.run("gradient", groups, feeds), module_gradient(make, feeds))


@pytest.mark.parametrize(
    ("make", "layers"),
    [(lstm, ["LSTM"] * 2), (gru, ["GRU"] * 2), (both_ways, ["GRU"] * 2), (tanh, ["RNN"])],
)
def test_evaluation_uses_onnxs_own_layers_at_every_width(make: Make, layers: list[str]) -> None:
    made = compiled(make)
    (entry,) = (each for each in made.graphs.manifest.graphs if each.kind == "evaluate")
    kinds = [n.op_type for n in onnx.load_from_string(made.graphs.files[entry.sha256]).graph.node]
    assert [kind for kind in kinds if kind in ("Scan", "LSTM", "GRU", "RNN")] == layers
    for level, batch in ((1.0, 3), (0.5, 1)):
        groups = made.groups(level, seed=batch)
        feeds = feeds_of(made, groups, batch)
        feeds |= {name: np.ones((), np.float32) for name in feeds if name.startswith("s:")}
        with torch.no_grad():
            wanted = module_of(make, feeds)(torch.tensor(feeds["x0"], dtype=torch.float64))
        found = made.run("evaluate", groups, feeds)["outputs"]
        np.testing.assert_allclose(found, wanted.numpy(), rtol=0, atol=2e-6)


def test_hidden_width_is_cut_in_every_gate() -> None:
    made = compiled(lstm)
    plan = made.task.plan
    assert {axis.name: axis.atoms for axis in plan.axes} == {
        "recurrent": WIDTH,
        "recurrent#2": WIDTH,
        "steps": MIDDLE,
    }
    half = plan.cut(made.task.weights, made.groups(0.5, seed=0))
    assert half["recurrent.weight_hh_l1"].shape == (4 * 3, 3)
    assert half["recurrent.weight_ih_l1"].shape == (4 * 3, 3)


def test_dropout_between_layers_is_an_input_and_scales_act_inside() -> None:
    made = compiled(dropping)
    gradient = made.graphs.manifest.graphs[0]
    assert [mask.probability for mask in gradient.masks] == [0.4]
    groups = made.groups(0.5, seed=0)
    feeds = feeds_of(made, groups, 3)
    assert feeds["m0"].shape == (3, 4, WIDTH // 2)
    assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


def test_graph_does_not_grow_with_the_sequence() -> None:
    counts = []
    for length in (4, 9):
        made = compiled(tanh, length)
        entry = made.graphs.manifest.graphs[0]
        model = onnx.load_from_string(made.graphs.files[entry.sha256])
        counts.append(len(model.graph.node))
        assert [node.op_type for node in model.graph.node].count("Scan") == 2
    assert counts[0] == counts[1]
