"""Regions, empty pieces and indexing by position: the plainer graph means the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coordinator.errors import TraceError
from coordinator.task.tracing.trace import TracedModel, trace_model
from coordinator.task.tracing.walk import operator_name

FEATURES = 6


class Hidden(nn.Module):
    """Two layers with `between` in between."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.between(self.first(x)))
        return out


def without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(h) + 1
    return h * scale


def in_full_precision(h: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return h.float() * 3


def in_half_precision(h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (h.T @ h).float().sum() + h


def cached(h: Tensor) -> Tensor:
    return torch.cat([torch.tensor([]), h], dim=-1)


def by_position(h: Tensor) -> Tensor:
    rows = torch.arange(h.shape[0])[:, None, None] + 0
    return h[rows, torch.arange(16)[None, None, :]][:, 0]


def gradients(trace: TracedModel, model: nn.Module, x: Tensor) -> list[Tensor]:
    atoms = tuple(axis.atoms for axis in trace.plan.axes)
    weights = [torch.tensor(array).requires_grad_() for array in trace.weights_of(model).values()]
    outputs = trace.train.at(atoms, len(x))(weights, [], [x], [1.0] * len(atoms))
    return list(torch.autograd.grad(outputs.square().sum(), weights))


@pytest.mark.parametrize("between", [without_gradients, in_full_precision, cached, by_position])
def test_simpler_graph_has_the_same_gradients_and_is_narrowed(
    between: Callable[[Tensor], Tensor],
) -> None:
    model = Hidden(between)
    trace = trace_model(model, torch.randn(2, FEATURES), groups=4)
    assert [axis.atoms for axis in trace.plan.axes] == [16]
    x = torch.randn(5, FEATURES)
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    for got, right in zip(gradients(trace, model, x), wanted, strict=True):
        assert right is not None
        torch.testing.assert_close(got, right)


def test_reduced_precision_is_refused() -> None:
    with pytest.raises(TraceError, match=r"train without torch\.autocast \(wrap_with_autocast"):
        trace_model(Hidden(in_half_precision), torch.randn(2, FEATURES), groups=4)


@pytest.mark.parametrize(
    "between",
    [
        lambda h: h[torch.arange(len(h))[:, None], torch.arange(16).flip(0)[None]],
        lambda h: h[torch.arange(len(h))[:, None], torch.arange(15)[None]].repeat(1, 2)[:, :16],
    ],
    ids=["in reverse", "not all"],
)
def test_other_indexing_is_no_reshape(between: Callable[[Tensor], Tensor]) -> None:
    """Whatever becomes of it, a wrong model does not."""
    model = Hidden(between)
    x = torch.randn(5, FEATURES)
    try:
        trace = trace_model(model, torch.randn(2, FEATURES), groups=4)
    except TraceError:
        return
    names = [operator_name(node) for node in trace.evaluate.at((), 5).module.graph.nodes]
    assert "index" in names
    got = trace.predict(trace.weights_of(model), {}, [x.numpy()])
    with torch.no_grad():
        np.testing.assert_allclose(got, model(x).numpy(), rtol=1e-5, atol=1e-6)
