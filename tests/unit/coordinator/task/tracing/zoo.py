"""Small models that tracing has to cope with, beside the families of `benchmarks.models`.

Each is written the way people write it; none knows anything of plans.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import FAMILIES, Family, LeNet, resnet

WIDTH, HEADS, TOKENS = 32, 4, 6


class Residual(nn.Module):
    """`x + inner(x)`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` with its averaged attention maps, as is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x, x, x)
        out: Tensor = self.head(mixed.mean(1))
        return out


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, two layers."""

    def __init__(self, *, norm_first: bool, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 24, dropout, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x)[:, 0])
        return out


class ManualAttention(nn.Module):
    """One Linear each for q, k and v; attention fused, or from matmul and softmax.

    A head is wider (8) than there are heads (4): its values alone could be cut inside a head.
    """

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (
            layer(normed).view(x.shape[0], TOKENS, HEADS, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
            mixed = scores.softmax(-1) @ v
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = self.head(x.mean(1))
        return out


class SqueezeExcite(nn.Module):
    """Channels weighted by what a bottleneck says about their means."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.squeeze = nn.Linear(16, 8)
        self.excite = nn.Linear(8, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        weights = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        x = x * weights[:, :, None, None]
        out: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class ChannelShuffle(nn.Module):
    """ShuffleNet's unit: a grouped convolution, the shuffle, a depthwise one, a pointwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 1)
        self.grouped = nn.Conv2d(24, 24, 1, groups=4)
        self.depthwise = nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.pointwise = nn.Conv2d(24, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.grouped(self.first(x)))
        batch, channels, height, width = x.shape
        x = x.view(batch, 4, channels // 4, height, width).transpose(1, 2)
        x = self.depthwise(x.reshape(batch, channels, height, width))
        out: Tensor = self.head(F.relu(self.pointwise(x)).mean((2, 3)))
        return out


class ShuffledUnits(nn.Module):
    """A shuffle of 4 × 4 units: two factors of one size, of which one becomes the axis."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x)).view(-1, 4, 4).transpose(1, 2).flatten(1)
        out: Tensor = self.head(x)
        return out


class Bilinear(nn.Module):
    """Products of all pairs of units: one dimension in which the same width occurs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.hidden = nn.Linear(64, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pairs = (x[:, :, None] * x[:, None, :]).flatten(1)
        out: Tensor = self.head(F.relu(self.hidden(pairs)))
        return out


class GatedUnit(nn.Module):
    """GLU: one Linear makes a gate and what passes through it."""

    def __init__(self, *, by_chunk: bool) -> None:
        super().__init__()
        self.by_chunk = by_chunk
        self.up = nn.Linear(12, 32)
        self.down = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1) if self.by_chunk else self.up(x).split(16, -1)
        out: Tensor = self.down(torch.sigmoid(gate) * value)
        return out


class EmbeddingMean(nn.Module):
    """The mean of word vectors, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH, padding_idx=0)
        self.hidden = nn.Linear(WIDTH, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.hidden(self.embedding(ids).mean(1))))
        return out


class Positions(nn.Module):
    """A sinusoidal table kept as a buffer, sliced to the length of the input."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        angle = torch.arange(20)[:, None] / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], 2).flatten(1))
        self.hidden = nn.Linear(WIDTH, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.table[: ids.shape[1]]
        out: Tensor = self.head(F.gelu(self.hidden(x)).mean(1))
        return out


class TiedWeights(nn.Module):
    """A language model's shape: the embedding is also the output layer, by one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, WIDTH)
        self.hidden = nn.Linear(WIDTH, 12)
        self.back = nn.Linear(12, WIDTH)
        self.out = nn.Linear(WIDTH, 30, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.out(self.back(F.relu(self.hidden(self.embedding(ids)))).mean(1))
        return out


class CalledTwice(nn.Module):
    """One layer used twice in a row: its input and its output are one width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.shared(F.relu(self.first(x))))
        out: Tensor = self.head(F.relu(self.shared(x)))
        return out


class Concatenated(nn.Module):
    """Two branches side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(10, 8)
        self.right = nn.Linear(10, 8)
        self.hidden = nn.Linear(16, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], dim=1)
        out: Tensor = self.head(F.relu(self.hidden(x)))
        return out


class DenseBlocks(nn.Module):
    """Concatenations of concatenations and of the input: normed, mixed, added to and flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.grow = nn.Conv2d(8, 12, 3, padding=1)
        self.norm = nn.BatchNorm2d(20)
        self.squeeze = nn.Conv2d(20, 8, 1)
        self.mix = nn.Conv2d(31, 31, 1)
        self.head = nn.Linear(31 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = self.stem(x)
        both = torch.cat([first, self.grow(F.relu(first))], dim=1)
        new = self.squeeze(F.relu(self.norm(both)))
        every = torch.cat([both, new, F.avg_pool2d(x, 2)], dim=1)
        out: Tensor = self.head(F.avg_pool2d(every + self.mix(every), 2).flatten(1))
        return out


class Pieces(nn.Module):
    """Widths that are taken apart unevenly, by split and by slices, and put together otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.part = nn.Conv2d(4, 4, 3, padding=1)
        self.wide = nn.Conv2d(16, 24, 1)
        self.other = nn.Conv2d(3, 24, 3, 2, 1)
        self.gate = nn.Parameter(torch.randn(8, 1, 1))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        some, rest = self.stem(x).split([4, 12], dim=1)
        y = self.wide(F.relu(torch.cat([self.part(some), rest], 1)))
        y = torch.cat([y[:, :8] * self.gate, y[:, 8:]], 1)  # segments of 8 and 16
        turned = torch.cat(self.other(x).split([16, 8], 1), 1)  # of 16 and 8
        out: Tensor = self.head(F.relu(y + turned).mean((2, 3)))
        return out


class ShuffledBranches(nn.Module):
    """Two units of ShuffleNet: halves side by side, shuffled, and divided anew."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(3, 16, 3, 2, 1)
        self.unit = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        passed, used = self._shuffle(self.left(x), self.right(x)).chunk(2, dim=1)
        y = self._shuffle(passed, F.relu(self.unit(used)))
        out: Tensor = self.head(F.relu(y).mean((2, 3)))
        return out

    def _shuffle(self, left: Tensor, right: Tensor) -> Tensor:
        both = torch.cat([left, right], 1)
        rows, channels, *image = both.shape
        return both.view(rows, 2, channels // 2, *image).transpose(1, 2).reshape(both.shape)


class Cells(nn.Module):
    """Recurrent cells in a loop of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTMCell(7, 12), nn.GRUCell(12, 8)
        self.tanh, self.relu = nn.RNNCell(8, 8), nn.RNNCell(8, 8, nonlinearity="relu")
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        y = x.new_zeros(len(x), 8)
        for step in x.unbind(1):
            state = self.lstm(step, state)
            y = self.relu(self.tanh(self.gru(state[0], y)))
        out: Tensor = self.head(y.view_as(y))
        return out


class LastStep(nn.Module):
    """An LSTM read out at its last step by an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 10, batch_first=True)
        self.hidden = nn.Linear(10, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.lstm(x)
        out: Tensor = self.head(F.relu(self.hidden(steps[:, -1])))
        return out


class LastState(nn.Module):
    """A two-layer GRU in both directions, time first, read out by its final state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(7, 5, num_layers=2, bidirectional=True)
        self.hidden = nn.Linear(5, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        _, states = self.gru(x.transpose(0, 1))
        out: Tensor = self.head(F.relu(self.hidden(states[-1])))
        return out


def instance_norm_cnn() -> nn.Module:
    """InstanceNorm with weights and running statistics."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.InstanceNorm2d(12, affine=True),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )


def prelu_cnn() -> nn.Module:
    """PReLU with a slope per channel, then with one for all; dropout of whole channels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.PReLU(8),
        nn.Dropout2d(0.3),
        nn.Conv2d(8, 12, 3),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(12 * 16, 5),
    )


def shared_norm_mlp() -> nn.Module:
    """One BatchNorm behind two layers, registered under two names: one width, one set of both."""
    norm = nn.BatchNorm1d(16)
    before, between, after = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 5)
    return nn.Sequential(before, norm, nn.ReLU(), between, norm, nn.ReLU(), after)


def partly_frozen_mlp() -> nn.Module:
    """A first layer that is not trained, and a head of which only the bias is."""
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())
    model.append(nn.Linear(12, 5))
    for name in ("0.weight", "0.bias", "4.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


def residual_mlp() -> nn.Module:
    """A stream that layers add to, without normalisation: one width from end to end."""
    inner = (nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
    return nn.Sequential(nn.Linear(10, 16), *map(Residual, inner), nn.Linear(16, 5))


def layer_norm_mlp() -> nn.Module:
    """The same stream, normalised: it stays whole, only the bottleneck is a width."""
    inner = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16))
    return nn.Sequential(nn.Linear(10, 16), Residual(inner), nn.Linear(16, 5))


class TokenNorm(nn.Module):
    """A norm whose channels are tokens: it takes means over the hidden width, which stays whole."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = norm
        self.hidden = nn.Linear(8, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x))).mean(1)
        out: Tensor = self.head(F.relu(self.hidden(x)))
        return out


class PooledUnits(nn.Module):
    """Units pooled as if they were a signal without channels; then two more layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.hidden = nn.Linear(4, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool1d(F.relu(self.first(x)), 2)
        out: Tensor = self.head(F.relu(self.hidden(x)))
        return out


class ShiftedChannels(nn.Module):
    """Channels moved by one, which leaves their number as it was; pooled with indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 12, 3)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(F.relu(self.first(x)), (0, 0, 0, 0, 1, -1))
        x, _ = F.max_pool2d(F.relu(self.second(x)), 2, return_indices=True)
        out: Tensor = self.head(x.flatten(1))
        return out


class Squeezed(nn.Module):
    """Dimensions of size one dropped wherever they are, which a narrow width must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 8)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.first(x).squeeze().squeeze(1))
        return out


class ClassToken(nn.Module):
    """A learned token, zero at first, repeated for each sample; read out by the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.embed = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.repeat(x.shape[0], 1, 1), self.embed(x)], dim=1)
        out: Tensor = self.head(x.max(1)[0])
        return out


class EinsumAttention(nn.Module):
    """Attention in index notation, its weights with a dimension for the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, WIDTH, HEADS, 8) / WIDTH**0.5)
        self.out = nn.Parameter(torch.randn(HEADS, 8, WIDTH) / WIDTH**0.5)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhe->bthe", x, weight) for weight in self.qkv)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k).softmax(-1)
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores, v)
        out: Tensor = self.head(torch.einsum("bqhe,hed->bqd", mixed, self.out).mean(1))
        return out


class WritesInput(nn.Module):
    """Scales its input in place, through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x.view(-1).mul_(2)
        out: Tensor = self.head(F.relu(self.first(x)))
        return out


def repeated_mlp() -> nn.Module:
    """Gates, every unit twice, and activations that torch does not mark as pointwise."""

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat_interleave(2, dim=1)

    return nn.Sequential(
        *(nn.Linear(10, 24), nn.GLU(), nn.Hardswish(), nn.Linear(12, 8), nn.LogSigmoid()),
        *(Twice(), nn.Linear(16, 12), nn.Mish(inplace=True), nn.Linear(12, 5)),
    )


def autoencoder() -> nn.Module:
    """Down to half the size and up again by a transposed convolution and by interpolation."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Hardswish(inplace=True)),
        *(nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(2), nn.Upsample(scale_factor=2), nn.Flatten(), nn.Linear(192, 5)),
    )


_TOKENS = (TOKENS, WIDTH)

MODELS: dict[str, Family] = {
    **{name: family for name, family in FAMILIES.items() if name != "vit-subdismo"},
    # ResNet-18 at a quarter of its widths, to save time
    "resnet18-gn": Family(
        lambda: resnet(lambda c: nn.GroupNorm(16, c), (16, 32, 64, 128)), (3, 32, 32), 10
    ),
    "lenet-dropout": Family(lambda: LeNet(1, 28, dropout=0.5), (1, 28, 28), 10),
    "multihead": Family(SelfAttention, _TOKENS, 5),
    "encoder": Family(lambda: Encoder(norm_first=False), _TOKENS, 5),
    "encoder-norm-first": Family(lambda: Encoder(norm_first=True), _TOKENS, 5),
    "attention-manual": Family(lambda: ManualAttention(fused=False), _TOKENS, 5),
    "attention-unfused": Family(lambda: ManualAttention(fused=True), _TOKENS, 5),
    "squeeze-excite": Family(SqueezeExcite, (3, 8, 8), 5),
    "channel-shuffle": Family(ChannelShuffle, (3, 8, 8), 5),
    "shuffled-units": Family(ShuffledUnits, (10,), 5),
    "bilinear": Family(Bilinear, (10,), 5),
    "glu-chunk": Family(lambda: GatedUnit(by_chunk=True), (12,), 5),
    "glu-split": Family(lambda: GatedUnit(by_chunk=False), (12,), 5),
    "embedding-mean": Family(EmbeddingMean, (9,), 4, vocabulary=30),
    "positions": Family(Positions, (9,), 4, vocabulary=30),
    "tied-weights": Family(TiedWeights, (9,), 30, vocabulary=30),
    "instance-norm": Family(instance_norm_cnn, (3, 8, 8), 5),
    "prelu": Family(prelu_cnn, (3, 8, 8), 5),
    "called-twice": Family(CalledTwice, (10,), 5),
    "shared-norm": Family(shared_norm_mlp, (10,), 5),
    "partly-frozen": Family(partly_frozen_mlp, (10,), 5),
    "residual-mlp": Family(residual_mlp, (10,), 5),
    "layer-norm-mlp": Family(layer_norm_mlp, (10,), 5),
    "concatenated": Family(Concatenated, (10,), 5),
    "dense-blocks": Family(DenseBlocks, (3, 8, 8), 5),
    "pieces": Family(Pieces, (3, 8, 8), 5),
    "shuffled-branches": Family(ShuffledBranches, (3, 8, 8), 5),
    "cells": Family(Cells, (3, 7), 5),
    "lstm": Family(LastStep, (6, 7), 5),
    "gru": Family(LastState, (6, 7), 5),
    "batch-norm-tokens": Family(lambda: TokenNorm(nn.BatchNorm1d(TOKENS)), _TOKENS, 5),
    "group-norm-tokens": Family(lambda: TokenNorm(nn.GroupNorm(3, TOKENS)), _TOKENS, 5),
    "instance-norm-tokens": Family(
        lambda: TokenNorm(nn.InstanceNorm1d(TOKENS, affine=True)), _TOKENS, 5
    ),
    "pooled-units": Family(PooledUnits, (10,), 5),
    "shifted-channels": Family(ShiftedChannels, (3, 8, 8), 5),
    "squeezed": Family(Squeezed, (3, 8, 8), 5),
    "class-token": Family(ClassToken, _TOKENS, 5),
    "attention-einsum": Family(EinsumAttention, _TOKENS, 5),
    "writes-input": Family(WritesInput, (10,), 5),
    "repeated": Family(repeated_mlp, (10,), 5),
    "autoencoder": Family(autoencoder, (3, 8, 8), 5),
}
