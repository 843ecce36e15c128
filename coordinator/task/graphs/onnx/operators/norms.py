"""BatchNorm by the statistics of the batch, GroupNorm, and their gradients.

ONNX's BatchNormalization is the runtime's fastest pass that is linear by channel, and in training
mode its fastest norm. GroupNorm is that of one image whose channels are all groups of all samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import handles, reduced, result
from coordinator.task.graphs.symbols import Operation, Size, multiply


def _per_channel(builder: Builder, value: OnnxValue | None, x: OnnxValue, default: float) -> str:
    """Return a vector with a number for each channel."""
    if value is not None:
        return builder.full(value)
    return builder.emit("Expand", builder.scalar(default, x.dtype), builder.sizes((x.shape[1],)))


def _normalised(
    builder: Builder, names: tuple[str, str, str], old: Sequence[str], eps: float
) -> tuple[str, ...]:
    """Normalise by channel; also return mean and variance, as statistics that forget.

    onnxruntime writes new statistics where the old ones were, whoever else needs those, so it gets
    some that nobody else has. What they are does not matter if it is finite.
    """
    forgotten = [builder.emit("Neg", name) for name in old]
    return builder.emit_many(
        3,
        "BatchNormalization",
        *names,
        *forgotten,
        epsilon=eps,
        momentum=0.0,
        training_mode=1,
    )


def _rstd(builder: Builder, var: str, x: OnnxValue, eps: float) -> str:
    shifted = builder.emit("Add", var, builder.scalar(eps, x.dtype))
    return builder.emit("Reciprocal", builder.emit("Sqrt", shifted))


def _linear(builder: Builder, name: str, x: OnnxValue, slope: str, shift: str, count: Size) -> str:
    """Compute slope · x + shift for each of `count` channels."""
    zeros, ones = (
        builder.emit("Expand", builder.scalar(number, x.dtype), builder.sizes((count,)))
        for number in (0, 1)
    )
    return builder.emit("BatchNormalization", name, slope, shift, zeros, ones, epsilon=0.0)


@handles("_native_batch_norm_legit_functional")
def _batch_norm(builder: Builder, step: Operation) -> Sequence[OnnxValue | None]:
    """Normalise, and compute new statistics."""
    b, a = builder, step.arguments
    x: OnnxValue = a["input"]
    names = b.full(x), _per_channel(b, a["weight"], x, 1), _per_channel(b, a["bias"], x, 0)
    old = [b.full(a[key]) for key in ("running_mean", "running_var")]
    y, mean, var = _normalised(b, names, old, float(a["eps"]))
    rstd = _rstd(b, var, x, float(a["eps"]))
    found = [result(step, name, number) for number, name in enumerate((y, mean, rstd))]
    count = b.scalar(multiply(x.shape[0], *x.shape[2:]), x.dtype)
    fewer = b.emit("Sub", count, b.scalar(1, x.dtype))
    unbiased = b.emit("Mul", var, b.emit("Div", count, fewer))
    momentum = float(a["momentum"])
    for number, (new, key) in enumerate(((mean, "running_mean"), (unbiased, "running_var")), 3):
        kept = b.emit("Mul", b.full(a[key]), b.scalar(1 - momentum, x.dtype))
        taken = b.emit("Mul", new, b.scalar(momentum, x.dtype))
        found.append(result(step, b.emit("Add", taken, kept), number))
    return found


@handles("native_batch_norm_backward")
def _batch_norm_backward(builder: Builder, step: Operation) -> Sequence[OnnxValue | None]:
    """Compute the gradients of input, weight and bias.

    Of the input: rstd · weight · (g − mean(g) − (x − mean) · rstd² · mean(g · (x − mean))). The
    part that is linear in x is what ONNX's operator computes with given statistics.
    """
    b, a = builder, step.arguments
    grad, x = a["grad_out"], a["input"]
    wanted = a["output_mask"]
    axes = [0, *range(2, len(x.shape))]
    wide = b.ints([1, -1] + [1] * (len(x.shape) - 2))
    mean, rstd = b.full(a["save_mean"]), b.full(a["save_invstd"])
    g = b.full(grad)
    centred = b.emit("Sub", b.full(x), b.emit("Reshape", mean, wide))
    total = reduced(b, "ReduceSum", g, axes)
    along = reduced(b, "ReduceSum", b.emit("Mul", g, centred), axes)
    found: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        count = b.scalar(multiply(x.shape[0], *x.shape[2:]), x.dtype)
        scale = rstd
        if a["weight"] is not None:
            scale = b.emit("Mul", rstd, b.full(a["weight"]))
        share = b.emit("Div", scale, count)
        slope = b.emit("Mul", b.emit("Mul", along, share), b.emit("Mul", rstd, rstd))
        linear = _linear(b, centred, x, slope, b.emit("Mul", total, share), x.shape[1])
        scaled = b.emit("Mul", g, b.emit("Reshape", scale, wide))
        found[0] = result(step, b.emit("Sub", scaled, linear), 0)
    if wanted[1]:
        found[1] = result(step, b.emit("Mul", along, rstd), 1)
    if wanted[2]:
        found[2] = result(step, total, 2)
    return found


def _in_groups(builder: Builder, name: str, samples: Size, groups: Size) -> str:
    """Return the samples' groups as the channels of one image."""
    every = builder.size(multiply(samples, groups))
    rows = builder.emit("Concat", builder.ints([1]), every, builder.ints([-1]), axis=0)
    return builder.emit("Reshape", name, rows)


