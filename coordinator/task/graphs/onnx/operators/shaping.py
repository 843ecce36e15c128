"""Operators that create, reshape, cut and join tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.task.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import (
    axis_of,
    fixed,
    handles,
    result,
    spec_of,
)
from coordinator.task.graphs.symbols import Operation, Size, multiply, subtract


@handles("scalar_tensor", "full", "full_like", "new_full", "fill.Scalar")
def _full(builder: Builder, step: Operation) -> OnnxValue:
    a, spec = step.arguments, spec_of(step)
    number = next(a[key] for key in ("fill_value", "s", "value") if key in a)
    return OnnxValue(builder.scalar(number, spec.dtype), spec.shape, spec.dtype, ())


@handles("zeros", "zeros_like", "new_zeros", "ones", "ones_like")
@handles("empty.memory_format", "empty_like", "empty_permuted", "empty_strided")
@handles("new_empty", "new_empty_strided", "new_ones")
def _zeros(builder: Builder, step: Operation) -> OnnxValue:
    spec = spec_of(step)
    number = 1 if "ones" in step.target else 0
    return OnnxValue(builder.scalar(number, spec.dtype), spec.shape, spec.dtype, ())


@handles("arange.start_step")
def _arange(builder: Builder, step: Operation) -> OnnxValue:
    a, spec = step.arguments, spec_of(step)
    bounds = [builder.scalar(a[key], spec.dtype) for key in ("start", "end", "step")]
    return result(step, builder.emit("Range", *bounds))


@handles("expand", "expand_copy")
def _expand(_builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    return OnnxValue(value.name, spec_of(step).shape, value.dtype, value.held)


@handles("view", "view_copy", "reshape", "_unsafe_view", "_reshape_copy")
def _view(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    after = spec_of(step).shape
    if value.held == ():
        return OnnxValue(value.name, after, value.dtype, ())
    return result(step, builder.reshape(builder.full(value), value.shape, after))


@handles("unsqueeze", "unsqueeze_copy")
def _unsqueeze(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    shape = spec_of(step).shape
    axis = axis_of(step.arguments["dim"], len(shape))
    if value.held == ():
        return OnnxValue(value.name, shape, value.dtype, ())
    return result(step, builder.emit("Unsqueeze", builder.full(value), builder.ints([axis])))


@handles("squeeze.dims", "squeeze.dim", "squeeze_copy.dim", "squeeze_copy.dims")
def _squeeze(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    dims = step.arguments["dim"]
    dims = [dims] if isinstance(dims, int) else dims
    rank = len(value.shape)
    axes = [axis_of(dim, rank) for dim in dims if rank and value.shape[axis_of(dim, rank)] == 1]
    if not axes:
        return value
    return result(step, builder.emit("Squeeze", builder.full(value), builder.ints(axes)))


@handles("permute", "permute_copy")
def _permute(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    rank = len(value.shape)
    order = [axis_of(dim, rank) for dim in step.arguments["dims"]]
    return result(step, builder.emit("Transpose", builder.full(value), perm=order))


@handles("t", "t_copy", "transpose.int", "transpose_copy.int")
def _transpose(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    order = list(range(len(value.shape)))
    if order:
        first = axis_of(step.arguments.get("dim0", 0), len(order))
        second = axis_of(step.arguments.get("dim1", 1), len(order)) if len(order) > 1 else first
        order[first], order[second] = order[second], order[first]
    return result(step, builder.emit("Transpose", builder.full(value), perm=order))


@handles("repeat")
def _repeat(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    repeats = tuple(step.arguments["repeats"])
    whole = (1,) * (len(repeats) - len(value.shape)) + value.shape
    name = builder.reshape(builder.full(value), value.shape, whole)
    return result(step, builder.emit("Tile", name, builder.sizes(repeats)))


@handles("cumsum")
def _cumsum(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    axis = axis_of(step.arguments["dim"], len(value.shape))
    return result(step, builder.emit("CumSum", builder.full(value), builder.ints([axis])))


@handles("flip")
def _flip(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    axes = [axis_of(dim, len(value.shape)) for dim in step.arguments["dims"]]
    # From the last element backwards, to just before the first.
    bounds = [[-1] * len(axes), [-(2**62)] * len(axes), axes, [-1] * len(axes)]
    return result(step, builder.emit("Slice", builder.full(value), *map(builder.ints, bounds)))


@handles("roll")
def _roll(builder: Builder, step: Operation) -> OnnxValue:
    """Move each dimension's last elements to its front."""
    value: OnnxValue = step.arguments["self"]
    shifts, dims = ([x] if isinstance(x, int) else x for x in _named(step, "shifts", "dims"))
    name, shape = builder.full(value), value.shape
    if not dims:  # torch rolls the elements in a row
        dims, shape = [0], (multiply(*shape),)
        name = builder.reshape(name, value.shape, shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(dim, len(shape))
        (size,) = fixed([shape[axis]], "a dimension that is rolled")
        start = -shift % size
        if start:
            parts = [
                _slice_name(builder, name, axis, *ends) for ends in ((start, size), (0, start))
            ]
            name = builder.emit("Concat", *parts, axis=axis)
    return result(step, builder.reshape(name, shape, value.shape))


def _named(step: Operation, *names: str) -> list[Any]:
    return [step.arguments[name] for name in names]


@handles("slice_scatter")
def _slice_scatter(builder: Builder, step: Operation) -> OnnxValue:
    """Put a tensor in the place of a slice."""
    value, source = _named(step, "self", "src")
    axis = axis_of(step.arguments["dim"], len(value.shape))
    size = value.shape[axis]
    start, end = _bounds(step, size)
    name, new = builder.full(value), builder.full(source)
    if step.arguments["step"] != 1:
        first, last, stride, count = fixed(
            [start, end, step.arguments["step"], size], "a slice with steps"
        )
        taken = np.isin(np.arange(count), np.arange(first, last, stride))
        there = taken.reshape(count, *[1] * (len(value.shape) - axis - 1))
        spread = _spread(builder, step, source, axis)
        return result(step, builder.emit("Where", builder.constant(there), spread, name))
    parts = [new]
    if start != 0:
        parts.insert(0, _slice_name(builder, name, axis, 0, start))
    if end != size:
        parts.append(_slice_name(builder, name, axis, end, size))
    return result(step, builder.emit("Concat", *parts, axis=axis) if len(parts) > 1 else new)


@handles("cat")
def _cat(builder: Builder, step: Operation) -> OnnxValue:
    axis = axis_of(step.arguments["dim"], len(spec_of(step).shape))
    names = [builder.full(value) for value in step.arguments["tensors"]]
    return result(step, builder.emit("Concat", *names, axis=axis))


@handles("getitem")
def _getitem(_builder: Builder, step: Operation) -> OnnxValue:
    value = step.arguments["source"][step.arguments["index"]]
    if value is None:
        raise GraphCompileError("it uses a result that has no translation")
    result: OnnxValue = value
    return result


def _select_name(builder: Builder, value: OnnxValue, axis: int, index: int) -> str:
    return builder.emit(
        "Gather", builder.full(value), builder.constant(np.array(index, dtype=np.int64)), axis=axis
    )


@handles("select.int", "select_copy.int")
def _select(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    axis = axis_of(step.arguments["dim"], len(value.shape))
    (index,) = fixed([step.arguments["index"]], "the index")
    return result(step, _select_name(builder, value, axis, index))


@handles("unbind.int", "unbind_copy.int")
def _unbind(builder: Builder, step: Operation) -> tuple[OnnxValue, ...]:
    value: OnnxValue = step.arguments["self"]
    axis = axis_of(step.arguments["dim"], len(value.shape))
    (count,) = fixed([value.shape[axis]], "the number of parts")
    return tuple(result(step, _select_name(builder, value, axis, i), i) for i in range(count))


def _slice_name(
    builder: Builder, name: str, axis: int, start: Size, end: Size, stride: int = 1
) -> str:
    ends = builder.size(start), builder.size(end)
    return builder.emit("Slice", name, *ends, builder.ints([axis]), builder.ints([stride]))


def _bounds(step: Operation, size: Size) -> tuple[Size, Size]:
    """Return a slice's start and end, within the dimension."""
    found: list[Size] = []
    for key, default in (("start", 0), ("end", size)):
        bound: Any = step.arguments[key]
        if bound is None or (isinstance(bound, int) and bound >= 2**62):
            bound = default
        if isinstance(bound, int) and isinstance(size, int):
            bound = min(max(bound + size if bound < 0 else bound, 0), size)
        elif isinstance(bound, int) and bound < 0:
            raise NotSymbolicError("a slice counts from the end of a width")
        found.append(bound)
    return found[0], found[1]


@handles("slice.Tensor", "slice_copy.Tensor")
def _slice(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    axis = axis_of(step.arguments["dim"], len(value.shape))
    start, end = _bounds(step, value.shape[axis])
    (stride,) = fixed([step.arguments["step"]], "a slice's step")
    if (start, end, stride) == (0, value.shape[axis], 1):
        return value
    name = _slice_name(builder, builder.full(value), axis, start, end, stride)
    return result(step, name)


@handles("split.Tensor", "split_copy.Tensor", "split_with_sizes", "split_with_sizes_copy")
def _split(builder: Builder, step: Operation) -> tuple[OnnxValue, ...]:
    value: OnnxValue = step.arguments["self"]
    axis = axis_of(step.arguments["dim"], len(value.shape))
    parts = [spec_of(step, index).shape[axis] for index in range(len(step.results))]
    sizes = builder.sizes(tuple(parts))
    names = builder.emit_many(len(parts), "Split", builder.full(value), sizes, axis=axis)
    return tuple(result(step, name, index) for index, name in enumerate(names))


def _padded(builder: Builder, name: str, rank: int, axis: int, before: Size, after: Size) -> str:
    pads: list[Size] = [0] * (2 * rank)
    pads[axis], pads[rank + axis] = before, after
    return builder.emit("Pad", name, builder.sizes(tuple(pads)))


@handles("select_backward")
def _select_backward(builder: Builder, step: Operation) -> OnnxValue:
    shape = spec_of(step).shape
    axis = axis_of(step.arguments["dim"], len(shape))
    index, size = fixed([step.arguments["index"], shape[axis]], "the index and its dimension")
    name = builder.emit(
        "Unsqueeze", builder.full(step.arguments["grad_output"]), builder.ints([axis])
    )
    index %= size
    return result(step, _padded(builder, name, len(shape), axis, index, size - index - 1))


@handles("slice_backward")
def _slice_backward(builder: Builder, step: Operation) -> OnnxValue:
    shape = spec_of(step).shape
    grad: OnnxValue = step.arguments["grad_output"]
    axis = axis_of(step.arguments["dim"], len(shape))
    start, end = _bounds(step, shape[axis])
    if step.arguments["step"] != 1:
        return result(step, _spread(builder, step, grad, axis))
    if (start, end) == (0, shape[axis]):
        return grad
    after = subtract(shape[axis], end)
    return result(step, _padded(builder, builder.full(grad), len(shape), axis, start, after))


def _spread(builder: Builder, step: Operation, grad: OnnxValue, axis: int) -> str:
    """Spread the gradient over the places the slice came from, with zeros elsewhere."""
    shape = spec_of(step).shape
    start, end, stride, size = fixed(
        [*_bounds(step, shape[axis]), step.arguments["step"], shape[axis]], "a slice with steps"
    )
    taken = range(start, end, stride)
    padded = _padded(builder, builder.full(grad), len(shape), axis, 0, 1)
    places = [taken.index(i) if i in taken else len(taken) for i in range(size)]
    return builder.emit("Gather", padded, builder.ints(places), axis=axis)


@handles("constant_pad_nd")
def _pad(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    rank = len(value.shape)
    pads = fixed(step.arguments["pad"], "padding")
    before, after = [0] * rank, [0] * rank
    for index in range(len(pads) // 2):
        before[rank - 1 - index], after[rank - 1 - index] = pads[2 * index : 2 * index + 2]
    number = builder.scalar(step.arguments["value"], value.dtype)
    return result(
        step, builder.emit("Pad", builder.full(value), builder.ints(before + after), number)
    )
