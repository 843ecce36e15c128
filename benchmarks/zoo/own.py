"""Six small models in the manner of stock ones, so that the zoo opens without their packages.

Each holds what made tracing its kind hard: dropout in place and squeeze-and-excite, shuffled
halves, concatenated features, stochastic depth over LayerNorm, padding masks, gated causal blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.names import CLASSES, TOKENS

VOCABULARY = 40


class DropPath(nn.Module):
    """Drops a whole branch of some samples while training, as timm does."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.keep = 1 - p

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch, or zeros for a sample."""
        if not self.training:
            return x
        drawn = x.new_empty((len(x),) + (1,) * (x.ndim - 1)).bernoulli_(self.keep)
        return x * drawn.div_(self.keep)


class Inverted(nn.Module):
    """MobileNetV3's block: expand, filter each channel, weigh channels, project."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        inner = 3 * width
        self.expand = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish()
        )
        self.filter = nn.Sequential(
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner)
        )
        self.squeeze, self.excite = nn.Conv2d(inner, squeezed, 1), nn.Conv2d(squeezed, inner, 1)
        self.project = nn.Sequential(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.path = DropPath(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features."""
        h = F.hardswish(self.filter(self.expand(x)))
        scale = F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))
        h = h * F.hardsigmoid(self.excite(scale))
        out: Tensor = x + self.path(self.project(h))
        return out


def mobile() -> nn.Module:
    """MobileNetV3 in little; four groups do not divide its squeezed widths of 6 and 10."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        Inverted(16, 6),
        Inverted(16, 10),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(16, CLASSES),
    )


class Shuffled(nn.Module):
    """ShuffleNetV2's unit: half of the channels pass, and the halves are mixed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the shuffled channels."""
        left, right = x.chunk(2, dim=1)
        x = torch.cat((left, self.branch(right)), dim=1)
        batch, channels, high, wide = x.size()
        x = x.view(batch, 2, channels // 2, high, wide).transpose(1, 2).contiguous()
        return x.view(batch, channels, high, wide)


def shuffled() -> nn.Module:
    """Two shuffled units between a stem and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        Shuffled(16),
        Shuffled(16),
        nn.Conv2d(16, 24, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, CLASSES),
    )


class Dense(nn.Module):
    """DenseNet's layer: new features beside all earlier ones."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(width), nn.Conv2d(width, 16, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(16), nn.Conv2d(16, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return old and new features."""
        new = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, new], 1)


def dense() -> nn.Module:
    """Three dense layers."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        *(Dense(16 + 8 * number, 8) for number in range(3)),
        nn.BatchNorm2d(40),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, CLASSES),
    )


class Layer(nn.Module):
    """A transformer's layer with stochastic depth and attention dropout."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.path = DropPath(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the stream after attention and a gated layer."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (
            each.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for each in (q, k, v)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, mask, 0.1 if self.training else 0.0, is_causal=self.causal
        )
        x = x + self.path(self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        h = self.norm2(x)
        out: Tensor = x + self.path(self.down(F.silu(self.gate(h)) * self.up(h)))
        return out


class Patches(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 32, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.places = nn.Parameter(torch.randn(1, 17, 32) / 10)
        self.layers = nn.Sequential(Layer(32, 4), Layer(32, 4))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        out: Tensor = self.head(self.layers(x)[:, 0])
        return out


class MaskedText(nn.Module):
    """An encoder of padded texts that returns a dictionary, as BERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(TOKENS, 32)
        self.drop = nn.Dropout(0.1)
        self.first, self.second = Layer(32, 4), Layer(32, 4)
        self.pool = nn.Linear(32, 48)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        """Class scores under `logits`, beside the stream."""
        places = torch.arange(input_ids.shape[1])
        x = self.drop(self.words(input_ids) + self.places(places))
        hidden = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -1e4
        x = self.second(self.first(x, hidden), hidden)
        return {"hidden": x, "logits": self.head(torch.tanh(self.pool(x[:, 0])))}


class Generator(nn.Module):
    """A causal model that predicts the class after the last word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(Layer(32, 4, causal=True) for _ in range(2))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Class scores, and the stream they come from."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x[:, -1]), x


OWN = {
    "mobile": mobile,
    "shuffled": shuffled,
    "dense": dense,
    "patches": Patches,
    "masked-text": MaskedText,
    "generator": Generator,
}
"""Builders by name."""
