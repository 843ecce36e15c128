"""Models that cannot be traced are refused with the reason, and left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from coordinator.errors import TraceError
from coordinator.task.tracing.operators import HANDLERS
from coordinator.task.tracing.trace import trace_model, trace_plan
from coordinator.task.tracing.walk import Value, Walk
from edge_sdk.protocol.errors import GroupError, PlanError, TesseraError
from tests.unit.coordinator.task.tracing.oracle import roughen
from tests.unit.coordinator.task.tracing.zoo import MODELS

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


def chosen_rows(model: Classifier, x: Tensor) -> Tensor:
    out: Tensor = model.head(model.hidden(x)[x[:, 0] > 0])
    return out


def narrow_in_training(model: Classifier, x: Tensor) -> Tensor:
    out: Tensor = model.head(model.hidden(x)[:, : 3 if model.training else 16])
    return out


FAILS = "the model fails on the example input: RuntimeError"
BAKED = "batch size is fixed inside"
UNCLEAR = "not clear what to train on"
RANDOM = "draws random numbers"

REFUSED: dict[str, tuple[Callable[[Classifier, Tensor], Any], str]] = {
    "nothing to narrow": (whole, "nothing in this model can be narrowed"),
    "control flow": (
        branches,
        r"GuardOnDataDependent.* in the model's own forward\(\) \(.*test_errors\.py, line \d+\): "
        r".*\nforward\(\) makes a decision based on a tensor",
    ),
    "rows by condition": (chosen_rows, "has a size that depends on the data \\(index, the model's"),
    "RReLU": (noisy(lambda h: F.rrelu(h, training=True)), RANDOM),
    "view(11, -1)": (lambda m, x: m.head(m.hidden(x).view(11, -1)), BAKED),
    "view(11, -1) of inputs": (lambda m, x: m.head(m.hidden(x.view(11, -1))), BAKED),
    "reshape(2, …)": (lambda m, x: m.head(m.hidden(x.reshape(2, -1, FEATURES))), FAILS),
    "a row of the batch": (lambda m, x: m.head(m.hidden(x) + m.first(x[0])), BAKED),
    "a part of the batch": (lambda m, x: m.head(m.hidden(x[:5])), BAKED),
    "arange(11)": (lambda m, x: m.head(m.hidden(x) + torch.arange(11.0)[:, None]), BAKED),
    "zeros(11, …)": (lambda m, x: m.head(m.hidden(x) + torch.zeros(11, 16)), BAKED),
    "nothing returned": (lambda m, x: None, f"a NoneType, so it is {UNCLEAR}: wrap the model"),
    "nested tuple": (lambda m, x: ((m.head(m.hidden(x)), x), 0), UNCLEAR),
    "dictionary of unknown names": (
        lambda m, x: {"scores": m.head(m.hidden(x)), "hidden": x, "count": 3},
        f"{UNCLEAR}: name one of its tensors, output='scores', 'hidden'",
    ),
    "constant": (
        lambda m, x: torch.ones(3),
        r"first.weight, dimension 0: it is not used by forward\(\)",
    ),
    "rand_like": (noisy(torch.rand_like), RANDOM),
    "randn": (noisy(lambda h: torch.randn(len(h), 16)), RANDOM),
    "bernoulli": (noisy(lambda h: torch.bernoulli(torch.sigmoid(h))), RANDOM),
    "bernoulli of a tensor": (
        noisy(lambda h: torch.bernoulli(torch.full_like(h, 0.5))),
        RANDOM,
    ),
    "uniform numbers": (noisy(lambda h: torch.rand(len(h), 16)), RANDOM),
    "alpha dropout": (noisy(lambda h: F.alpha_dropout(h, 0.5, training=True)), RANDOM),
}


ROWS = {"view(11, -1)": 11, "view(11, -1) of inputs": 11, "arange(11)": 11, "zeros(11, …)": 11}
"""Of the example, where the model itself runs at no other."""


@pytest.mark.parametrize("case", REFUSED)
def test_model_refused(case: str) -> None:
    twist, reason = REFUSED[case]
    with pytest.raises(TraceError, match=reason):
        trace_plan(Classifier(twist), torch.randn(ROWS.get(case, 4), FEATURES), groups=4)


def test_refusal_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError, match="cannot be traced: RuntimeError in module 'head'"):
        trace_plan(Classifier(narrow_in_training), torch.randn(4, FEATURES), groups=4)
    assert capfd.readouterr() == ("", "")


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
            nn.Sequential(nn.LSTM(3, 4), Last(), nn.Linear(4, 8), nn.Linear(8, 2)),
            (6, 3),
            r"set batch_first=True \(lstm, module '0'\)",
        ),
    ],
    ids=["control flow", "steps through the batch"],
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
        'layer_norm="submodel" lets LayerNorm use the statistics of what is kept',
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
        (None, ((1.0, 2.0), (3.0, 4.0)), GroupError),
        (None, (1.0, "2"), GroupError),
        (None, 5, TraceError),
        (2.0, None, GroupError),
        ("4", None, GroupError),
        (True, None, GroupError),
    ],
)
def test_groups_refused(groups: Any, ratios: Any, error: type[TesseraError]) -> None:
    with pytest.raises(error):
        trace_plan(MODELS["mlp"].model(), MODELS["mlp"].inputs(2), groups=groups, ratios=ratios)


@pytest.mark.parametrize(
    "example", [(torch.randn(2, FEATURES), torch.randn(3, 1)), torch.randn(0, FEATURES)]
)
def test_example_refused_without_equally_many_rows(example: Any) -> None:
    with pytest.raises(TraceError, match="same number of rows, at least one"):
        trace_plan(Classifier(whole), example, groups=4)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 5))


class OddBuffer(nn.Module):
    """A buffer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(5, dtype=torch.bfloat16))
        self.layers = mlp()

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * self.scale


