"""Models that cannot be traced are refused with the reason, and left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.errors import TraceError
from coordinator.tracing.trace import trace_model, trace_plan
from edge_sdk.protocol.errors import GroupError, PlanError, TesseraError

from .oracle import roughen
from .zoo import MODELS, TOKENS, WIDTH, Encoder

FEATURES = 22
"""A multiple of the batch size while tracing, so that a wrong reshape has every chance."""


class Classifier(nn.Module):
    """Two layers; `twist` is what its forward() does in between or instead."""

    def __init__(self, twist: Callable[[Classifier, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 5)
        self.twist = twist

    def hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.first(x)))

    def forward(self, x: Tensor) -> Any:
        return self.twist(self, x)


def whole(model: Classifier, x: Tensor) -> Tensor:
    out: Tensor = model.head(F.layer_norm(model.hidden(x), [16]))
    return out


def branches(model: Classifier, x: Tensor) -> Tensor:
    h = model.hidden(x)
    out: Tensor = model.head(h if h.sum() > 0 else -h)
    return out


def noisy(make: Callable[[Tensor], Tensor]) -> Callable[[Classifier, Tensor], Tensor]:
    def twist(model: Classifier, x: Tensor) -> Tensor:
        h = model.hidden(x)
        if model.training:
            h = h + make(h)
        out: Tensor = model.head(h)
        return out

    return twist


def attends(model: Classifier, x: Tensor) -> Tensor:
    h = model.hidden(x)[:, None]
    p = 0.1 if model.training else 0.0
    out: Tensor = model.head(F.scaled_dot_product_attention(h, h, h, dropout_p=p)[:, 0])
    return out


BAKED = "batch size is baked into"
ALONE = "must return one tensor"
RANDOM = "draws random numbers"

REFUSED: dict[str, tuple[Callable[[Classifier, Tensor], Any], str]] = {
    "nothing to narrow": (whole, "nothing in this model can be narrowed"),
    "control flow": (branches, "GuardOnDataDependent.* in the model's own forward"),
    "view(11, -1)": (lambda m, x: m.head(m.hidden(x).view(11, -1)), BAKED),
    "view(11, -1) of inputs": (lambda m, x: m.head(m.hidden(x.view(11, -1))), BAKED),
    "reshape(2, …)": (lambda m, x: m.head(m.hidden(x.reshape(2, -1, FEATURES))), "cannot be trac"),
    "a row of the batch": (lambda m, x: m.head(m.hidden(x) + m.first(x[0])), BAKED),
    "a part of the batch": (lambda m, x: m.head(m.hidden(x[:5])), BAKED),
    "arange(11)": (lambda m, x: m.head(m.hidden(x) + torch.arange(11.0)[:, None]), BAKED),
    "zeros(11, …)": (lambda m, x: m.head(m.hidden(x) + torch.zeros(11, 16)), BAKED),
    "tuple": (lambda m, x: (m.head(m.hidden(x)), x), ALONE),
    "tuple of one": (lambda m, x: (m.head(m.hidden(x)),), ALONE),
    "dictionary": (lambda m, x: {"scores": m.head(m.hidden(x))}, ALONE),
    "rand_like": (noisy(torch.rand_like), RANDOM),
    "randn": (noisy(lambda h: torch.randn(len(h), 16)), RANDOM),
    "bernoulli": (noisy(lambda h: torch.bernoulli(torch.sigmoid(h))), RANDOM),
    "attention dropout": (attends, "attention dropout inside the fused operator; set it to 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_refused(case: str) -> None:
    twist, reason = REFUSED[case]
    with pytest.raises(TraceError, match=reason):
        trace_plan(Classifier(twist), torch.randn(4, FEATURES), groups=4)


class Last(nn.Module):
    """A recurrent layer's output without its state."""

    def forward(self, result: tuple[Tensor, Any]) -> Tensor:
        return result[0]


