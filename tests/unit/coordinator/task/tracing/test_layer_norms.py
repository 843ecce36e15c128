"""`layer_norm="submodel"`: a submodel is torch's own model of the narrower sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn
from torch.nn import functional as F

from coordinator.errors import TraceError
from coordinator.task.graphs.check import open_session
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from coordinator.task.tracing.trace import trace_plan
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.codec import fitted
from tests.unit.coordinator.task.tracing.oracle import roughen

HEAD = 4
"""Width of an attention head."""


class WrittenOut(nn.Module):
    """RMSNorm as Llama's code writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(kind)


class Encoder(nn.Module):
    """A transformer's layer: the residual stream is normalised three times."""

    def __init__(self, stream: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(5, stream)
        self.places = nn.Parameter(torch.randn(6, stream))
        self.before, self.between = nn.LayerNorm(stream), nn.RMSNorm(stream, eps=1e-5)
        self.qkv = nn.Linear(stream, 3 * heads * HEAD)
        self.out = nn.Linear(heads * HEAD, stream)
        self.up, self.down = nn.Linear(stream, hidden), nn.Linear(hidden, stream)
        self.after = WrittenOut(stream)
        self.head = nn.Linear(stream, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        x = self.embed(x) + self.places
        parts = self.qkv(self.before(x)).reshape(rows, length, 3, self.heads, HEAD)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, self.heads * HEAD))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        scores: torch.Tensor = self.head(self.after(x).mean(1))
        return scores


class Convolutions(nn.Module):
    """A block as ConvNeXt's, then four neighbours side by side, normalised, as Swin merges them."""

    def __init__(self, stream: int, hidden: int, last: int) -> None:
        super().__init__()
        self.stem, self.whole = nn.Conv2d(2, stream, 2, 2), nn.GroupNorm(1, stream)
        self.mix = nn.Conv2d(stream, stream, 3, padding=1, groups=stream)
        self.norm = nn.LayerNorm(stream)
        self.up, self.down = nn.Linear(stream, hidden), nn.Linear(hidden, stream)
        self.gain = nn.Parameter(torch.ones(stream))
        self.merged = nn.LayerNorm(4 * stream)
        self.merge = nn.Linear(4 * stream, last, bias=False)
        self.plain = nn.LayerNorm(last, elementwise_affine=False)
        self.head = nn.Linear(last, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.whole(self.stem(x))
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        x = x.permute(0, 2, 3, 1) + self.gain * self.down(F.gelu(self.up(y)))
        corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        x = self.merge(self.merged(torch.cat(corners, -1)))
        scores: torch.Tensor = self.head(self.plain(x).mean((1, 2)))
        return scores


Sizes = tuple[int, int, int]
MODELS: dict[str, tuple[Callable[[int, int, int], nn.Module], Sizes, tuple[int, ...]]] = {
    "encoder": (Encoder, (8, 4, 16), (6, 5)),
    "convolutions": (Convolutions, (8, 16, 12), (2, 8, 8)),
}
"""Builder, whole sizes, shape of a sample."""
LEVELS = (1.0, 0.5, 0.25)


@cache
def compiled(name: str) -> tuple[Task, CompiledGraphs]:
    make, sizes, sample = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = roughen(make(*sizes), seed=4)
        task = make_task(model, torch.randn(2, *sample), groups=4, layer_norm="submodel")
    return task, compile_graphs(task, levels=LEVELS)


def case(name: str, level: float) -> tuple[dict[str, list[int]], dict[str, Array]]:
    """Scattered groups, and everything a graph may want at this level."""
    task, _ = compiled(name)
    rng = np.random.default_rng(round(8 * level))
    groups = {
        axis.name: sorted(rng.permutation(4)[: axis.wanted(level)].tolist())
        for axis in task.plan.axes
    }
    feeds: dict[str, Array] = {
        "x0": rng.normal(size=(5, *MODELS[name][2])).astype(np.float32),
        "targets": rng.integers(0, 3, 5),
        "sample_weights": np.ones(5, np.float32),
        **{f"w:{key}": each for key, each in task.plan.cut(task.weights, groups).items()},
        **{f"s:{axis.name}": np.ones((), np.float32) for axis in task.plan.axes},
    }
    return groups, feeds


def narrow_torch(name: str, level: float, feeds: dict[str, Array]) -> dict[str, Array]:
    """Loss, gradients and outputs of the module built with the narrower sizes."""
    make, sizes, _ = MODELS[name]
    model = make(*(round(size * level) for size in sizes)).double()
    state = {key[2:]: torch.tensor(each) for key, each in feeds.items() if key[:2] == "w:"}
    model.load_state_dict(state)
    outputs = model(torch.tensor(feeds["x0"]).double())
    loss = F.cross_entropy(outputs, torch.tensor(feeds["targets"]))
    loss.backward()  # type: ignore[no-untyped-call]
    grads: dict[str, Any] = {f"g:{key}": each.grad for key, each in model.named_parameters()}
    found = {"loss": loss, "outputs": outputs, **grads}
    return {key: each.detach().numpy() for key, each in found.items()}


def assert_close(got: dict[str, Array], wanted: dict[str, Array]) -> None:
    for key, array in got.items():
        assert array.shape == wanted[key].shape, key
        np.testing.assert_allclose(array, wanted[key], rtol=2e-4, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_torch_program_is_the_narrower_module(name: str, level: float) -> None:
    task, _ = compiled(name)
    groups, feeds = case(name, level)
    plan = task.plan
    forward = task.train_program.at(plan.kept_atoms(plan.choose(groups)), 5)
    weights = [torch.tensor(feeds[f"w:{each.name}"]).requires_grad_() for each in plan.tensors]
    outputs = forward(weights, [], [torch.tensor(feeds["x0"])], [1.0] * len(plan.axes))
    loss = F.cross_entropy(outputs, torch.tensor(feeds["targets"]))
    grads = torch.autograd.grad(loss, weights)
    got = {f"g:{t.name}": g.numpy() for t, g in zip(plan.tensors, grads, strict=True)}
    wanted = narrow_torch(name, level, feeds)
    assert_close({**got, "outputs": outputs.detach().numpy()}, wanted)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_graphs_are_the_narrower_module(name: str, level: float) -> None:
    task, graphs = compiled(name)
    groups, feeds = case(name, level)
    wanted = narrow_torch(name, level, feeds)
    kept = task.plan.kept_atoms(task.plan.choose(groups))
    for kind in ("gradient", "evaluate"):
        entry = graphs.manifest.pick(kind, kept, 5)
        assert entry.kept is None  # one graph for every width
        session = open_session(fitted(entry, graphs.files[entry.sha256], kept))
        names = [port.name for port in entry.outputs]
        found = session.run(names, {port.name: feeds[port.name] for port in entry.inputs})
        assert_close(dict(zip(names, found, strict=True)), wanted)


def test_streams_are_cut_only_on_request() -> None:
    make, sizes, sample = MODELS["encoder"]
    model, example = make(*sizes), torch.randn(2, *sample)
    whole = trace_plan(model, example, groups=4)
    cut = trace_plan(model, example, groups=4, layer_norm="submodel")
    assert [axis.name for axis in whole.axes] == ["qkv", "up"]
    assert len(cut.axes) == 3
    assert cut.cost_at(0.5).parameter_share < 0.35 < whole.cost_at(0.5).parameter_share


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(TraceError, match="layer_norm must be one of whole, submodel, not 'none'"):
        trace_plan(nn.Linear(2, 2), torch.randn(2, 2), groups=2, layer_norm="none")  # type: ignore[arg-type]