def _channels_in_groups(builder: Builder, name: str, groups: Size, samples: int) -> str:
    """Split all but the samples into groups; `samples`: their number, 0 to keep it."""
    rows = (builder.ints([samples]), builder.size(groups), builder.ints([-1]))
    return builder.emit("Reshape", name, builder.emit("Concat", *rows, axis=0))


@handles("native_group_norm")
def _group_norm(builder: Builder, step: Operation) -> Sequence[OnnxValue | None]:
    """Normalise each group of channels of each sample."""
    b, a = builder, step.arguments
    x: OnnxValue = a["input"]
    samples, groups = x.shape[0], a["group"]
    every = multiply(samples, groups)
    parts = _in_groups(b, b.full(x), samples, groups)
    eps = float(a["eps"])
    ones, zeros = (
        b.emit("Expand", b.scalar(number, x.dtype), b.sizes((every if b.trains else groups,)))
        for number in (1, 0)
    )
    if b.trains:
        first = b.emit("Squeeze", b.emit("Gather", parts, b.ints([0]), axis=2), b.ints([0, 2]))
        old = first, b.emit("Neg", first)
        y, mean, var = _normalised(b, (parts, ones, zeros), old, eps)
    else:  # mean and variance are left out where nobody needs them
        mean = reduced(b, "ReduceMean", parts, [2], keep=True)
        centred = b.emit("Sub", parts, mean)
        var = reduced(b, "ReduceMean", b.emit("Mul", centred, centred), [2])
        images = _channels_in_groups(b, b.full(x), groups, 0)
        y = b.emit("InstanceNormalization", images, ones, zeros, epsilon=eps)
    y = b.emit("Reshape", y, b.emit("Shape", b.full(x)))
    if a["weight"] is not None or a["bias"] is not None:
        names = _per_channel(b, a["weight"], x, 1), _per_channel(b, a["bias"], x, 0)
        y = _linear(b, y, x, *names, x.shape[1])
    shape = b.sizes((samples, groups))
    both = (b.emit("Reshape", name, shape) for name in (mean, _rstd(b, var, x, eps)))
    return [result(step, name, number) for number, name in enumerate((y, *both))]


@handles("native_group_norm_backward")
def _group_norm_backward(builder: Builder, step: Operation) -> Sequence[OnnxValue | None]:
    """Compute the gradients of input, weight and bias, by the sums that torch takes.

    Of the input: c₁ · g + c₂ · x + c₃, with c₁ for each channel and the others for each group.
    """
    b, a = builder, step.arguments
    grad, x = a["grad_out"], a["input"]
    wanted, groups, samples = a["output_mask"], a["group"], x.shape[0]
    rank = len(x.shape)
    spatial = list(range(2, rank))
    g, whole = b.full(grad), b.full(x)
    mean, rstd = (b.emit("Unsqueeze", b.full(a[name]), b.ints([2])) for name in ("mean", "rstd"))
    plain = reduced(b, "ReduceSum", g, spatial)
    along = reduced(b, "ReduceSum", b.emit("Mul", g, whole), spatial)
    plain, along = (_channels_in_groups(b, name, groups, 0) for name in (plain, along))
    found: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        scale, parts = rstd, [along, plain]
        if a["weight"] is not None:
            weight = _channels_in_groups(b, b.full(a["weight"]), groups, 1)
            scale = b.emit("Mul", rstd, weight)
            parts = [b.emit("Mul", name, weight) for name in parts]
        else:
            scale = b.emit("Expand", rstd, b.emit("Shape", plain))
        ds, db = (b.emit("ReduceSum", name, b.ints([2]), keepdims=1) for name in parts)
        values = b.scalar(multiply(x.shape[1], *x.shape[2:]), x.dtype)
        count = b.emit("Div", values, b.scalar(groups, x.dtype))
        share = b.emit("Div", rstd, count)
        c2 = b.emit("Mul", b.emit("Sub", b.emit("Mul", db, mean), ds), share)
        c2 = b.emit("Mul", c2, b.emit("Mul", rstd, rstd))
        c3 = b.emit("Neg", b.emit("Add", b.emit("Mul", c2, mean), b.emit("Mul", db, share)))
        c2, c3 = (b.emit("Reshape", name, b.ints([-1])) for name in (c2, c3))
        every = multiply(samples, groups)
        linear = _linear(b, _in_groups(b, whole, samples, groups), x, c2, c3, every)
        linear = b.emit("Reshape", linear, b.emit("Shape", whole))
        c1 = b.emit("Reshape", scale, b.ints([0, -1] + [1] * (rank - 2)))
        found[0] = result(step, b.emit("Add", b.emit("Mul", g, c1), linear), 0)
    if wanted[1]:
        name = b.emit("Mul", b.emit("Sub", along, b.emit("Mul", plain, mean)), rstd)
        name = b.emit("ReduceSum", name, b.ints([0]), keepdims=0)
        found[1] = result(step, b.emit("Reshape", name, b.ints([-1])), 1)
    if wanted[2]:
        name = b.emit("ReduceSum", plain, b.ints([0]), keepdims=0)
        found[2] = result(step, b.emit("Reshape", name, b.ints([-1])), 2)
    return found
