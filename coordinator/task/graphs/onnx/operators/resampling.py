"""Interpolation and padding of images, and their gradients: one matrix along each dimension.

These operators are linear and separable, so each is a product with a fixed matrix per dimension of
the image, and its gradient is the product with the transposed matrices. torch itself states the
matrices: they are its results for the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from coordinator.task.graphs.decompositions import INTERPOLATIONS, PADDINGS
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import fixed, handles, result, spec_of
from coordinator.task.graphs.symbols import Operation, Shape, Size

Matrix = np.ndarray[Any, np.dtype[np.float32]]


def apply_matrices(
    builder: Builder, name: str, shape: Shape, matrices: Sequence[Matrix], dtype: torch.dtype
) -> str:
    """Multiply the last dimensions of a value of this shape with a matrix (out, in) each."""
    lead, image = shape[: -len(matrices)], fixed(shape[-len(matrices) :], "an image's size")
    for position in reversed(range(len(matrices))):
        matrix = matrices[position].astype(str(dtype).removeprefix("torch."))
        rows = matrix.shape[0]
        if np.array_equal(matrix, np.eye(*matrix.shape)):
            continue
        before: tuple[Size, ...] = (*lead, *image)
        image[position] = rows
        if position == len(image) - 1:
            name = builder.emit("MatMul", name, builder.constant(np.ascontiguousarray(matrix.T)))
            continue
        # The dimensions after this one are columns.
        columns = prod(image[position + 1 :])
        front = before[: len(lead) + position]
        name = builder.reshape(name, before, (*front, matrix.shape[1], columns))
        name = builder.emit("MatMul", builder.constant(np.ascontiguousarray(matrix)), name)
        name = builder.reshape(name, (*front, rows, columns), (*lead, *image))
    return name


def _interpolation(step: Operation, image: Sequence[int], outs: Sequence[int]) -> list[Matrix]:
    """Matrices of an interpolation: torch's results for the identity along each dimension."""
    a = step.arguments
    operator = getattr(torch.ops.aten, step.target.replace("_backward", "")).default
    corners = [a["align_corners"]] if "align_corners" in a else []
    scales = [value for key, value in a.items() if key.startswith("scales")]
    found = []
    for position, (size, out) in enumerate(zip(image, outs, strict=True)):
        # Two equal rows along the others: one alone confuses torch's antialiased kernels.
        alone = [1 if i == position else 2 for i in range(len(image))]
        line = torch.eye(size).reshape(size, *(size if n == 1 else 1 for n in alone))
        given = line.expand(size, *(size if n == 1 else n for n in alone)).contiguous()
        wanted = [out if n == 1 else n for n in alone]
        own = [scale if i == position else None for i, scale in enumerate(scales)]
        rows = operator(given.unsqueeze(0), wanted, *corners, *own)[0].movedim(position + 1, 1)
        found.append(rows.reshape(size, out, -1)[:, :, 0].T.numpy())
    return found


def _padding(step: Operation, image: Sequence[int]) -> list[Matrix]:
    """Matrices of a padding whose values are the image's own."""
    mode = "reflect" if step.target.startswith("reflection") else "replicate"
    pads = fixed(step.arguments["padding"], "padding")
    found = []
    for position, size in enumerate(image):
        last = 2 * (len(image) - 1 - position)  # pairs come from the last dimension backwards
        eye = torch.eye(size).reshape(1, size, size)
        found.append(F.pad(eye, pads[last : last + 2], mode=mode)[0].T.numpy())
    return found


@handles(*INTERPOLATIONS, *PADDINGS)
def _resample(builder: Builder, step: Operation) -> OnnxValue:
    x: OnnxValue = step.arguments["self"]
    image, outs = _images(step, x.shape, spec_of(step).shape)
    matrices = _padding(step, image) if "pad" in step.target else _interpolation(step, image, outs)
    return result(step, apply_matrices(builder, builder.full(x), x.shape, matrices, x.dtype))


@handles(*(f"{name}_backward" for name in (*INTERPOLATIONS, *PADDINGS)))
def _resample_backward(builder: Builder, step: Operation) -> OnnxValue:
    grad: OnnxValue = step.arguments["grad_output"]
    image, outs = _images(step, spec_of(step).shape, grad.shape)
    matrices = _padding(step, image) if "pad" in step.target else _interpolation(step, image, outs)
    turned = [matrix.T for matrix in matrices]
    return result(step, apply_matrices(builder, builder.full(grad), grad.shape, turned, grad.dtype))


def _images(step: Operation, before: Shape, after: Shape) -> tuple[list[int], list[int]]:
    dims = next(n for n in (1, 2, 3) if f"{n}d" in step.target)
    return fixed(before[-dims:], "an image's size"), fixed(after[-dims:], "an image's size")
