"""The model families of benchmarks and tests: ordinary torch modules that do not use this project.

They are written the way people write them (fixed sizes in `view`, fused q/k/v, in-place ReLU),
because tracing has to cope with that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Family:
    """A model's constructor, the shape of its inputs, and its number of classes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    vocabulary: int = 0
    """Above 0: inputs are token ids below this."""

    def inputs(self, batch: int, seed: int = 0) -> Tensor:
        """Make random inputs, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            return torch.randint(self.vocabulary, (batch, *self.shape), generator=generator)
        return torch.randn(batch, *self.shape, generator=generator)

    def model(self, seed: int = 0) -> nn.Module:
        """Make a model with reproducible weights, without touching torch's global generator."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


def mlp(*widths: int) -> nn.Module:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class LeNet(nn.Module):
    """LeNet-5 with its flatten written as a fixed-size `view`, and dropout."""

    def __init__(self, channels: int, side: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = 16 * ((((side - 4) // 2) - 4) // 2) ** 2
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(self.features, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, self.features)
        x = self.dropout(F.relu(self.fc1(x)))
        out: Tensor = self.fc3(F.relu(self.fc2(x)))
        return out


def cnn(channels: int = 3, side: int = 32) -> nn.Module:
    """Two 3×3 convolutions of 32 and 64 channels, each pooled, and a hidden layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (side // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def depthwise_cnn() -> nn.Module:
    """Depthwise-separable blocks with BatchNorm, and one grouped convolution."""

    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU6(),
        *separable(16, 32, 1),
        *separable(32, 64, 2),
        nn.Conv2d(64, 64, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def wide_kernel_cnn() -> nn.Module:
    """FedAvg's CNN: two 5×5 convolutions of 32 and 64 channels, each pooled, and 512 hidden."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def separable(before: int, after: int, stride: int) -> list[nn.Module]:
    """A depthwise and a pointwise convolution, each with BatchNorm (MobileNet's block)."""
    return [
        nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
        nn.BatchNorm2d(before),
        nn.ReLU6(inplace=True),
        nn.Conv2d(before, after, 1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU6(inplace=True),
    ]


def separable_cnn() -> nn.Module:
    """Depthwise-separable blocks behind one ordinary convolution, for 32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(inplace=True),
        *separable(32, 64, 1),
        *separable(64, 128, 2),
        *separable(128, 128, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class InvertedResidual(nn.Module):
    """MobileNetV2's block: widen, convolve by channel, narrow; a shortcut if it fits."""

    def __init__(self, before: int, after: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        wide = before * expand
        self.adds = stride == 1 and before == after
        self.block = nn.Sequential(
            nn.Conv2d(before, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True),
            nn.Conv2d(wide, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the features of the next block."""
        out: Tensor = self.block(x)
        return x + out if self.adds else out


def mobilenet() -> nn.Module:
    """A small MobileNetV2 for 32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(inplace=True),
        InvertedResidual(32, 32, 1),
        InvertedResidual(32, 64, 2),
        InvertedResidual(64, 64, 1),
        InvertedResidual(64, 96, 2),
        nn.Conv2d(96, 256, 1, bias=False),
        nn.BatchNorm2d(256),
        nn.ReLU6(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


class TextClassifier(nn.Module):
    """fastText's shape: the mean of word vectors, a hidden layer, classes.

    `padding` is an id that does not count in the mean; None: all do.
    """

    def __init__(self, vocabulary: int, width: int = 64, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width, mode="mean", padding_idx=padding)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 4)

    def forward(self, ids: Tensor) -> Tensor:
        """Class scores of a batch of equally long token sequences."""
        out: Tensor = self.out(F.relu(self.hidden(self.embedding(ids))))
        return out


def sensor_cnn() -> nn.Module:
    """A 1-D CNN for windows of 9 sensor channels × 128 samples (UCI HAR)."""
    return nn.Sequential(
        nn.Conv1d(9, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(8),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 6),
    )


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    def __init__(
        self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), norm(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the features of the next block."""
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out, inplace=True)


def resnet(
    norm: Callable[[int], nn.Module],
    widths: tuple[int, ...] = (64, 128, 256, 512),
    blocks: int = 2,
) -> nn.Module:
    """A residual network for 32×32 images; the defaults are ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), norm(widths[0])]
    layers.append(nn.ReLU(inplace=True))
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(ResidualBlock(before, width, stride, norm))
            before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)]
    return nn.Sequential(*layers)


class TransformerBlock(nn.Module):
    """Pre-norm attention with fused q, k, v, and an MLP."""

    def __init__(self, width: int, heads: int, hidden: int, *, qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the tokens of the next block."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class ViT(nn.Module):
    """A vision transformer for small images, with a class token and learned positions."""

    def __init__(
        self,
        side: int = 32,
        patch: int = 8,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 128,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        blocks = (TransformerBlock(width, heads, hidden) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


class SubDisMOViT(nn.Module):
    """SubDisMO's ViT-Small (its tables 4 and 7), as its published counts imply it.

    Patches of 8×8; q, k and v without bias; no norm behind the last block; a head with a hidden
    layer as wide as the MLPs'. The counts leave out the class token and the positions (1,152
    numbers), so here they are buffers: a sinusoid for each token, the class token's content zero.
    """

    positions: Tensor

    def __init__(
        self,
        side: int = 32,
        patch: int = 8,
        width: int = 64,
        depth: int = 4,
        heads: int = 8,
        hidden: int = 128,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.register_buffer("positions", sinusoids((side // patch) ** 2 + 1, width)[None])
        blocks = (TransformerBlock(width, heads, hidden, qkv_bias=False) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = F.pad(self.patches(x).flatten(2).transpose(1, 2), (0, 0, 1, 0)) + self.positions
        out: Tensor = self.head(self.blocks(x)[:, 0])
        return out


def sinusoids(count: int, width: int) -> Tensor:
    """Positions 0 … count − 1 as sines and cosines of falling frequencies."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angles = torch.arange(count)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def group_norm(channels: int) -> nn.Module:
    """GroupNorm with 16 groups: up to 16 atoms an axis."""
    return nn.GroupNorm(16, channels)


FAMILIES: dict[str, Family] = {
    "mlp": Family(lambda: mlp(784, 200, 200, 10), (1, 28, 28), 10),
    "mlp-200": Family(lambda: mlp(784, 200, 10), (1, 28, 28), 10),
    "mlp-2048": Family(lambda: mlp(784, 2048, 2048, 10), (1, 28, 28), 10),
    "lenet-28": Family(lambda: LeNet(1, 28), (1, 28, 28), 10),
    "lenet-32": Family(lambda: LeNet(3, 32), (3, 32, 32), 10),
    "cnn": Family(cnn, (3, 32, 32), 10),
    "depthwise-cnn": Family(depthwise_cnn, (3, 32, 32), 10),
    "cnn-5x5": Family(wide_kernel_cnn, (1, 28, 28), 10),
    "separable-cnn": Family(separable_cnn, (3, 32, 32), 10),
    "mobilenet": Family(mobilenet, (3, 32, 32), 10),
    "text": Family(lambda: TextClassifier(5000), (40,), 4, vocabulary=5000),
    "news": Family(lambda: TextClassifier(5000, padding=0), (40,), 4, vocabulary=5000),
    "sensor-cnn": Family(sensor_cnn, (9, 128), 6),
    "resnet18-gn": Family(lambda: resnet(group_norm), (3, 32, 32), 10),
    "resnet-bn": Family(lambda: resnet(nn.BatchNorm2d, (16, 32), 1), (3, 32, 32), 10),
    "resnet-gn": Family(lambda: resnet(lambda c: nn.GroupNorm(4, c), (16, 32), 1), (3, 32, 32), 10),
    "vit-small": Family(ViT, (3, 32, 32), 10),
    "vit-subdismo": Family(SubDisMOViT, (3, 32, 32), 10),
}
