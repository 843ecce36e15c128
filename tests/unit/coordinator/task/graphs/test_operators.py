"""Operators and losses that the families do not use, each in a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Family
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import make_task
from tests.unit.coordinator.task.graphs.oracle import (
    LEVELS,
    Compiled,
    assert_close,
    autograd,
    compile_family,
    feeds_of,
)


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


class WeightedBags(nn.Module):
    """Bags whose entries count by their place: weights that no sample has of its own."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum", padding_idx=padding_idx)
        self.places = nn.Parameter(torch.linspace(-1, 2, 6))
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        weights = self.places.expand(ids.shape)
        out: Tensor = self.head(torch.tanh(self.table(ids, per_sample_weights=weights)))
        return out


class Volumes(nn.Module):
    """A convolution, something on its eight channels of volumes, a mean of every channel."""

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 8, 1)
        self.middle = middle
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.conv(x))
        weights = torch.arange(x[0, 0].numel(), dtype=x.dtype).reshape(x.shape[2:]).sqrt()
        out: Tensor = self.head((x * weights).mean((2, 3, 4)))
        return out


class Lookups(nn.Module):
    """Rows of a table by id, by two tensors at once, and by each sample's own place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 4, 8) / 2)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]  # batch, 6, 4, 8
        pairs = self.table[ids[:, :3, None], torch.tensor([3, 0])].tanh().sum((1, 2))
        x = x.transpose(2, 3)
        apart = x[:, torch.tensor([5, 0, 0]), :, torch.tensor([1, 2, 2])].pow(2).mean(0)
        own = x[torch.arange(len(ids)), ids.argmax(1)].mean(2)
        out: Tensor = self.head(torch.tanh(own + pairs + apart))
        return out


class Masked(nn.Module):
    """Attention as BERT writes it: padding is masked by a large negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        there = ids != 0
        mask = (1.0 - there[:, None, None, :].to(torch.float32)) * torch.finfo(torch.float32).min
        q, k, v = self.qkv(self.table(ids)).reshape(batch, length, 3, 4, 2).permute(2, 0, 3, 1, 4)
        q, k = self.rotated(q, length), self.rotated(k, length)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) + mask).masked_fill(~causal, -1e4)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, 8)
        x = torch.where(there.unsqueeze(-1).expand(-1, -1, 8), x, x.new_zeros(()))
        count = there.sum(1, keepdim=True).clamp(min=1)
        out: Tensor = self.head(x.sum(1) / count)
        return out

    @staticmethod
    def rotated(x: Tensor, length: int) -> Tensor:
        """Rotary positions: both halves of a head turn together."""
        angles = torch.outer(torch.arange(length).float(), torch.tensor([0.7]))
        angles = torch.cat((angles, angles), -1)
        turned = torch.cat((-x[..., 1:], x[..., :1]), -1)
        return x * angles.cos() + turned * angles.sin()


def interpolated(x: Tensor) -> Tensor:
    x = F.interpolate(x, scale_factor=2, mode="bilinear")
    x = F.interpolate(x, (14, 5), mode="bicubic", align_corners=True)
    x = F.interpolate(x, (5, 9), mode="bilinear", align_corners=True)
    x = F.interpolate(x, scale_factor=1.7, mode="bicubic", recompute_scale_factor=False)
    return F.interpolate(x, (12, 8))  # nearest, by factors that are not whole


def antialiased(x: Tensor) -> Tensor:
    x = F.interpolate(x, (5, 4), mode="bilinear", antialias=True)
    x = F.interpolate(x, (7, 3), mode="nearest-exact")
    return F.interpolate(x, (6, 9), mode="bicubic", antialias=True)


def padded(x: Tensor) -> Tensor:
    x = F.pad(x, (2, 1, 3, 0), mode="reflect")
    x = F.pad(x, (0, 2, 1, 1), mode="replicate")
    return F.pad(x, (1, 2, 0, 3), mode="circular")


def moved(x: Tensor) -> Tensor:
    x = torch.roll(x, (1, -3), (2, 3)).flip(2)
    return x.index_select(3, torch.tensor([4, 4, 0])) + x.topk(3, 3).values + x.sort(3)[0][..., 1:4]