class Bags(nn.Module):
    """Bags of words whose lengths the caller states."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(9, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, offsets: Tensor) -> Any:
        return self.head(self.bags(ids, offsets))


BATCH = torch.randn(4, FEATURES)
WORDS = torch.zeros(4, 3, dtype=torch.int64)

MISTAKEN: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "unknown name": (mlp, {"x": BATCH}, "fails on the example input: TypeError: .*'x'"),
    "dictionary of arrays": (mlp, {"input": BATCH.numpy()}, "dictionary of tensors.*not ndarray"),
    "empty dictionary": (mlp, {}, "the example input is empty"),
    "numpy": (mlp, BATCH.numpy(), "must be a tensor, a tuple of tensors.*not ndarray"),
    "nothing": (mlp, (), "the example input is empty"),
    "class": (lambda: nn.Linear, BATCH, "an instance of torch.nn.Module, not the class Linear"),
    "function": (lambda: mlp, BATCH, "an instance of torch.nn.Module, not .*function"),
    "lazy": (lambda: nn.LazyLinear(5), BATCH, "'weight' is not initialised yet"),
    "meta": (lambda: mlp().to("meta"), BATCH, "'0.weight' is on the meta device"),
    "meta example": (mlp, BATCH.to("meta"), "'the example' is on the meta device"),
    "bfloat16": (OddBuffer, BATCH, "'scale' is bfloat16"),
    "offsets": (Bags, (WORDS[:, 0], torch.arange(4)), "give a 2-D batch of ids"),
    "frozen": (lambda: mlp().requires_grad_(False), BATCH, "none of its weights is trained"),
    "no weights": (nn.ReLU, BATCH, "it has no weights"),
    "float64": (mlp, BATCH.double(), "fails on the example input: .*same dtype"),
    "wrong shape": (mlp, BATCH[:, 1:], "fails on the example input: .*cannot be multiplied"),
    "ids": (lambda: nn.Embedding(9, 8), WORDS + 9, "fails on the example input: IndexError"),
}


@pytest.mark.parametrize("case", MISTAKEN)
def test_mistake_told_in_words(case: str) -> None:
    model, example, reason = MISTAKEN[case]
    with pytest.raises(TraceError, match=reason):
        trace_plan(model(), example, groups=4)


def test_example_as_list() -> None:
    model = mlp()
    assert trace_plan(model, [BATCH], groups=4) == trace_plan(model, BATCH, groups=4)


class Flip(nn.Module):
    """Units in reverse: invisible to a choice of groups that is symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)


def unsound(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
    """A rule that lets every dimension pass."""
    return walk.dims(node.all_input_nodes[0])


@pytest.mark.parametrize(
    ("operator", "mode", "norm", "shape"),
    [
        ("softmax", "evaluation", nn.Softmax(-1), (16,)),
        ("flip", "evaluation", Flip(), (16,)),
        ("batch_norm", "training", nn.BatchNorm1d(6, affine=False), (6, 16)),
    ],
)
def test_wrong_rule_found_by_the_check(
    operator: str, mode: str, norm: nn.Module, shape: tuple[int, ...], monkeypatch: Any
) -> None:
    """Although the head is zero, and although BatchNorm mixes only while training."""
    head = nn.Linear(16, 5)
    nn.init.zeros_(head.weight)
    model = nn.Sequential(nn.Linear(10, 16), norm, head)
    monkeypatch.setitem(HANDLERS, operator, unsound)
    with pytest.raises(TraceError, match=f"a submodel in {mode} mode does not compute"):
        trace_plan(model, torch.randn(2, *shape[:-1], 10), groups=4)


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


def test_shared_and_tied_modules_left_as_they_were() -> None:
    for name in ("shared-norm", "tied-weights", "lstm"):
        model = MODELS[name].model()
        before = {
            key: (id(each), each.clone()) for key, each in model.state_dict(keep_vars=True).items()
        }
        trace_plan(model, MODELS[name].inputs(2), groups=4)
        after = model.state_dict(keep_vars=True)
        assert after.keys() == before.keys()
        for key, (identity, values) in before.items():
            assert id(after[key]) == identity
            assert torch.equal(after[key], values)


def test_rule_that_fails_is_told_with_its_module(monkeypatch: Any) -> None:
    def fails(walk: Walk, node: fx.Node, a: dict[str, Any]) -> Value:
        return walk.dims(a["nonsense"])

    monkeypatch.setitem(HANDLERS, "flip", fails)
    model = nn.Sequential(nn.Linear(10, 16), Flip(), nn.Linear(16, 5))
    with pytest.raises(
        TraceError, match=r"rule fails with KeyError: 'nonsense' \(flip, module '1'"
    ):
        trace_plan(model, torch.randn(2, 10), groups=4)
