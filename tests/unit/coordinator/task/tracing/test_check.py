"""The numerical check tells rounding from mistakes, and units without weights from broken ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from coordinator.task.tracing.trace import trace_model


class Cancels(nn.Module):
    """Rounds to 1/128 in float32 on the way: worse than any tolerance, but right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.relu(self.first(x)).float())
        h = (h + torch.full((32,), 1e5)) - 1e5
        out: Tensor = self.head(h + torch.zeros(len(x), 32))
        return out


def test_rounding_is_no_mistake() -> None:
    trace = trace_model(Cancels(), torch.randn(4, 6), groups=4)
    assert [axis.atoms for axis in trace.plan.axes] == [64, 32]


def test_pass_in_double_differs_by_rounding_alone() -> None:
    model, x = Cancels(), torch.randn(5, 6)
    trace = trace_model(model, x, groups=4)
    weights = [torch.tensor(each) for each in trace.weights_of(model).values()]
    forward = trace.evaluate.at((64, 32), 5)
    single = forward(weights, [], [x], [1.0, 1.0])
    double = forward.in_double()([w.double() for w in weights], [], [x.double()], [1.0, 1.0])
    assert single.dtype is torch.float32
    assert double.dtype is torch.float64
    with torch.no_grad():
        hidden = model.second(torch.relu(model.first(x)))
        exact = model.head(hidden)  # nothing is added and taken away again
    assert 1e-4 < (single - exact).abs().max() < 0.05
    torch.testing.assert_close(double, exact.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [weight_norm, parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_is_narrowed_and_left_as_it_was(norm: Callable[[nn.Module], nn.Module]) -> None:
    first, second, head = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(8, 3)
    model = nn.Sequential(norm(first), nn.ReLU(), norm(second), nn.ReLU(), head)
    trace = trace_model(model, torch.randn(4, 6), groups=4)
    assert [axis.atoms for axis in trace.plan.axes] == [16, 8]
    x = torch.randn(5, 6)
    choice = {trace.plan.axes[0].name: (0, 3), trace.plan.axes[1].name: (2,)}
    kept, last = [*range(4), *range(12, 16)], [4, 5]
    state = trace.weights_of(model)
    got = trace.predict(trace.plan.cut(state, choice), {}, [x.numpy()], groups=choice)
    with torch.no_grad():
        # By hand: directions of the kept inputs alone, with the whole norms of the kept units.
        g, v = (
            state[next(n for n in state if n.startswith("2.") and n.endswith(end))]
            for end in (("original0", "weight_g"), ("original1", "weight_v"))
        )
        part = torch.tensor(v[np.ix_(last, kept)])
        weight = part / part.norm(dim=1, keepdim=True) * torch.tensor(g[last])
        hidden = torch.relu(torch.relu(first(x))[:, kept] @ weight.T + second.bias[last])
        wanted = hidden @ head.weight[:, last].T + head.bias
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
