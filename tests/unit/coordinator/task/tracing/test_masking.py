"""Randomness becomes masks that are given; with a mask, each form computes what torch's would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.task.tracing.masking import attention
from coordinator.task.tracing.program import SubmodelForward
from coordinator.task.tracing.trace import trace_model

BATCH = 5


class Residual(nn.Module):
    """`x + drop(branch(x))` between two layers."""

    def __init__(self, drop: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.branch = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        branch = self.branch(x)
        out: Tensor = self.last(x + (self.drop(branch) if self.training else branch))
        return out


def drop_path(h: Tensor) -> Tensor:
    """As timm's and torchvision's."""
    return h * h.new_empty(len(h), 1).bernoulli_(0.8).div_(0.8)


def drop_path_by_floor(h: Tensor) -> Tensor:
    """As transformers' and the older ones of everybody."""
    noise = 0.8 + torch.rand((len(h), 1), dtype=h.dtype, device=h.device)
    noise.floor_()
    return h.div(0.8) * noise


def drop_path_by_new_floor(h: Tensor) -> Tensor:
    return h.div(0.8) * (torch.rand((len(h), 1)) + 0.8).floor()


def stochastic_depth_of_the_batch(h: Tensor) -> Tensor:
    return h * torch.bernoulli(torch.empty(1, 1), 0.8) / 0.8


FORMS: dict[str, tuple[Callable[[Tensor], Tensor] | nn.Module, tuple[int, ...]]] = {
    "dropout": (nn.Dropout(0.2), (BATCH, 8)),
    "dropout in place": (nn.Dropout(0.2, inplace=True), (BATCH, 8)),
    "stochastic depth": (drop_path, (BATCH, 1)),
    "by floor in place": (drop_path_by_floor, (BATCH, 1)),
    "by floor": (drop_path_by_new_floor, (BATCH, 1)),
    "whole batch": (stochastic_depth_of_the_batch, (1, 1)),
}


def forward_of(model: nn.Module, x: Tensor) -> tuple[SubmodelForward, list[Tensor], int]:
    trace = trace_model(model, x[:2], groups=4)
    atoms = tuple(axis.atoms for axis in trace.plan.axes)
    weights = [torch.tensor(each) for each in trace.weights_of(model).values()]
    return trace.train.at(atoms, BATCH), weights, len(atoms)


@pytest.mark.parametrize("form", FORMS)
def test_branch_is_dropped_where_the_mask_says(form: str) -> None:
    drop, shape = FORMS[form]
    model, x = Residual(drop), torch.randn(BATCH, 6)
    forward, weights, axes = forward_of(model, x)
    ((probability, masked),) = forward.masks
    assert masked == shape
    assert probability == pytest.approx(0.2)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        mask = (torch.rand(shape, generator=generator) >= 0.2) / 0.8
        got = forward(weights, [], [x], [1.0] * axes, [mask])
        with torch.no_grad():
            h = model.first(x)
            wanted = model.last(h + model.branch(h) * mask)
        torch.testing.assert_close(got, wanted)


SEEN = torch.rand(BATCH, 1, 4, 6, generator=torch.Generator().manual_seed(1)) < 0.5
SEEN[0, 0, 2] = False  # a row that sees nothing
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "bool mask": {"attn_mask": SEEN},
    "float mask": {"attn_mask": torch.randn(4, 6)},
    "infinite mask": {"attn_mask": torch.zeros(SEEN.shape).masked_fill(~SEEN, -torch.inf)},
    "shared keys": {"enable_gqa": True},
}


@pytest.mark.parametrize("case", MASKS)
def test_attention_equals_torchs(case: str) -> None:
    options: dict[str, Any] = {
        "attn_mask": None,
        "is_causal": False,
        "scale": None,
        "enable_gqa": False,
    }
    options |= MASKS[case]
    heads = 1 if options["enable_gqa"] else 2
    query = torch.randn(BATCH, 2, 4, 3, requires_grad=True)
    key, value = torch.randn(2, BATCH, heads, 6, 3).unbind(0)
    mask = torch.ones(BATCH, 2, 4, 6)
    got = attention(query=query, key=key, value=value, mask=mask, **options)
    wanted = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, **options)
    torch.testing.assert_close(got, wanted)
    (ours,) = torch.autograd.grad(got.square().sum(), query)
    (torchs,) = torch.autograd.grad(wanted.square().sum(), query)
    torch.testing.assert_close(ours, torchs)


class Attends(nn.Module):
    """Attention whose weights are dropped while training; two heads share each key."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(8, 16), nn.Linear(8, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, 4, 4).transpose(1, 2)
        k, v = (
            each.view(batch, tokens, 2, 4).transpose(1, 2) for each in self.kv(x).chunk(2, dim=-1)
        )
        p = 0.25 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, enable_gqa=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, 16).mean(1))
        return out


def test_attention_dropout_is_a_mask_and_heads_are_cut_with_their_keys() -> None:
    model, x = Attends(), torch.randn(BATCH, 7, 8)
    trace = trace_model(model, x[:2], groups=4)
    (axis,) = trace.plan.axes
    assert axis.atoms == 2  # the keys, each with its two heads
    forward, weights, _ = forward_of(model, x)
    assert forward.masks == ((0.25, (BATCH, 4, 7, 7)),)
    mask = (torch.rand(BATCH, 4, 7, 7) >= 0.25) / 0.75
    got = forward(weights, [], [x], [1.0], [mask])
    with torch.no_grad():
        q = model.q(x).view(BATCH, 7, 4, 4).transpose(1, 2)
        k, v = (each.view(BATCH, 7, 2, 4).transpose(1, 2) for each in model.kv(x).chunk(2, -1))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.softmax(q @ k.transpose(-2, -1) / 2, -1) * mask
        wanted = model.out((scores @ v).transpose(1, 2).reshape(BATCH, 7, 16).mean(1))
    torch.testing.assert_close(got, wanted)


class ReadsAgain(nn.Module):
    """Drops in place what it reads again under the old name, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        dropped = self.drop(h.view(-1, 8))
        out: Tensor = self.last(dropped + h)
        return out


def test_dropout_in_place_is_seen_under_the_old_name() -> None:
    model, x = ReadsAgain(), torch.randn(BATCH, 6)
    forward, weights, axes = forward_of(model, x)
    mask = (torch.rand(BATCH, 8) >= 0.5) / 0.5
    got = forward(weights, [], [x], [1.0] * axes, [mask])
    with torch.no_grad():
        torch.testing.assert_close(got, model.last(2 * model.first(x) * mask))