@pytest.mark.parametrize(
    ("model", "shape", "reason"),
    [
        (
            nn.Sequential(nn.Identity(), nn.Sequential(Classifier(branches), nn.ReLU())),
            (FEATURES,),
            r"GuardOnDataDependent.* in module '1\.0'",
        ),
        (
            Encoder(norm_first=False, dropout=0.1),
            (TOKENS, WIDTH),
            r"attention dropout.*, module 'encoder\.layers\.0\.self_attn'",
        ),
        (
            nn.Sequential(nn.LSTM(3, 4, 2, dropout=0.5), Last(), nn.Linear(4, 8), nn.Linear(8, 2)),
            (6, 3),
            r"dropout inside the fused operator.*, module '0'",
        ),
    ],
    ids=["control flow", "attention dropout", "recurrent dropout"],
)
def test_refusal_names_the_module(model: nn.Module, shape: tuple[int, ...], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        trace_plan(model, torch.randn(2, *shape), groups=4)


def test_refusal_lists_every_tensor_and_its_reasons() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False))
    with pytest.raises(TraceError) as refusal:
        trace_plan(model, torch.randn(2, 6), groups=4)
    lines = str(refusal.value).splitlines()
    normalised = "it is normalised over as a whole (layer_norm, module '1')"
    assert lines[1:] == [
        f"  0.weight, dimension 0: {normalised}",
        "  0.weight, dimension 1: it is an input of the model",
        f"  0.bias, dimension 0: {normalised}",
        f"  1.weight, dimension 0: {normalised}",
        f"  1.bias, dimension 0: {normalised}",
        "  2.weight, dimension 0: it is an output of the model",
        f"  2.weight, dimension 1: {normalised}",
    ]


def test_model_of_other_precision_refused() -> None:
    with pytest.raises(PlanError, match=r"float64; weights are float32.*\.float\(\)"):
        trace_plan(MODELS["mlp"].model().double(), MODELS["mlp"].inputs(2).double(), groups=4)


@pytest.mark.parametrize(
    ("groups", "ratios", "error"),
    [
        (None, None, TraceError),
        (4, (1.0, 2.0), TraceError),
        (0, None, GroupError),
        (65, None, GroupError),
        (None, (), GroupError),
        (None, (1.0, -1.0), GroupError),
        (None, (1.0, float("nan")), GroupError),
    ],
)
def test_groups_refused(
    groups: int | None, ratios: Sequence[float] | None, error: type[TesseraError]
) -> None:
    with pytest.raises(error):
        trace_plan(MODELS["mlp"].model(), MODELS["mlp"].inputs(2), groups=groups, ratios=ratios)


@pytest.mark.parametrize(
    "example", [(torch.randn(2, FEATURES), torch.randn(3, 1)), torch.randn(0, FEATURES)]
)
def test_example_refused_without_equally_many_rows(example: Any) -> None:
    with pytest.raises(TraceError, match="same, non-zero number of rows"):
        trace_plan(Classifier(whole), example, groups=4)


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [module.training for module in model.modules()],
        "state": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "trained": [(each.requires_grad, each.grad) for each in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def plain(model: Classifier, x: Tensor) -> Tensor:
    out: Tensor = model.head(model.hidden(x))
    return out


@pytest.mark.parametrize("case", ["traced", *REFUSED])
def test_model_left_as_it_was(case: str) -> None:
    twist = plain if case == "traced" else REFUSED[case][0]
    model = Classifier(twist)
    roughen(model, seed=1)
    model.norm.eval()  # modes may be mixed
    model.first.bias.requires_grad_(False)
    before = copy.deepcopy(snapshot(model))
    example = torch.randn(4, FEATURES)
    kept = example.clone()
    random_state = torch.get_rng_state()
    try:
        trace_model(model, example, groups=4)
    except TraceError:
        assert case != "traced"
    after = snapshot(model)
    for name, tensor in before.pop("state").items():
        assert torch.equal(after["state"][name], tensor)
    assert all(after[key] == value for key, value in before.items())
    assert torch.equal(example, kept)
    assert torch.equal(torch.get_rng_state(), random_state)
