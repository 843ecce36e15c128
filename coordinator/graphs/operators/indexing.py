"""Lookups by index, and their gradients."""

from __future__ import annotations

import numpy as np

from coordinator.graphs.builder import Builder, Value
from coordinator.graphs.errors import GraphCompileError
from coordinator.graphs.operators.registry import (
    axis_of,
    handles,
    reduced,
    result,
    spec_of,
)
from coordinator.graphs.symbols import Size, Spec, Step, multiply
from edge_sdk.protocol.graphs import SizeTerm


@handles("gather")
def _gather(builder: Builder, step: Step) -> Value:
    a = step.arguments
    names = builder.full(a["self"]), builder.full(a["index"])
    axis = axis_of(a["dim"], len(a["self"].shape))
    return result(step, builder.emit("GatherElements", *names, axis=axis))


@handles("scatter.value", "scatter.src", "scatter_add")
def _scatter(builder: Builder, step: Step) -> Value:
    a = step.arguments
    index: Value = a["index"]
    if "src" in a:
        updates = builder.full(a["src"])
        if a["src"].shape != index.shape:
            raise GraphCompileError("only with as many sources as indices")
    else:
        dtype = a["self"].dtype
        updates = builder.full(Value(builder.scalar(a["value"], dtype), index.shape, dtype, ()))
    names = builder.full(a["self"]), builder.full(index), updates
    more = {"reduction": "add"} if step.target == "scatter_add" else {}
    axis = axis_of(a["dim"], len(a["self"].shape))
    return result(step, builder.emit("ScatterElements", *names, axis=axis, **more))


@handles("embedding")
def _embedding(builder: Builder, step: Step) -> Value:
    a = step.arguments
    names = builder.full(a["weight"]), builder.full(a["indices"])
    return result(step, builder.emit("Gather", *names, axis=0))


@handles("index_select")
def _index_select(builder: Builder, step: Step) -> Value:
    a = step.arguments
    axis = axis_of(a["dim"], len(a["self"].shape))
    return result(
        step, builder.emit("Gather", builder.full(a["self"]), builder.full(a["index"]), axis=axis)
    )


def _sum_rows(builder: Builder, rows: str, indices: str, out: Spec, padding: int) -> str:
    """A table with each row of `rows` added at its index; row `padding` stays zero."""
    column = builder.emit("Unsqueeze", indices, builder.ints([1]))
    zero = builder.scalar(0, out.dtype)
    if padding >= 0:
        here = builder.emit("Equal", column, builder.constant(np.array(padding, dtype=np.int64)))
        rows = builder.emit("Where", here, zero, rows)
    table = builder.emit("Expand", zero, builder.sizes(out.shape))
    return builder.emit("ScatterND", table, column, rows, reduction="add")


def _no_frequencies(step: Step) -> None:
    if step.arguments["scale_grad_by_freq"]:
        raise GraphCompileError("scale_grad_by_freq is not supported")


@handles("embedding_dense_backward")
def _embedding_backward(builder: Builder, step: Step) -> Value:
    _no_frequencies(step)
    a, spec = step.arguments, spec_of(step)
    grad, indices = a["grad_output"], a["indices"]
    count = multiply(*indices.shape)
    rows = builder.reshape(builder.full(grad), grad.shape, (count, spec.shape[1]))
    flat = builder.reshape(builder.full(indices), indices.shape, (count,))
    return result(step, _sum_rows(builder, rows, flat, spec, a["padding_idx"]))


def _bag(builder: Builder, step: Step) -> tuple[Value, Size, Size]:
    """The indices, how many bags there are and how long each is; they are equally long."""
    a = step.arguments
    _no_frequencies(step)
    if a["mode"] not in (0, 1) or a["per_sample_weights"] is not None or a["padding_idx"] >= 0:
        raise GraphCompileError("only the sum or mean of whole bags, without weights or padding")
    indices, offsets = a["indices"], a["offsets"]
    length = _divide(indices.shape[0], offsets.shape[0])
    starts = [builder.scalar(number, offsets.dtype) for number in (0, indices.shape[0], length)]
    if builder.emit("Range", *starts) != offsets.name:
        raise GraphCompileError("bags must be equally long: pass token ids as a 2-D batch")
    return indices, offsets.shape[0], length


def _divide(size: Size, by: Size) -> Size:
    whole = size if isinstance(size, SizeTerm) else SizeTerm(size)
    part = by if isinstance(by, SizeTerm) else SizeTerm(by)
    if whole.coefficient % part.coefficient or (whole.axes, whole.batch) != (part.axes, part.batch):
        raise GraphCompileError("bags must be equally long: pass token ids as a 2-D batch")
    return whole.coefficient // part.coefficient


@handles("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(builder: Builder, step: Step) -> tuple[Value | None, ...]:
    indices, bags, length = _bag(builder, step)
    weight: Value = step.arguments["weight"]
    table = builder.reshape(builder.full(indices), indices.shape, (bags, length))
    rows = builder.emit("Gather", builder.full(weight), table, axis=0)
    operator = "ReduceMean" if step.arguments["mode"] == 1 else "ReduceSum"
    out = result(step, reduced(builder, operator, rows, [1]))
    # The others only serve the backward pass, which does without them.
    unused = [Value("", spec.shape, spec.dtype, spec.shape) for spec in step.results[1:] if spec]
    return out, *unused


@handles("_embedding_bag_backward", "_embedding_bag_dense_backward")
def _embedding_bag_backward(builder: Builder, step: Step) -> Value:
    indices, bags, length = _bag(builder, step)
    grad: Value = step.arguments["grad"]
    spec = spec_of(step)
    name = builder.full(grad)
    if step.arguments["mode"] == 1:
        name = builder.emit("Div", name, builder.scalar(length, grad.dtype))
    width = spec.shape[1]
    name = builder.emit("Unsqueeze", name, builder.ints([1]))
    name = builder.emit("Expand", name, builder.sizes((bags, length, width)))
    rows = builder.reshape(name, (bags, length, width), (indices.shape[0], width))
    return result(step, _sum_rows(builder, rows, builder.full(indices), spec, -1))
