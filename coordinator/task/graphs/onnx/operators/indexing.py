"""Lookups by index, and their gradients."""

from __future__ import annotations

import numpy as np
import torch

from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import (
    axis_of,
    broadcast,
    fixed,
    handles,
    reduced,
    result,
    spec_of,
)
from coordinator.task.graphs.symbols import Operation, Shape, Size, Spec, multiply
from edge_sdk.protocol.task.graphs import SizeTerm


@handles("gather")
def _gather(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    names = builder.full(a["self"]), builder.full(a["index"])
    axis = axis_of(a["dim"], len(a["self"].shape))
    return result(step, builder.emit("GatherElements", *names, axis=axis))


@handles("scatter.value", "scatter.src", "scatter_add")
def _scatter(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    index: OnnxValue = a["index"]
    if "src" in a:
        updates = builder.full(a["src"])
        if a["src"].shape != index.shape:
            raise GraphCompileError("sources and indices must have the same shape")
    else:
        dtype = a["self"].dtype
        updates = builder.full(OnnxValue(builder.scalar(a["value"], dtype), index.shape, dtype, ()))
    names = builder.full(a["self"]), builder.full(index), updates
    more = {"reduction": "add"} if step.target == "scatter_add" else {}
    axis = axis_of(a["dim"], len(a["self"].shape))
    return result(step, builder.emit("ScatterElements", *names, axis=axis, **more))


@handles("max.dim", "min.dim")
def _extreme(builder: Builder, step: Operation) -> tuple[OnnxValue, ...]:
    a = step.arguments
    value: OnnxValue = a["self"]
    axis, keep = axis_of(a["dim"], len(value.shape)), bool(a["keepdim"])
    reduce, find = ("ReduceMax", "ArgMax") if step.target == "max.dim" else ("ReduceMin", "ArgMin")
    name = builder.full(value)
    indices = builder.emit(find, name, axis=axis, keepdims=int(keep))
    return result(step, reduced(builder, reduce, name, [axis], keep=keep)), result(step, indices, 1)


@handles("embedding")
def _embedding(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    names = builder.full(a["weight"]), builder.full(a["indices"])
    return result(step, builder.emit("Gather", *names, axis=0))


@handles("index_select")
def _index_select(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    axis = axis_of(a["dim"], len(a["self"].shape))
    return result(
        step, builder.emit("Gather", builder.full(a["self"]), builder.full(a["index"]), axis=axis)
    )


def _indexed(step: Operation) -> tuple[OnnxValue, dict[int, OnnxValue], Shape, bool]:
    """Return the tensor, its indices by dimension, their common shape, and where it goes.

    The indices' dimensions stand in place of the dimensions they index if those are neighbours
    (True), else in front (False).
    """
    value: OnnxValue = step.arguments["self"]
    indices = {dim: each for dim, each in enumerate(step.arguments["indices"]) if each is not None}
    if any(each.dtype in (torch.bool, torch.uint8) for each in indices.values()):
        raise GraphCompileError("indexing by a condition; use torch.where")
    first, last = min(indices), max(indices)
    common = broadcast(*(each.shape for each in indices.values()))
    return value, indices, common, last - first == len(indices) - 1


def _places(builder: Builder, indices: dict[int, OnnxValue], common: Shape) -> str:
    """Return the indices side by side in a last dimension."""
    columns = []
    for each in indices.values():
        name = builder.full(OnnxValue(each.name, common, each.dtype, each.held))
        name = name if each.dtype == torch.int64 else builder.cast(name, torch.int64)
        columns.append(builder.emit("Unsqueeze", name, builder.ints([len(common)])))
    return builder.emit("Concat", *columns, axis=len(common)) if len(columns) > 1 else columns[0]


def _transposed(builder: Builder, name: str, order: list[int]) -> str:
    if order == sorted(order):
        return name
    return builder.emit("Transpose", name, perm=order)


def _orders(
    indices: dict[int, OnnxValue], rank: int, common: int, *, inside: bool
) -> tuple[int, list[int], list[int]]:
    """Return how many dimensions stay in front, and orders that put what is indexed first.

    The first order is that of the tensor, the second that of torch's result.
    """
    rest = [dim for dim in range(rank) if dim not in indices]
    before = sum(dim < min(indices) for dim in rest) if inside else 0
    found = [*range(before, before + common), *range(before)]
    return before, [*indices, *rest], [*found, *range(before + common, len(rest) + common)]


@handles("index.Tensor", "_unsafe_index.Tensor")
def _index(builder: Builder, step: Operation) -> OnnxValue:
    value, indices, common, inside = _indexed(step)
    if len(indices) == 1:
        ((dim, index),) = indices.items()
        name = builder.full(index)
        name = name if index.dtype == torch.int64 else builder.cast(name, torch.int64)
        return result(step, builder.emit("Gather", builder.full(value), name, axis=dim))
    _, first, out = _orders(indices, len(value.shape), len(common), inside=inside)
    data = _transposed(builder, builder.full(value), first)
    name = builder.emit("GatherND", data, _places(builder, indices, common))
    return result(step, _transposed(builder, name, np.argsort(out).tolist()))


@handles("index_put", "_unsafe_index_put")
def _index_put(builder: Builder, step: Operation) -> OnnxValue:
    value, indices, common, inside = _indexed(step)
    before, first, out = _orders(indices, len(value.shape), len(common), inside=inside)
    rest = [size for dim, size in enumerate(value.shape) if dim not in indices]
    shape = (*rest[:before], *common, *rest[before:])
    new: OnnxValue = step.arguments["values"]
    updates = builder.full(OnnxValue(new.name, shape, new.dtype, new.held))
    names = (
        _transposed(builder, builder.full(value), first),
        _places(builder, indices, common),
        _transposed(builder, updates, out),
    )
    more = {"reduction": "add"} if step.arguments["accumulate"] else {}
    name = builder.emit("ScatterND", *names, **more)
    return result(step, _transposed(builder, name, np.argsort(first).tolist()))


@handles("topk", "sort", "sort.stable")
def _sorted(builder: Builder, step: Operation) -> tuple[OnnxValue, ...]:
    a = step.arguments
    value: OnnxValue = a["self"]
    axis = axis_of(a["dim"], len(value.shape))
    (count,) = fixed([a.get("k", value.shape[axis])], "a number of sorted values")
    largest = a["largest"] if "largest" in a else a["descending"]
    name = builder.full(value)
    names = builder.emit_many(
        2, "TopK", name, builder.ints([count]), axis=axis, largest=int(largest)
    )
    return result(step, names[0]), result(step, names[1], 1)


@handles("argmax", "argmin")
def _extreme_place(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    value: OnnxValue = a["self"]
    operator = "ArgMax" if step.target == "argmax" else "ArgMin"
    name, dim = builder.full(value), a["dim"]
    if value.dtype == torch.bool:
        name = builder.cast(name, torch.int32)
    if dim is None:
        raise GraphCompileError("give the dimension to search along")
    axis = axis_of(dim, len(value.shape))
    return result(step, builder.emit(operator, name, axis=axis, keepdims=int(a["keepdim"])))


def _sum_rows(builder: Builder, rows: str, indices: str, out: Spec, padding: int) -> str:
    """Build a table with each row of `rows` added at its index; row `padding` stays zero."""
    column = builder.emit("Unsqueeze", indices, builder.ints([1]))
    zero = builder.scalar(0, out.dtype)
    if padding >= 0:
        here = builder.emit("Equal", column, builder.constant(np.array(padding, dtype=np.int64)))
        rows = builder.emit("Where", here, zero, rows)
    table = builder.emit("Expand", zero, builder.sizes(out.shape))
    return builder.emit("ScatterND", table, column, rows, reduction="add")


def _no_frequencies(step: Operation) -> None:
    if step.arguments["scale_grad_by_freq"]:
        raise GraphCompileError("scale_grad_by_freq is not supported")


@handles("embedding_dense_backward")
def _embedding_backward(builder: Builder, step: Operation) -> OnnxValue:
    _no_frequencies(step)
    a, spec = step.arguments, spec_of(step)
    grad, indices = a["grad_output"], a["indices"]
    count = multiply(*indices.shape)
    rows = builder.reshape(builder.full(grad), grad.shape, (count, spec.shape[1]))
    flat = builder.reshape(builder.full(indices), indices.shape, (count,))
    return result(step, _sum_rows(builder, rows, flat, spec, a["padding_idx"]))


def _bag(builder: Builder, step: Operation) -> tuple[OnnxValue, Size, Size]:
    """Return the indices, the number of bags and their common length."""
    a = step.arguments
    if a["mode"] not in (0, 1):
        raise GraphCompileError("a bag supports only sum and mean")
    indices, offsets = a["indices"], a["offsets"]
    length = _divide(indices.shape[0], offsets.shape[0])
    starts = [builder.scalar(number, offsets.dtype) for number in (0, indices.shape[0], length)]
    if builder.emit("Range", *starts) != offsets.name:
        raise GraphCompileError("bags must have equal lengths: pass token ids as a 2-D batch")
    return indices, offsets.shape[0], length


def _shares(
    builder: Builder, step: Operation, dtype: torch.dtype, bags: Size, length: Size
) -> str | None:
    """Weight of each entry in its bag, (bags, length, 1); None: every weight is 1.

    A sample weight if given; zero for padding; in a mean, divided by the number of entries present.
    """
    a = step.arguments
    whole = (bags, length, 1)
    weights: OnnxValue | None = a.get("per_sample_weights")
    name = None
    if weights is not None:
        name = builder.reshape(builder.full(weights), weights.shape, whole)
    if a["padding_idx"] >= 0:
        ids = builder.reshape(builder.full(a["indices"]), a["indices"].shape, whole)
        padding = builder.scalar(a["padding_idx"], a["indices"].dtype)
        there = builder.cast(builder.emit("Not", builder.emit("Equal", ids, padding)), dtype)
        name = there if name is None else builder.emit("Mul", name, there)
        if a["mode"] == 1:
            count = builder.emit("ReduceSum", there, builder.ints([1]), keepdims=1)
            count = builder.emit("Max", count, builder.scalar(1, dtype))
            name = builder.emit("Div", there, count)
    elif a["mode"] == 1:
        one = builder.scalar(1, dtype)
        name = builder.emit("Div", one, builder.scalar(length, dtype))
    return name


def _divide(size: Size, by: Size) -> Size:
    whole = size if isinstance(size, SizeTerm) else SizeTerm(size)
    part = by if isinstance(by, SizeTerm) else SizeTerm(by)
    if whole.coefficient % part.coefficient or (whole.axes, whole.batch) != (part.axes, part.batch):
        raise GraphCompileError("bags must have equal lengths: pass token ids as a 2-D batch")
    return whole.coefficient // part.coefficient


def _bag_rows(
    builder: Builder, weight: OnnxValue, indices: OnnxValue, bags: Size, length: Size
) -> str:
    """Look up the table's row of each entry, (bags, length, width)."""
    table = builder.reshape(builder.full(indices), indices.shape, (bags, length))
    return builder.emit("Gather", builder.full(weight), table, axis=0)


@handles("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(builder: Builder, step: Operation) -> tuple[OnnxValue | None, ...]:
    _no_frequencies(step)
    indices, bags, length = _bag(builder, step)
    weight: OnnxValue = step.arguments["weight"]
    rows = _bag_rows(builder, weight, indices, bags, length)
    shares = _shares(builder, step, weight.dtype, bags, length)
    if shares is not None:
        rows = builder.emit("Mul", rows, shares)
    out = result(step, reduced(builder, "ReduceSum", rows, [1]))
    # The other outputs only serve the backward pass, which does not need them here.
    unused = [
        OnnxValue("", spec.shape, spec.dtype, spec.shape) for spec in step.results[1:] if spec
    ]
    return out, *unused


@handles("_embedding_bag_backward")
def _embedding_bag_backward(builder: Builder, step: Operation) -> OnnxValue:
    _no_frequencies(step)
    indices, bags, length = _bag(builder, step)
    grad: OnnxValue = step.arguments["grad"]
    spec = spec_of(step)
    width = spec.shape[1]
    name = builder.emit("Unsqueeze", builder.full(grad), builder.ints([1]))
    shares = _shares(builder, step, grad.dtype, bags, length)
    if shares is not None:
        name = builder.emit("Mul", name, shares)
    name = builder.emit("Expand", name, builder.sizes((bags, length, width)))
    rows = builder.reshape(name, (bags, length, width), (indices.shape[0], width))
    return result(step, _sum_rows(builder, rows, builder.full(indices), spec, -1))


@handles("_embedding_bag_per_sample_weights_backward")
def _bag_weights_backward(builder: Builder, step: Operation) -> OnnxValue:
    """Multiply the gradient of a bag with each of its rows."""
    a = step.arguments
    indices, bags, length = _bag(builder, step)
    rows = _bag_rows(builder, a["weight"], indices, bags, length)
    grad = builder.emit("Unsqueeze", builder.full(a["grad"]), builder.ints([1]))
    name = reduced(builder, "ReduceSum", builder.emit("Mul", rows, grad), [2], keep=True)
    shares = _shares(builder, step, a["grad"].dtype, bags, length)
    if shares is not None:
        name = builder.emit("Mul", name, shares)
    return result(step, builder.reshape(name, (bags, length, 1), spec_of(step).shape))
