"""The law of slicing: a submodel computes what the zero-masked model does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.task.tracing.trace import TracedModel, trace_model
from tests.unit.coordinator.task.tracing.oracle import (
    RATIOS,
    Choice,
    Parts,
    masked_module,
    random_groups,
    traced,
)
from tests.unit.coordinator.task.tracing.zoo import MODELS

TOLERANCE = 1e-5
"""Of the largest output. Both sums have the same terms in another order: float32 rounds to 6e-8,
and a few hundred terms and a dozen layers leave a factor of ten to spare."""


def check_law(
    model: nn.Module, trace: TracedModel, choice: Choice, inputs: tuple[torch.Tensor, ...]
) -> None:
    plan = trace.plan
    # Twice the rows: some modules treat a batch of one, or their input itself, badly.
    twice = [torch.cat([tensor, tensor]) for tensor in inputs]
    with torch.no_grad():
        wanted = masked_module(model, plan, choice)(*twice).numpy()[: len(inputs[0])]
    weights = plan.cut(trace.weights_of(model), choice)
    buffers = plan.cut_buffers(trace.buffers_of(model), choice)
    got = trace.predict(weights, buffers, [tensor.numpy() for tensor in inputs], groups=choice)
    assert got.shape == wanted.shape
    assert np.abs(wanted).max() > 1e-3, "the output has died: the law says nothing"
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("name", MODELS)
def test_submodel_equals_masked_model(name: str) -> None:
    model, trace = traced(name)
    rng = np.random.default_rng(3)
    thinnest: Choice = {
        axis.name: (int(rng.integers(len(axis.groups))),) for axis in trace.plan.axes
    }
    for choice in (thinnest, random_groups(trace.plan, rng), random_groups(trace.plan, rng)):
        for batch in (1, 2, 5):
            check_law(model, trace, choice, (MODELS[name].inputs(batch, seed=batch),))


@pytest.mark.parametrize("parts", [64, RATIOS], ids=["64 groups", "ratios"])
@pytest.mark.parametrize("name", ["mlp", "lenet-28", "text", "channel-shuffle", "encoder"])
def test_submodel_equals_masked_model_however_cut(name: str, parts: Parts) -> None:
    model, trace = traced(name, parts)
    rng = np.random.default_rng(4)
    for batch in (1, 5):
        choice = random_groups(trace.plan, rng)
        check_law(model, trace, choice, (MODELS[name].inputs(batch, seed=batch),))


@pytest.mark.parametrize("name", MODELS)
def test_whole_model_equals_module(name: str) -> None:
    model, trace = traced(name)
    inputs = MODELS[name].inputs(3, seed=5)
    model = masked_module(model, trace.plan, trace.plan.all_groups())
    with torch.no_grad():
        wanted = model(inputs.clone()).numpy()
    got = trace.predict(trace.weights_of(model), trace.buffers_of(model), [inputs.numpy()])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_inputs_and_buffers_left_as_they_were() -> None:
    """By prediction, and by training, whose second pass (SAM's) sees the same batch."""
    model, trace = traced("writes-input")
    inputs = MODELS["writes-input"].inputs(3, seed=7)
    kept = inputs.clone()
    arrays = trace.weights_of(model)
    trace.predict(arrays, {}, [inputs.numpy()])
    assert torch.equal(inputs, kept)
    forward = trace.train.at(trace.plan.kept_atoms(trace.plan.choose({"first": (0, 2)})), 3)
    weights = [
        torch.from_numpy(each) for each in trace.plan.cut(arrays, {"first": (0, 2)}).values()
    ]
    first, second = (forward(weights, [], [inputs], [1.0]) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(inputs, kept)


def test_einsum_rescaled_where_it_sums_over_heads() -> None:
    """Only the last product does, so scaling its input is scaling its weight."""
    model, trace = traced("attention-einsum")
    plan, inputs = trace.plan, MODELS["attention-einsum"].inputs(3, seed=8)
    weights = {name: torch.from_numpy(each) for name, each in trace.weights_of(model).items()}
    forward = trace.train.at(plan.kept_atoms(plan.choose(plan.all_groups())), 3, True)
    scales = [2.0 if axis.name == "qkv" else 1.0 for axis in plan.axes]
    got = forward(list(weights.values()), [], [inputs], scales)
    weights["out"] = weights["out"] * 2
    torch.testing.assert_close(got, forward(list(weights.values()), [], [inputs], [1.0, 1.0]))


class Counting(nn.Module):
    """Counts its calls in a buffer, even in evaluation."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.view(-1).add_(1)
        out: torch.Tensor = self.layers(x)
        return out


def test_buffers_written_through_a_view() -> None:
    model = Counting()
    trace = trace_model(model, torch.randn(2, 4), groups=4)
    assert model.calls.tolist() == [0]
    assert [(buffer.name, buffer.statistic) for buffer in trace.plan.buffers] == [("calls", True)]
    buffers = trace.buffers_of(model)
    trace.predict(trace.weights_of(model), buffers, [np.ones((2, 4), np.float32)])
    assert buffers["calls"].tolist() == [0]


class TwoInputs(nn.Module):
    """A picture and a few numbers about it, added up in one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Conv2d(1, 8, 3)
        self.numbers = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, picture: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.picture(picture).amax((2, 3)) + self.numbers(numbers)
        out: torch.Tensor = self.head(hidden.relu())
        return out


def test_submodel_equals_masked_model_of_two_inputs() -> None:
    torch.manual_seed(6)
    model = TwoInputs()
    inputs = (torch.randn(3, 1, 5, 5), torch.randn(3, 4))
    trace = trace_model(model, inputs, groups=4)
    assert [(axis.name, axis.atoms) for axis in trace.plan.axes] == [("picture", 8)]
    check_law(model, trace, {"picture": (0, 3)}, inputs)
