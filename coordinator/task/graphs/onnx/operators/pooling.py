"""Pooling and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import (
    fixed,
    handles,
    result,
    spec_of,
)
from coordinator.task.graphs.onnx.operators.resampling import Matrix, apply_matrices
from coordinator.task.graphs.symbols import Operation, Shape, multiply


def _dims(step: Operation) -> int:
    """Return the number of an image's dimensions."""
    return next(n for n in (2, 3) if f"{n}d" in step.target)


def _each(values: Sequence[int] | int, dims: int, default: Sequence[int] = ()) -> list[int]:
    found = [values] if isinstance(values, int) else list(values) or list(default)
    return found * dims if len(found) == 1 else found


def _pooling_attributes(step: Operation) -> dict[str, Any]:
    a, dims = step.arguments, _dims(step)
    kernel, padding = _each(a["kernel_size"], dims), _each(a["padding"], dims)
    return {
        "kernel_shape": kernel,
        "strides": _each(a["stride"], dims, kernel),
        "pads": padding + padding,
        "dilations": _each(a["dilation"], dims),
        "ceil_mode": int(a["ceil_mode"]),
    }


@handles("max_pool2d_with_indices", "max_pool3d_with_indices")
def _max_pool(builder: Builder, step: Operation) -> tuple[OnnxValue, ...]:
    x: OnnxValue = step.arguments["self"]
    if len(x.shape) == _dims(step) + 1:
        raise GraphCompileError("pooling needs a batch dimension")
    attributes = _pooling_attributes(step)
    # Two separate nodes: onnxruntime takes 15 times as long when indices are requested. The unused
    # one is dropped.
    out = builder.emit("MaxPool", builder.full(x), **attributes)
    _, indices = builder.emit_many(2, "MaxPool", builder.full(x), **attributes)
    return result(step, out), result(step, indices, 1)