def pooled_volumes(x: Tensor) -> Tensor:
    x = F.max_pool3d(F.pad(x, (1, 0, 0, 2, 1, 1), mode="replicate"), (2, 3, 2), 2, (1, 1, 0))
    x = F.interpolate(x, (5, 4, 6), mode="trilinear")
    x = F.avg_pool3d(x, 3, 2, 1, count_include_pad=False)
    return F.adaptive_avg_pool3d(F.interpolate(x, scale_factor=(2, 1, 2)), (2, 2, 4))


def windowed(x: Tensor) -> Tensor:
    x = x + F.fold(F.unfold(x, 3, stride=2), (9, 7), 3, stride=2)
    return x.unfold(3, 3, 2).amax(-1)


def more_functions(x: Tensor) -> Tensor:
    x = x.atan() + torch.exp2(x) * (x.abs() + 1).log2() + x.asinh() * torch.special.erfc(x)
    x = F.hardshrink(x, 0.3) + F.softshrink(x, 0.2) + torch.nan_to_num(x)
    places = torch.arange(7)
    x = x * (places % 3) + x.sin() * (places // 2)
    return torch.lerp(x, x.sinh().tanh(), 0.3) * (x > -3).any(3, keepdim=True)


def volumes(middle: Callable[[Tensor], Tensor]) -> Family:
    return Family(lambda: Volumes(middle), (2, 4, 6, 5), 5)


def signals(*middle: nn.Module, features: int) -> Family:
    """A convolution along twelve steps, something on its eight channels, classes."""

    def make() -> nn.Module:
        layers = [copy.deepcopy(layer) for layer in middle]
        first = nn.Conv1d(3, 8, 3, padding=1)
        return nn.Sequential(first, *layers, nn.Tanh(), nn.Flatten(), nn.Linear(features, 5))

    return Family(make, (3, 12), 5)


def module(make: Callable[[], nn.Module]) -> Family:
    return Family(lambda: Images(make()), (3, 9, 7), 5)


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
    "transposed": module(lambda: nn.ConvTranspose2d(8, 8, 3, 2, 1, 1)),
    "transposed-uneven": module(lambda: nn.ConvTranspose2d(8, 8, (3, 2), (2, 3), (1, 0), (1, 2))),
    "transposed-dilated": module(lambda: nn.ConvTranspose2d(8, 8, 3, 2, 1, dilation=2, bias=False)),
    "transposed-1d": signals(nn.ConvTranspose1d(8, 6, 4, 2, 1), features=144),
    "adaptive-max": images(lambda x: F.adaptive_max_pool2d(x, (3, 1))),
    "adaptive-max-1d": signals(nn.AdaptiveMaxPool1d(4), features=32),
    "adaptive-mean-1d": signals(nn.AdaptiveAvgPool1d(5), features=40),
    "upsample": images(lambda x: F.interpolate(x, scale_factor=(2, 3))),
    "upsample-1d": signals(nn.Upsample(scale_factor=3), features=288),
    "max-along": images(lambda x: x - x.max(3, keepdim=True).values),
    "min-along": images(lambda x: x * x.min(2).values[:, :, None]),
    "instance-norm": module(lambda: nn.InstanceNorm2d(8, affine=True)),
    "instance-norm-statistics": module(lambda: nn.InstanceNorm2d(8, track_running_stats=True)),
    "layer-norm": images(lambda x: F.layer_norm(x, (7,))),
    "rms-norm": images(lambda x: F.rms_norm(x, (7,))),
    "log-softmax": images(lambda x: x.log_softmax(3)),
    "logsumexp": images(lambda x: x - x.logsumexp(3, keepdim=True)),
    "normalize": images(lambda x: F.normalize(x, dim=3)),
    "cumsum": images(lambda x: x.cumsum(3)),
    "silu": images(F.silu),
    "silu-in-place": module(lambda: nn.SiLU(inplace=True)),
    "hardsigmoid": images(F.hardsigmoid),
    "relu6": module(lambda: nn.ReLU6(inplace=True)),
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
    "interpolation": images(interpolated),
    "interpolation-antialiased": images(antialiased),
    "interpolation-1d": signals(nn.Upsample(scale_factor=1.5, mode="linear"), features=144),
    "padding": images(padded),
    "roll-and-choose": images(moved),
    "volumes": volumes(pooled_volumes),
    "adaptive-max-uneven": images(lambda x: F.adaptive_max_pool2d(x, (4, 3))),
    "windows": images(windowed),
    "pixel-shuffle": module(
        lambda: nn.Sequential(
            nn.Conv2d(8, 32, 1), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.Conv2d(32, 8, 1)
        )
    ),
    "more-functions": images(more_functions),
    "lookups": Family(Lookups, (6,), 5, vocabulary=20),
    "masks-and-rotary": Family(Masked, (6,), 5, vocabulary=20),
    "embedding-padding": words(lambda: nn.Embedding(20, 8, padding_idx=3)),
    "bag-sum": words(lambda: nn.EmbeddingBag(20, 8, mode="sum")),
    "bag-sum-padding": words(lambda: nn.EmbeddingBag(20, 8, mode="sum", padding_idx=0)),
    "bag-mean-padding": words(lambda: nn.EmbeddingBag(20, 8, mode="mean", padding_idx=3)),
    "bag-weights": Family(WeightedBags, (6,), 5, vocabulary=20),
    "bag-weights-padding": Family(lambda: WeightedBags(2), (6,), 5, vocabulary=20),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_matches_autograd(name: str) -> None:
    made = compile_family(CASES[name])
    for level, batch in zip(LEVELS, (4, 1), strict=True):
        groups = made.groups(level, seed=0)
        feeds = feeds_of(made, groups, batch)
        assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


def test_bag_of_nothing_but_padding_is_zero() -> None:
    """Also where its mean would be of no entries at all."""
    made = compile_family(CASES["bag-mean-padding"])
    groups = made.groups(1.0, seed=0)
    feeds = feeds_of(made, groups, 4)
    feeds["x0"][1] = 3
    feeds["x0"][2, :5] = 3
    assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


class PaddedAttention(nn.Module):
    """Attention by torch's own function, with padding masked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        qkv = self.qkv(self.table(ids)).reshape(batch, length, 3, 4, 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=(ids != 0)[:, None, None, :])
        out: Tensor = self.head(x.transpose(1, 2).reshape(batch, length, 8).mean(1))
        return out


def test_attention_to_nothing_but_padding_is_zero() -> None:
    made = compile_family(Family(PaddedAttention, (6,), 5, vocabulary=20))
    groups = made.groups(0.5, seed=0)
    feeds = feeds_of(made, groups, 3)
    feeds["x0"][1] = 0
    feeds["x0"][2, :4] = 0
    assert_close(made.run("gradient", groups, feeds), autograd(made.task, groups, feeds))


def test_loss_on_log_probabilities_matches_autograd() -> None:
    layers = (nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 3), nn.LogSoftmax(1))
    family = Family(lambda: nn.Sequential(*copy.deepcopy(layers)), (10,), 3)
    task = make_task(
        family.model(),
        family.inputs(2),
        loss=lambda outputs, targets: F.nll_loss(outputs, targets, reduction="none"),
        groups=2,
        example_targets=torch.tensor([0, 2, 1]),
    )
    made = Compiled(family, task, compile_graphs(task))
    for level, batch in zip(LEVELS, (4, 1), strict=True):
        groups = made.groups(level, seed=0)
        feeds = feeds_of(made, groups, batch)
        assert_close(made.run("gradient", groups, feeds), autograd(task, groups, feeds))


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
    task = make_task(
        family.model(), family.inputs(2), loss=odd, groups=2, example_targets=torch.zeros(2, 3)
    )
    graphs = compile_graphs(task, levels=LEVELS, batch_sizes=(4, 2))
    made = Compiled(family, task, graphs)
    sizes = [(e.kept, e.batch) for e in graphs.manifest.graphs if e.kind == "gradient"]
    assert sizes == [((8,), 4), ((8,), 2), ((4,), 4), ((4,), 2)]
    for batch in (4, 2):
        groups = made.groups(0.5, seed=0)
        feeds = feeds_of(made, groups, batch)
        feeds["targets"] = np.random.default_rng(1).random((batch, 3), dtype=np.float32)
        assert_close(made.run("gradient", groups, feeds), autograd(task, groups, feeds))
