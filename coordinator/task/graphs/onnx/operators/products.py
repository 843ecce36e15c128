"""Reductions, matrix products and softmax."""

from __future__ import annotations

import torch

from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import (
    HANDLERS,
    Handler,
    axis_of,
    handles,
    reduced,
    result,
    spec_of,
)
from coordinator.task.graphs.symbols import Operation, multiply


def _axes(step: Operation, rank: int) -> list[int]:
    dims = step.arguments.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    return [axis_of(dim, rank) for dim in dims] if dims else list(range(rank))


def _reduction(operator: str) -> Handler:
    def handler(builder: Builder, step: Operation) -> OnnxValue:
        value: OnnxValue = step.arguments["self"]
        axes = _axes(step, len(value.shape))
        name, dtype = builder.full(value), spec_of(step).dtype
        if value.dtype != dtype:
            name = builder.cast(name, dtype)
        keep = bool(step.arguments.get("keepdim", False))
        return result(step, reduced(builder, operator, name, axes, keep=keep))

    return handler


for _target, _operator in (("sum", "ReduceSum"), ("mean", "ReduceMean")):
    for _overload in ("", ".dim", ".dim_IntList"):
        HANDLERS[_target + _overload] = _reduction(_operator)
HANDLERS["amax"] = _reduction("ReduceMax")
HANDLERS["amin"] = _reduction("ReduceMin")


@handles(*(f"{kind}{which}" for kind in ("any", "all") for which in ("", ".dim", ".dims")))
def _whether(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    operator = "ReduceMax" if step.target.startswith("any") else "ReduceMin"
    there = builder.cast(builder.cast(builder.full(value), torch.bool), torch.int32)
    keep = bool(step.arguments.get("keepdim", False))
    found = reduced(builder, operator, there, _axes(step, len(value.shape)), keep=keep)
    return result(step, builder.cast(found, torch.bool))


@handles("var_mean.correction", "var.correction")
def _var_mean(builder: Builder, step: Operation) -> OnnxValue | tuple[OnnxValue, ...]:
    value: OnnxValue = step.arguments["self"]
    axes, keep = _axes(step, len(value.shape)), bool(step.arguments["keepdim"])
    x, dtype = builder.full(value), value.dtype
    mean = reduced(builder, "ReduceMean", x, axes, keep=True)
    centred = builder.emit("Sub", x, mean)
    square = builder.emit("Mul", centred, centred)
    var = reduced(builder, "ReduceMean", square, axes, keep=keep)
    correction = step.arguments["correction"]
    if correction is None or correction != 0:
        count = builder.scalar(multiply(*(value.shape[axis] for axis in axes)), dtype)
        fewer = builder.emit("Sub", count, builder.scalar(correction or 1, dtype))
        var = builder.emit("Mul", var, builder.emit("Div", count, fewer))
    if step.single:
        return result(step, var)
    if not keep:
        mean = builder.emit("Squeeze", mean, builder.ints(axes))
    return result(step, var), result(step, mean, 1)


@handles("mm")
def _product(builder: Builder, step: Operation) -> OnnxValue:
    """Compute a product; one whose left side is transposed is made transposed: aᵀ·b = (bᵀ·a)ᵀ.

    torch writes the gradient of a linear layer's weight this way and transposes it next. Two
    transposes in a row cancel in onnxruntime, and it fuses those of a product's operands;
    transposing a gradient would take as long as the product.
    """
    left, right = builder.full(step.arguments["self"]), builder.full(step.arguments["mat2"])
    made_by = next((node for node in builder.nodes if left in node.output), None)
    if made_by is None or made_by.op_type != "Transpose":
        return result(step, builder.emit("MatMul", left, right))
    other = builder.emit("Transpose", right, perm=[1, 0])
    product = builder.emit("MatMul", other, made_by.input[0])
    return result(step, builder.emit("Transpose", product, perm=[1, 0]))


@handles("bmm", "matmul")
def _matmul(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    right: OnnxValue = a["mat2"] if "mat2" in a else a["other"]
    return result(step, builder.emit("MatMul", builder.full(a["self"]), builder.full(right)))


@handles("addmm")
def _addmm(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    names = builder.full(a["mat1"]), builder.full(a["mat2"]), a["self"].name
    factors = {"alpha": float(a["alpha"]), "beta": float(a["beta"])}
    return result(step, builder.emit("Gemm", *names, **factors))


@handles("_safe_softmax")
def _safe_softmax(builder: Builder, step: Operation) -> OnnxValue:
    """Compute attention's softmax: where a mask leaves nothing to attend to, zeros."""
    value: OnnxValue = step.arguments["self"]
    name, axis = builder.full(value), axis_of(step.arguments["dim"], len(value.shape))
    found = builder.emit("Softmax", name, axis=axis)
    makers = {out: node for node in builder.nodes for out in node.output}
    made_by = makers.get(name)
    while made_by is not None and made_by.op_type == "Reshape":
        made_by = makers.get(made_by.input[0])
    if made_by is None or made_by.op_type != "MatMul":  # else there is no mask
        largest = reduced(builder, "ReduceMax", name, [axis], keep=True)
        nothing = builder.emit("IsInf", largest, detect_positive=0)
        found = builder.emit("Where", nothing, builder.scalar(0, value.dtype), found)
    return result(step, found)


@handles("_softmax", "_log_softmax")
def _softmax(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    operator = "Softmax" if step.target == "_softmax" else "LogSoftmax"
    axis = axis_of(step.arguments["dim"], len(value.shape))
    return result(step, builder.emit(operator, builder.full(value), axis=axis))