@handles("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def _max_pool_backward(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    attributes = _pooling_attributes(step)
    kernel = attributes["kernel_shape"]
    sizes = a["self"].shape[2:]
    tiled = (
        len(kernel) == 2
        and attributes["strides"] == kernel
        and not any(attributes["pads"])
        and attributes["dilations"] == [1, 1]
        and all(isinstance(s, int) and s % k == 0 for s, k in zip(sizes, kernel, strict=True))
        and 1 < math.prod(kernel) <= MAX_TILE
        and a["self"].dtype == torch.float32  # the only type onnxruntime's MaxUnpool takes
    )
    name = _tiled_backward(builder, a, attributes) if tiled else _scattered(builder, step)
    return result(step, name)


MAX_TILE = 9
"""Largest window, in values, that is compared value by value."""


def _tiled_backward(builder: Builder, a: dict[str, Any], attributes: dict[str, Any]) -> str:
    """Send each window's gradient to the first of its values, by rows, that is the maximum.

    Windows tile the image, so the values at one place in every window form one array.
    """
    rows, columns = attributes["kernel_shape"]
    x, grad = builder.full(a["self"]), a["grad_output"]
    width = grad.shape[3]
    lines = builder.emit("Reshape", x, builder.ints([-1, rows, columns * width]))
    places = [
        values
        for line in _split(builder, lines, 1, rows)
        for values in _columns(builder, line, columns, width)
    ]
    largest = builder.emit("MaxPool", x, **attributes)
    largest = builder.emit("Reshape", largest, builder.ints([1, -1, width]))
    # Offset of the maximum within its window: one step for every place before the first that
    # holds the maximum.
    distance = ""
    for place in reversed(range(len(places) - 1)):
        missed = builder.cast(builder.emit("Less", places[place], largest), torch.float32)
        step = 1 if (place + 1) % columns else columns * (width - 1) + 1
        onward = builder.scalar(step, torch.float32)
        onward = builder.emit("Add", distance, onward) if distance else onward
        distance = builder.emit("Mul", missed, onward)
    start = builder.constant(np.arange(0, columns * width, columns, dtype=np.float32))
    within = builder.cast(builder.emit("Add", distance, start), torch.int64)
    bands = builder.scalar(multiply(*grad.shape[:3]), torch.int64)
    zero, one = (builder.scalar(number, torch.int64) for number in (0, 1))
    band = builder.emit("Range", zero, bands, one)
    band = builder.emit("Mul", band, builder.ints([rows * columns * width]))
    indices = builder.emit("Add", within, builder.emit("Unsqueeze", band, builder.ints([1])))
    indices = builder.emit("Reshape", indices, builder.emit("Shape", builder.full(grad)))
    return builder.emit(
        "MaxUnpool",
        builder.full(grad),
        indices,
        builder.emit("Shape", x),
        kernel_shape=[rows, columns],
        strides=[rows, columns],
    )


def _columns(builder: Builder, line: str, columns: int, width: int) -> list[str]:
    """Return the first values of all windows, the second values, and so on."""
    name = builder.emit("Reshape", line, builder.ints([-1, columns]))
    name = builder.emit("Transpose", name, perm=[1, 0])
    # This shape keeps onnxruntime from moving the transpose after the cut, which is slower.
    name = builder.emit("Reshape", name, builder.ints([columns, -1, width]))
    return _split(builder, name, 0, columns)


def _split(builder: Builder, name: str, axis: int, parts: int) -> list[str]:
    """Return the parts along an axis, as slices: a split would hold all parts in memory at once."""
    if parts == 1:
        return [name]
    return [
        builder.emit("Slice", name, *map(builder.ints, ([part], [part + 1], [axis])))
        for part in range(parts)
    ]


def _scattered(builder: Builder, step: Operation) -> str:
    """Scatter once over the flattened input: ONNX's indices count through the whole input."""
    a = step.arguments
    spec = spec_of(step)
    flat = builder.ints([-1])
    updates = builder.emit("Reshape", builder.full(a["grad_output"]), flat)
    where = builder.emit("Reshape", builder.full(a["indices"]), flat)
    total = builder.size(multiply(*spec.shape))
    zeros = builder.emit("Expand", builder.scalar(0, spec.dtype), total)
    name = builder.emit("ScatterElements", zeros, where, updates, axis=0, reduction="add")
    return builder.emit("Reshape", name, builder.emit("Shape", builder.full(a["self"])))


def _adaptive_matrix(size: int, out: int) -> Matrix:
    matrix = np.zeros((out, size), dtype=np.float32)
    for row in range(out):
        start, end = row * size // out, -(-(row + 1) * size // out)
        matrix[row, start:end] = 1 / (end - start)
    return matrix


def _window_matrix(
    size: int, out: int, kernel: int, stride: int, padding: int, *, count_padding: bool
) -> Matrix:
    matrix = np.zeros((out, size), dtype=np.float32)
    for row in range(out):
        start = row * stride - padding
        end = min(start + kernel, size + padding)
        inside = slice(max(start, 0), min(end, size))
        matrix[row, inside] = 1 / ((end - start) if count_padding else (inside.stop - inside.start))
    return matrix


def _mean_matrices(step: Operation, image: Shape) -> list[Matrix]:
    """Matrices that take means along each dimension: mean pooling is separable."""
    a, dims = step.arguments, _dims(step)
    sizes = fixed(image[-dims:], "an image's size")
    if "adaptive" in step.target:
        outs = a["output_size"] if "output_size" in a else a["grad_output"].shape[-dims:]
        return [_adaptive_matrix(s, o) for s, o in zip(sizes, fixed(outs, "sizes"), strict=True)]
    shape = a["grad_output"].shape if "grad_output" in a else spec_of(step).shape
    outs = fixed(shape[-dims:], "an image's size")
    kernel = _each(a["kernel_size"], dims)
    stride, padding = _each(a["stride"], dims, kernel), _each(a["padding"], dims)
    matrices = [
        _window_matrix(*each, count_padding=bool(a["count_include_pad"]))
        for each in zip(sizes, outs, kernel, stride, padding, strict=True)
    ]
    if a["divisor_override"] is not None:
        matrices = [(matrix > 0).astype(np.float32) for matrix in matrices]
        matrices[0] /= np.float32(a["divisor_override"])
    return matrices


@handles(*(f"{kind}_pool{n}d" for n in (2, 3) for kind in ("_adaptive_avg", "avg")))
def _mean_pool(builder: Builder, step: Operation) -> OnnxValue:
    x: OnnxValue = step.arguments["self"]
    matrices = _mean_matrices(step, x.shape)
    return result(step, apply_matrices(builder, builder.full(x), x.shape, matrices, x.dtype))


@handles(*(f"{kind}_pool{n}d_backward" for n in (2, 3) for kind in ("_adaptive_avg", "avg")))
def _mean_pool_backward(builder: Builder, step: Operation) -> OnnxValue:
    grad: OnnxValue = step.arguments["grad_output"]
    turned = [matrix.T for matrix in _mean_matrices(step, spec_of(step).shape)]
    return result(step, apply_matrices(builder, builder.full(grad), grad.shape, turned, grad.dtype))
