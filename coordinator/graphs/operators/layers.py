"""Convolutions and pooling, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.graphs.builder import Builder, Value
from coordinator.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.graphs.operators.registry import (
    fixed,
    handles,
    reduced,
    result,
    spec_of,
)
from coordinator.graphs.symbols import Shape, Step, multiply
from edge_sdk.protocol.graphs import SizeTerm


def _convolution_attributes(step: Step) -> dict[str, Any]:
    a = step.arguments
    if a["transposed"]:
        raise GraphCompileError("transposed convolutions are not supported")
    groups = a["groups"]
    if isinstance(groups, SizeTerm):
        raise NotSymbolicError("the number of a convolution's groups follows a width")
    rank = len(a["weight"].shape) - 2

    def spread(values: Sequence[int]) -> list[int]:
        return list(values) * (rank if len(values) == 1 else 1)

    padding = spread(a["padding"])
    return {
        "strides": spread(a["stride"]),
        "pads": padding + padding,
        "dilations": spread(a["dilation"]),
        "group": groups,
    }


@handles("convolution")
def _convolution(builder: Builder, step: Step) -> Value:
    a = step.arguments
    names = [builder.full(a[key]) for key in ("input", "weight", "bias") if a[key] is not None]
    return result(step, builder.emit("Conv", *names, **_convolution_attributes(step)))


@handles("convolution_backward")
def _convolution_backward(builder: Builder, step: Step) -> tuple[Value | None, ...]:
    a = step.arguments
    attributes = _convolution_attributes(step)
    grad: Value = a["grad_output"]
    wanted = a["output_mask"]
    found: list[Value | None] = [None, None, None]
    if wanted[0]:
        found[0] = result(step, _input_gradient(builder, a, attributes), 0)
    if wanted[1]:
        found[1] = result(step, _weight_gradient(builder, a, attributes), 1)
    if wanted[2]:
        axes = [0, *range(2, len(grad.shape))]
        found[2] = result(step, reduced(builder, "ReduceSum", builder.full(grad), axes), 2)
    return tuple(found)


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


def _weight_gradient(builder: Builder, a: dict[str, Any], attributes: dict[str, Any]) -> str:
    """The input convolved with the gradient: batch and channels change places."""
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
    # A stride that does not divide leaves rows that no kernel position saw.
    zeros = builder.ints([0] * len(kernel))
    return builder.emit("Slice", name, zeros, builder.ints(kernel), builder.ints(spatial))


def _pair(values: Sequence[int] | int, default: Sequence[int] = ()) -> list[int]:
    found = [values] if isinstance(values, int) else list(values) or list(default)
    return found * 2 if len(found) == 1 else found


@handles("max_pool2d_with_indices")
def _max_pool(builder: Builder, step: Step) -> tuple[Value, ...]:
    a = step.arguments
    x: Value = a["self"]
    name, shape = builder.full(x), x.shape
    if len(shape) == 3:
        raise GraphCompileError("pooling wants a batch dimension")
    kernel = _pair(a["kernel_size"])
    padding = _pair(a["padding"])
    out, indices = builder.emit_many(
        2,
        "MaxPool",
        name,
        kernel_shape=kernel,
        strides=_pair(a["stride"], kernel),
        pads=padding + padding,
        dilations=_pair(a["dilation"]),
        ceil_mode=int(a["ceil_mode"]),
    )
    return result(step, out), result(step, indices, 1)


@handles("max_pool2d_with_indices_backward")
def _max_pool_backward(builder: Builder, step: Step) -> Value:
    """ONNX's indices count through the whole input, so that one flat scatter does it."""
    a = step.arguments
    spec = spec_of(step)
    grad, indices = a["grad_output"], a["indices"]
    flat = builder.ints([-1])
    updates = builder.emit("Reshape", builder.full(grad), flat)
    where = builder.emit("Reshape", builder.full(indices), flat)
    total = builder.size(multiply(*spec.shape))
    zeros = builder.emit("Expand", builder.scalar(0, spec.dtype), total)
    name = builder.emit("ScatterElements", zeros, where, updates, axis=0, reduction="add")
    return result(
        step, builder.emit("Reshape", name, builder.emit("Shape", builder.full(a["self"])))
    )


def _adaptive_matrix(size: int, out: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    matrix = np.zeros((out, size), dtype=np.float32)
    for row in range(out):
        start, end = row * size // out, -(-(row + 1) * size // out)
        matrix[row, start:end] = 1 / (end - start)
    return matrix


def _window_matrix(
    size: int, out: int, kernel: int, stride: int, padding: int, *, count_padding: bool
) -> np.ndarray[Any, np.dtype[np.float32]]:
    matrix = np.zeros((out, size), dtype=np.float32)
    for row in range(out):
        start = row * stride - padding
        end = min(start + kernel, size + padding)
        inside = slice(max(start, 0), min(end, size))
        matrix[row, inside] = 1 / ((end - start) if count_padding else (inside.stop - inside.start))
    return matrix


def _apply_matrices(
    builder: Builder, name: str, matrices: Sequence[np.ndarray[Any, np.dtype[np.float32]]]
) -> str:
    """rows · x · columnsᵀ on the last two dimensions: mean pooling is separable."""
    rows, columns = matrices
    if not np.array_equal(columns, [[1]]):
        name = builder.emit("MatMul", name, builder.constant(np.ascontiguousarray(columns.T)))
    if not np.array_equal(rows, [[1]]):
        name = builder.emit("MatMul", builder.constant(np.ascontiguousarray(rows)), name)
    return name


def _mean_matrices(step: Step, image: Shape) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    a = step.arguments
    sizes = fixed(image[-2:], "an image's size")
    if "adaptive" in step.target:
        outs = a["output_size"] if "output_size" in a else a["grad_output"].shape[-2:]
        return [_adaptive_matrix(s, o) for s, o in zip(sizes, fixed(outs, "sizes"), strict=True)]
    shape = a["grad_output"].shape if "grad_output" in a else spec_of(step).shape
    outs = fixed(shape[-2:], "an image's size")
    kernel = _pair(a["kernel_size"])
    stride, padding = _pair(a["stride"], kernel), _pair(a["padding"])
    matrices = [
        _window_matrix(*each, count_padding=bool(a["count_include_pad"]))
        for each in zip(sizes, outs, kernel, stride, padding, strict=True)
    ]
    if a["divisor_override"] is not None:
        matrices = [(matrix > 0).astype(np.float32) for matrix in matrices]
        matrices[0] /= np.float32(a["divisor_override"])
    return matrices


@handles("_adaptive_avg_pool2d", "avg_pool2d")
def _mean_pool(builder: Builder, step: Step) -> Value:
    x: Value = step.arguments["self"]
    matrices = _mean_matrices(step, x.shape)
    return result(step, _apply_matrices(builder, builder.full(x), matrices))


@handles("_adaptive_avg_pool2d_backward", "avg_pool2d_backward")
def _mean_pool_backward(builder: Builder, step: Step) -> Value:
    grad: Value = step.arguments["grad_output"]
    matrices = [matrix.T for matrix in _mean_matrices(step, spec_of(step).shape)]
    return result(step, _apply_matrices(builder, builder.full(grad), matrices))
