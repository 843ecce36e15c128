"""Convolutions and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue, WayMaker
from coordinator.task.graphs.onnx.operators.blocked import (
    blocked_convolution,
    blocked_weight_gradient,
    can_be_blocked,
    depthwise_weight_gradient,
    is_depthwise,
)
from coordinator.task.graphs.onnx.operators.registry import (
    fixed,
    handles,
    reduced,
    result,
    spec_of,
)
from coordinator.task.graphs.symbols import Operation, Size, as_term, multiply


def _convolution_attributes(step: Operation) -> dict[str, Any]:
    a = step.arguments
    rank = len(a["weight"].shape) - 2

    def spread(values: Sequence[int]) -> list[int]:
        return list(values) * (rank if len(values) == 1 else 1)

    padding = spread(a["padding"])
    return {
        "strides": spread(a["stride"]),
        "pads": padding + padding,
        "dilations": spread(a["dilation"]),
        "group": a["groups"],
    }


def _place(step: Operation, what: str) -> str:
    """Name a value for people."""
    return f"{step.module or 'model'} {what}"


def _has_blocks(a: dict[str, Any], attributes: dict[str, Any]) -> bool:
    """True if the convolution can be computed in blocks of channels, and may gain from it.

    One without neighbours is a matrix product, which needs no other layout.
    """
    groups = attributes["group"]
    weight = a["weight"]
    return (
        len(weight.shape) == 4
        and weight.shape[2:] != (1, 1)
        and weight.dtype is torch.float32
        and set(attributes["dilations"]) == {1}
        and (is_depthwise(weight.shape, groups) if groups != 1 else can_be_blocked(weight.shape))
    )


@handles("convolution")
def _convolution(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    attributes = _convolution_attributes(step)

    def plain() -> str:
        names = [builder.full(a[key]) for key in ("input", "weight", "bias") if a[key] is not None]
        return builder.emit("Conv", *names, **attributes)

    ways = [WayMaker("conv", plain)]
    if _has_blocks(a, attributes):
        ways.append(
            blocked_convolution(
                builder,
                a["input"],
                a["weight"],
                a["bias"],
                spec_of(step).shape,
                attributes["strides"],
                attributes["pads"],
                depthwise=attributes["group"] != 1,
            )
        )
    return result(step, builder.either(_place(step, "forward"), *ways))


@handles("convolution_backward")
def _convolution_backward(builder: Builder, step: Operation) -> tuple[OnnxValue | None, ...]:
    a = step.arguments
    attributes = _convolution_attributes(step)
    grad: OnnxValue = a["grad_output"]
    wanted = a["output_mask"]
    found: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        ways = _input_gradients(builder, a, attributes)
        found[0] = result(step, builder.either(_place(step, "input gradient"), *ways), 0)
    if wanted[1]:
        ways = _weight_gradients(builder, a, attributes)
        found[1] = result(step, builder.either(_place(step, "weight gradient"), *ways), 1)
    if wanted[2]:
        axes = [0, *range(2, len(grad.shape))]
        found[2] = result(step, reduced(builder, "ReduceSum", builder.full(grad), axes), 2)
    return tuple(found)


def _input_gradients(
    builder: Builder, a: dict[str, Any], attributes: dict[str, Any]
) -> list[WayMaker]:
    """Return ways to compute the gradient of the input, the default first."""
    grad, weight = a["grad_output"], a["weight"]
    transposed = WayMaker("transposed", lambda: _input_gradient(builder, a, attributes))
    strides, pads, rank = attributes["strides"], attributes["pads"], len(weight.shape) - 2
    if set(strides) != {1} or set(attributes["dilations"]) != {1}:
        return [transposed]
    kernel = fixed(weight.shape[2:], "a kernel's size")
    rest = [size - 1 - pad for size, pad in zip(kernel * 2, pads, strict=True)]
    if set(kernel) == {1} and not any(pads) and attributes["group"] == 1:

        def pointwise() -> str:
            swapped = builder.emit(
                "Transpose", builder.full(weight), perm=[1, 0, *range(2, rank + 2)]
            )
            return builder.emit("Conv", builder.full(grad), swapped)

        return [WayMaker("conv", pointwise)]
    ways = [transposed]
    if _has_blocks(a, attributes) and min(rest) >= 0:
        ways.append(
            blocked_convolution(
                builder,
                grad,
                weight,
                None,
                a["input"].shape,
                strides,
                rest,
                depthwise=attributes["group"] != 1,
                backwards=True,
            )
        )
    return ways


def _input_gradient(builder: Builder, a: dict[str, Any], attributes: dict[str, Any]) -> str:
    grad, weight = a["grad_output"], a["weight"]
    spatial = fixed(a["input"].shape[2:], "an image's size")
    out = fixed(grad.shape[2:], "an image's size")
    kernel = fixed(weight.shape[2:], "a kernel's size")
    extra = [
        size - ((o - 1) * stride - 2 * pad + dilation * (k - 1) + 1)
        for size, o, k, stride, pad, dilation in zip(
            spatial,
            out,
            kernel,
            attributes["strides"],
            attributes["pads"][: len(kernel)],
            attributes["dilations"],
            strict=True,
        )
    ]
    return builder.emit(
        "ConvTranspose",
        builder.full(grad),
        builder.full(weight),
        output_padding=extra,
        **attributes,
    )


UNFOLDED_TAPS = 32
"""Largest kernel, in positions, whose positions are cut out of the input one by one."""
ENOUGH_ROWS = 12
"""Rows of a matrix, at full width, that make a product worth its overhead."""


def _weight_gradients(
    builder: Builder, a: dict[str, Any], attributes: dict[str, Any]
) -> list[WayMaker]:
    """Return ways to compute the gradient of the weight, the default first."""
    kernel = fixed(a["weight"].shape[2:], "a kernel's size")
    convolved = WayMaker("conv", lambda: _weight_gradient_by_convolution(builder, a, attributes))
    blocked: list[WayMaker] = []
    if _has_blocks(a, attributes):
        gradient = (
            depthwise_weight_gradient if attributes["group"] != 1 else blocked_weight_gradient
        )
        sides = attributes["strides"], attributes["pads"]
        blocked = [gradient(builder, a["input"], a["grad_output"], kernel, *sides)]
    if attributes["group"] != 1 or math.prod(kernel) > UNFOLDED_TAPS:
        return [convolved, *blocked]
    products = WayMaker("products", lambda: _by_products(builder, a, attributes, kernel))
    samples = WayMaker("samples", lambda: _by_samples(builder, a, attributes, kernel))
    return [samples, products] if math.prod(kernel) == 1 else [products, samples, *blocked]


def _weight_gradient(builder: Builder, a: dict[str, Any], attributes: dict[str, Any]) -> str:
    return _weight_gradients(builder, a, attributes)[0].make()


def _by_samples(
    builder: Builder, a: dict[str, Any], attributes: dict[str, Any], kernel: list[int]
) -> str:
    """Multiply within every sample, and add up: nothing is transposed.

    Narrow inputs are seen by all kernel positions at once.
    """
    x, grad = a["input"], a["grad_output"]
    rank = len(kernel)
    image, pads = builder.full(x), attributes["pads"]
    if any(pads):
        image = builder.emit("Pad", image, builder.ints([0, 0, *pads[:rank], 0, 0, *pads[rank:]]))
    signal = builder.emit("Reshape", builder.full(grad), builder.ints([0, 0, -1]))
    out = fixed(grad.shape[2:], "an image's size")
    blocks = [image]
    if math.prod(kernel) > 1 or set(attributes["strides"]) != {1}:
        for axis in reversed(range(rank)):
            blocks = [
                _seen(builder, block, axis, at, out, attributes)
                for at in range(kernel[axis])
                for block in blocks
            ]
    if _full_size(builder, x.shape[1]) < ENOUGH_ROWS:
        blocks = [_joined(builder, blocks, 1)]
    parts = []
    for block in blocks:
        matrix = builder.emit("Reshape", block, builder.ints([0, 0, -1]))
        matrix = builder.emit("Transpose", matrix, perm=[0, 2, 1])
        product = builder.emit("MatMul", signal, matrix)
        parts.append(builder.emit("ReduceSum", product, builder.ints([0]), keepdims=0))
    if math.prod(kernel) == 1:
        return builder.emit("Reshape", parts[0], builder.ints([0, 0, *kernel]))
    name = builder.emit(
        "Reshape", _joined(builder, parts, 1), builder.ints([0, math.prod(kernel), -1])
    )
    name = builder.emit("Transpose", name, perm=[0, 2, 1])
    return builder.emit("Reshape", name, builder.ints([0, 0, *kernel]))


def _by_products(
    builder: Builder, a: dict[str, Any], attributes: dict[str, Any], kernel: list[int]
) -> str:
    """Multiply the input seen by every kernel position with the gradient.

    onnxruntime's convolution makes a matrix of its output's size, which here is the kernel's: a
    dozen columns, too few to keep a processor busy. Products over batch and image are up to 2.4
    times as fast.
    """
    x, grad = a["input"], a["grad_output"]
    rank = len(kernel)
    swapped = [1, 0, *range(2, rank + 2)]
    flat = builder.ints([0, -1])
    image = builder.emit("Transpose", builder.full(x), perm=swapped)
    pads = attributes["pads"]
    if any(pads):
        image = builder.emit("Pad", image, builder.ints([0, 0, *pads[:rank], 0, 0, *pads[rank:]]))
    signal = builder.emit("Transpose", builder.full(grad), perm=swapped)
    signal = builder.emit("Reshape", signal, flat)
    out = fixed(grad.shape[2:], "an image's size")
    rows = _full_size(builder, x.shape[1])
    blocks = [_seen(builder, image, rank - 1, at, out, attributes) for at in range(kernel[-1])]
    if rows < ENOUGH_ROWS:
        blocks, rows = [_joined(builder, blocks, 0)], rows * kernel[-1]
    # Last dimension first: slices of the other dimensions are then contiguous runs.
    for axis in reversed(range(rank - 1)):
        blocks = [
            _seen(builder, block, axis, at, out, attributes)
            for at in range(kernel[axis])
            for block in blocks
        ]
    if rows < ENOUGH_ROWS:
        blocks = [_joined(builder, blocks, 0)]
    parts = []
    for block in blocks:
        matrix = builder.emit("Reshape", block, flat)
        parts.append(builder.emit("Gemm", signal, matrix, transB=1))
    name = builder.emit(
        "Reshape", _joined(builder, parts, 1), builder.ints([0, math.prod(kernel), -1])
    )
    name = builder.emit("Transpose", name, perm=[0, 2, 1])
    return builder.emit("Reshape", name, builder.ints([0, 0, *kernel]))


def _joined(builder: Builder, names: Sequence[str], axis: int) -> str:
    return builder.emit("Concat", *names, axis=axis) if len(names) > 1 else names[0]


def _full_size(builder: Builder, size: Size) -> int:
    """Return a size at full width, for one sample."""
    return as_term(size).value([axis.atoms for axis in builder.plan.axes], 1)


def _seen(
    builder: Builder, image: str, axis: int, at: int, out: Sequence[int], attributes: dict[str, Any]
) -> str:
    """Cut out the values one kernel position meets along one dimension of a padded image."""
    stride = attributes["strides"][axis]
    start = at * attributes["dilations"][axis]
    end = start + (out[axis] - 1) * stride + 1
    bounds = ([start], [end], [axis + 2], [stride])
    return builder.emit("Slice", image, *map(builder.ints, bounds))


def _weight_gradient_by_convolution(
    builder: Builder, a: dict[str, Any], attributes: dict[str, Any]
) -> str:
    """Convolve the input with the gradient; batch and channels swap places."""
    x, grad, weight = a["input"], a["grad_output"], a["weight"]
    groups = attributes["group"]
    batch, rank = x.shape[0], len(x.shape)
    spatial = list(range(2, rank))
    image, signal = builder.full(x), builder.full(grad)
    swapped = [1, 0, *spatial]
    if groups == 1:
        image = builder.emit("Transpose", image, perm=swapped)
        signal = builder.emit("Transpose", signal, perm=swapped)
    else:
        # Channel c of every group becomes sample c; the groups' batches are its channels.
        inner = weight.shape[1]
        split = (batch, groups, inner, *x.shape[2:])
        image = builder.reshape(image, x.shape, split)
        image = builder.emit("Transpose", image, perm=[2, 1, 0, *range(3, rank + 1)])
        image = builder.reshape(
            image,
            (inner, groups, batch, *x.shape[2:]),
            (inner, multiply(groups, batch), *x.shape[2:]),
        )
        signal = builder.emit("Transpose", signal, perm=swapped)
    name = builder.emit(
        "Conv",
        image,
        signal,
        strides=attributes["dilations"],
        dilations=attributes["strides"],
        pads=attributes["pads"],
        group=groups,
    )
    name = builder.emit("Transpose", name, perm=swapped)
    kernel = fixed(weight.shape[2:], "a kernel's size")
    computed = [
        (size + 2 * pad - stride * (out - 1) - 1) // dilation + 1
        for size, out, pad, stride, dilation in zip(
            fixed(x.shape[2:], "an image's size"),
            fixed(grad.shape[2:], "an image's size"),
            attributes["pads"],
            attributes["strides"],
            attributes["dilations"],
            strict=False,
        )
    ]
    if computed == kernel:
        return name
    # A stride that does not divide leaves rows that no kernel position covers.
    zeros = builder.ints([0] * len(kernel))
    return builder.emit("Slice", name, zeros, builder.ints(kernel), builder.ints(spatial))


def _transposed_attributes(step: Operation) -> dict[str, Any]:
    """Attributes of the convolution in the opposite direction."""
    attributes = _convolution_attributes(step)
    extra = list(step.arguments["output_padding"])
    extra *= len(attributes["strides"]) if len(extra) == 1 else 1
    if any(more >= stride for more, stride in zip(extra, attributes["strides"], strict=True)):
        raise GraphCompileError("output_padding must be smaller than the stride: ONNX requires it")
    return {**attributes, "output_padding": extra}


@handles("convolution_transposed")
def _convolution_transposed(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    names = [builder.full(a[key]) for key in ("input", "weight", "bias") if a[key] is not None]
    return result(step, builder.emit("ConvTranspose", *names, **_transposed_attributes(step)))


@handles("convolution_transposed_backward")
def _convolution_transposed_backward(
    builder: Builder, step: Operation
) -> tuple[OnnxValue | None, ...]:
    """Gradients of a convolution with input and output swapped."""
    a = step.arguments
    attributes = _transposed_attributes(step)
    del attributes["output_padding"]
    x, grad, weight = a["input"], a["grad_output"], a["weight"]
    wanted = a["output_mask"]
    found: list[OnnxValue | None] = [None, None, None]
    if wanted[0]:
        names = builder.full(grad), builder.full(weight)
        found[0] = result(step, builder.emit("Conv", *names, **attributes), 0)
    if wanted[1]:
        swapped = {"input": grad, "grad_output": x, "weight": weight}
        found[1] = result(step, _weight_gradient(builder, swapped, attributes), 1)
    if wanted[2]:
        axes = [0, *range(2, len(grad.shape))]
        found[2] = result(step, reduced(builder, "ReduceSum", builder.full(grad), axes), 2)
    return tuple(found)
