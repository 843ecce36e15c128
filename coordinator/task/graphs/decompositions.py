"""Rules that reduce torch's operators to the few kinds that have a translation.

Most are torch's own. Ours avoid what cannot be written down for every size (strides, numbers that
follow the batch) or what would be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn import functional as F

from coordinator.task.graphs.errors import GraphCompileError

aten = torch.ops.aten


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = False,
) -> torch.Tensor:
    """Compute BatchNorm by an operator that declares its change of statistics."""
    if training:
        if mean is None or var is None:
            out = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
        else:
            out = aten._native_batch_norm_legit.default(
                x, weight, bias, mean, var, True, momentum, eps
            )
        first: torch.Tensor = out[0]
        return first
    if mean is None or var is None:
        raise GraphCompileError("BatchNorm without running statistics cannot be evaluated")
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * scale.reshape(shape) + shift.reshape(shape)


def instance_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    _cudnn: bool = False,
) -> torch.Tensor:
    """Compute InstanceNorm, and change its statistics in ways that tracing sees."""
    if not use_input_stats:
        return batch_norm(x, weight, bias, mean, var, False, momentum, eps)
    dims = list(range(2, x.ndim))
    own_mean = x.mean(dims, keepdim=True)
    centred = x - own_mean
    own_var = (centred * centred).mean(dims, keepdim=True)
    out = centred * torch.rsqrt(own_var + eps)
    shape = [1, -1] + [1] * (x.ndim - 2)
    if weight is not None:
        out = out * weight.reshape(shape)
    if bias is not None:
        out = out + bias.reshape(shape)
    if mean is not None and var is not None:
        # New statistics are the mean over samples of each sample's own.
        count = x[0, 0].numel()
        new_var = own_var.detach().mean(0).flatten() * (count / (count - 1))
        mean.copy_(momentum * own_mean.detach().mean(0).flatten() + (1 - momentum) * mean)
        var.copy_(momentum * new_var + (1 - momentum) * var)
    return out


def _batch_norm_no_stats(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    _training: bool,
    _momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return normalise(x, weight, bias, eps)[:3]


def normalise(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """Normalise by the batch; return the output, mean, 1 / deviation and variance."""
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1] + [1] * (x.ndim - 2)
    mean = x.mean(dims)
    centred = x - mean.reshape(shape)
    var = (centred * centred).mean(dims)
    rstd = torch.rsqrt(var + eps)
    scale = rstd if weight is None else rstd * weight
    out = centred * scale.reshape(shape)
    if bias is not None:
        out = out + bias.reshape(shape)
    return out, mean, rstd, var


def one_hot(ids: torch.Tensor, classes: int = -1) -> torch.Tensor:
    """Compute what torch does, without its look at the values."""
    if classes < 0:
        raise GraphCompileError("one_hot needs the number of classes")
    return (ids.unsqueeze(-1) == torch.arange(classes)).to(torch.int64)


def adaptive_max_pool(x: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, None]:
    """Take the maximum of every window, without its place.

    Where windows differ in size, the maximum is taken along one dimension after the other; of equal
    values this finds the one that torch does, the first by rows.
    """
    image = list(x.shape[-len(sizes) :])
    if not any(size % out for size, out in zip(image, sizes, strict=True)):
        kernel = [size // out for size, out in zip(image, sizes, strict=True)]
        pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(sizes)]
        return pool(x, kernel), None
    for dim in range(-1, -len(sizes) - 1, -1):
        size, out = image[dim], sizes[dim]
        ends = [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
        parts = [x.narrow(dim, start, end - start).max(dim).values for start, end in ends]
        x = torch.stack(parts, dim)
    return x, None


def circular_pad(x: torch.Tensor, pad: list[int]) -> torch.Tensor:
    """Pad with the values of the other side, without writing into parts of a tensor."""
    for place, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        dim = -1 - place
        size = x.shape[dim]
        x = torch.cat([x.narrow(dim, size - before, before), x, x.narrow(dim, 0, after)], dim)
    return x


def windows(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    """Cut windows along a dimension, as `Tensor.unfold` does, without strides."""
    count = (x.shape[dim] - size) // step + 1
    parts = [
        aten.slice.Tensor(x, dim, first, first + (count - 1) * step + 1, step)
        for first in range(size)
    ]
    return torch.stack(parts, -1)


def _threshold_backward(grad: torch.Tensor, x: torch.Tensor, threshold: float) -> torch.Tensor:
    """Multiply by 0 or 1: a choice between values takes the runtime half as long again."""
    return grad * (x > threshold).to(grad.dtype)


def _hardtanh_backward(
    grad: torch.Tensor, x: torch.Tensor, lowest: float, highest: float
) -> torch.Tensor:
    return grad * ((x > lowest) & (x < highest)).to(grad.dtype)


def _hardshrink_backward(grad: torch.Tensor, x: torch.Tensor, width: float) -> torch.Tensor:
    return torch.where((x >= -width) & (x <= width), 0.0, grad)


def _upsample_nearest(x: torch.Tensor, sizes: list[int], *_scales: float | None) -> Any:
    """Repeat every pixel if the output is a multiple of the image."""
    times = _repeats(x.shape[2:], sizes)
    if times is None:
        return NotImplemented
    split = [part for size in x.shape[2:] for part in (size, 1)]
    whole = [part for size, n in zip(x.shape[2:], times, strict=True) for part in (size, n)]
    pixels = x.reshape(*x.shape[:2], *split).expand(*x.shape[:2], *whole)
    return pixels.reshape(*x.shape[:2], *sizes)


def _upsample_nearest_backward(
    grad: torch.Tensor, _sizes: list[int], shape: list[int], *_scales: float | None
) -> Any:
    times = _repeats(shape[2:], grad.shape[2:])
    if times is None:
        return NotImplemented
    whole = [part for size, n in zip(shape[2:], times, strict=True) for part in (size, n)]
    return grad.reshape(*shape[:2], *whole).sum([3 + 2 * i for i in range(len(times))])


def _repeats(image: Sequence[int], sizes: Sequence[int]) -> list[int] | None:
    if any(out % size for size, out in zip(image, sizes, strict=True)):
        return None
    return [out // size for size, out in zip(image, sizes, strict=True)]


INTERPOLATIONS = (
    *(f"{kind}{n}d" for n in (1, 2, 3) for kind in ("upsample_nearest", "_upsample_nearest_exact")),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
)
PADDINGS = tuple(f"{kind}_pad{n}d" for n in (1, 2, 3) for kind in ("reflection", "replication"))
"""Operators that are translated as they are: torch's rules would index."""


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the rules by which torch breaks operators into those with a translation."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    more = [
        aten.gelu,
        aten.native_layer_norm,
        aten.silu,
        aten.hardswish,
        aten.hardsigmoid,
        aten.leaky_relu,
        aten.elu,
        aten.log_sigmoid_forward,
        aten.softplus,
        aten.mish,
        aten.std,
        aten.std_mean,
        aten.linalg_vector_norm,
    ]
    table.update(get_decompositions(more))
    by_hand = (
        aten.embedding_dense_backward,
        aten.select_backward,
        aten.slice_backward,
        aten.avg_pool2d_backward,
        aten.native_batch_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
        aten.roll,
        aten._safe_softmax,
        *(getattr(aten, name) for name in (*INTERPOLATIONS, *PADDINGS)),
        *(getattr(aten, f"{name}_backward") for name in (*INTERPOLATIONS, *PADDINGS)),
    )
    for packet in by_hand:
        table.pop(packet.default, None)
    table[aten._native_batch_norm_legit.no_stats] = _batch_norm_no_stats
    table[aten.threshold_backward.default] = _threshold_backward
    table[aten.hardtanh_backward.default] = _hardtanh_backward
    table[aten.hardshrink_backward.default] = _hardshrink_backward
    table[aten.softshrink_backward.default] = _hardshrink_backward
    for name in INTERPOLATIONS:  # torch's rules for these lead past the other overload
        if (packet := getattr(aten, name)) and "vec" in packet.overloads():
            table.pop(packet.vec, None)
    for forward, backward in (
        (aten.upsample_nearest1d, aten.upsample_nearest1d_backward),
        (aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
        (aten.upsample_nearest3d, aten.upsample_nearest3d_backward),
    ):
        table[forward.default] = _upsample_nearest
        table[backward.default] = _upsample_nearest_backward
    return table
