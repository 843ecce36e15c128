"""Operators and losses that the families do not use, each in a model of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Family
from coordinator.graphs import compile_graphs
from coordinator.tasks import make_task

from .oracle import LEVELS, Compiled, assert_close, autograd, compile_family, feeds_of


class Images(nn.Module):
    """A convolution, something on its images, the mean of every channel, classes."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = middle
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.conv(x))
        # Not the plain mean: it would hide pixels that changed places.
        weights = torch.arange(x.shape[-1], dtype=x.dtype) + 1
        out: Tensor = self.head((x * weights).mean((2, 3)))
        return out


class Words(nn.Module):
    """An embedding, its mean, classes."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.hidden = nn.Linear(8, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x.mean(1) if x.ndim == 3 else x
        out: Tensor = self.head(torch.tanh(self.hidden(x)))
        return out


def images(middle: Callable[[Tensor], Tensor]) -> Family:
    return Family(lambda: Images(middle), (3, 9, 7), 5)


def words(make: Callable[[], nn.Module]) -> Family:
    return Family(lambda: Words(make()), (6,), 5, vocabulary=20)


def convolutions(stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Family:
    def make() -> nn.Module:
        return Images(nn.Conv2d(8, 8, 3, stride, padding, dilation, groups))

    return Family(make, (3, 11, 12), 5)


CASES: dict[str, Family] = {
    "max-pool-overlapping": images(lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max-pool-ceil": images(lambda x: F.max_pool2d(x, 2, ceil_mode=True)),
    "max-pool-dilated": images(lambda x: F.max_pool2d(x, 2, 1, dilation=2)),
    "avg-pool": images(lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "avg-pool-inside": images(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "avg-pool-ceil": images(lambda x: F.avg_pool2d(x, 2, ceil_mode=True)),
    "avg-pool-divisor": images(lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    "adaptive-uneven": images(lambda x: F.adaptive_avg_pool2d(x, (4, 3))),
    "conv-stride-left-over": convolutions(stride=3),
    "conv-dilated": convolutions(dilation=2, padding=2),
    "conv-stride-dilated": convolutions(stride=2, dilation=2, padding=1),
    "conv-grouped-strided": convolutions(stride=2, groups=4),
    "silu": images(F.silu),
    "gelu-tanh": images(lambda x: F.gelu(x, approximate="tanh")),
    "elu": images(F.elu),
    "leaky-relu": images(F.leaky_relu),
    "softplus": images(F.softplus),
    "hardswish": images(F.hardswish),
    "mish": images(F.mish),
    "log-sigmoid": images(F.logsigmoid),
    "clamp": images(lambda x: x.clamp(-0.3, 0.4)),
    "arithmetic": images(lambda x: (x * x + 1).sqrt() / (2 - x.sigmoid()) - 3 * x.abs().pow(1.5)),
    "reductions": images(lambda x: x - x.amax((2, 3), keepdim=True) + x.var(2, keepdim=True)),
    "constant": images(lambda x: x * torch.tensor([0.5, 2, 1, 3, 1, 1, 4])),
    "pad": images(lambda x: F.pad(x, (1, 2, 0, 1))),
    "slices": images(lambda x: x[:, :, 1:-2, ::2] * 2),
    "cat": images(lambda x: torch.cat([x, x.relu()[..., 2:]], dim=3)),
    "embedding-padding": words(lambda: nn.Embedding(20, 8, padding_idx=3)),
    "bag-sum": words(lambda: nn.EmbeddingBag(20, 8, mode="sum")),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_matches_autograd(name: str) -> None:
    made = compile_family(CASES[name])
    for level, batch in zip(LEVELS, (4, 1), strict=True):
        groups = made.groups(level, seed=0)
        feeds = feeds_of(made, groups, batch)
        assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


@pytest.mark.parametrize("loss", ["mse", "bce-with-logits"])
def test_loss_with_float_targets_matches_autograd(loss: str) -> None:
    family = Family(lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3)), (10,), 3)
    task = make_task(family.model(), family.inputs(2), loss=loss, groups=2)
    made = Compiled(family, task, compile_graphs(task))
    for level, batch in zip(LEVELS, (4, 1), strict=True):
        groups = made.groups(level, seed=0)
        feeds = feeds_of(made, groups, batch)
        feeds["targets"] = np.random.default_rng(1).random((batch, 3), dtype=np.float32)
        assert_close(made.run("gradient", groups, feeds), autograd(task, groups, feeds))
    assert made.graphs.manifest.loss == loss


def test_loss_that_counts_its_samples_gets_a_graph_for_each_batch_size() -> None:
    def odd(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).pow(2).mean(1) * (len(outputs) + 1)

    family = Family(lambda: nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3)), (10,), 3)
    task = make_task(family.model(), family.inputs(2), loss=odd, groups=2)
    graphs = compile_graphs(
        task, levels=LEVELS, batch_sizes=(4, 2), example_targets=torch.zeros(2, 3)
    )
    made = Compiled(family, task, graphs)
    sizes = [(e.kept, e.batch) for e in graphs.manifest.graphs if e.kind == "gradient"]
    assert sizes == [((8,), 4), ((8,), 2), ((4,), 4), ((4,), 2)]
    for batch in (4, 2):
        groups = made.groups(0.5, seed=0)
        feeds = feeds_of(made, groups, batch)
        feeds["targets"] = np.random.default_rng(1).random((batch, 3), dtype=np.float32)
        assert_close(made.run("gradient", groups, feeds), autograd(task, groups, feeds))
