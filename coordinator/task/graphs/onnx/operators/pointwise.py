"""Pointwise operators: arithmetic, comparisons, choices."""

from __future__ import annotations

from typing import Any

import torch

from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import (
    HANDLERS,
    Handler,
    handles,
    spec_of,
)
from coordinator.task.graphs.symbols import Operation, Shape


def _broadcast(*shapes: Shape) -> Shape:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((s for s in sizes if s != 1), 1) for sizes in zip(*padded, strict=True))


def _operand(builder: Builder, operand: Any, dtype: torch.dtype) -> tuple[str, Shape]:
    """Return name and held shape of a tensor or number, converted to this type."""
    if isinstance(operand, OnnxValue):
        same = operand.dtype == dtype
        return (operand.name if same else builder.cast(operand.name, dtype)), operand.held
    return builder.scalar(operand, dtype), ()


def _pointwise(builder: Builder, step: Operation, operator: str, *operands: Any) -> OnnxValue:
    """Apply an operator to operands of the result's type."""
    spec = spec_of(step)
    names, shapes = zip(*(_operand(builder, o, spec.dtype) for o in operands), strict=True)
    return OnnxValue(builder.emit(operator, *names), spec.shape, spec.dtype, _broadcast(*shapes))


UNARY = {
    "neg": "Neg",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "erf": "Erf",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "relu": "Relu",
    "abs": "Abs",
    "sign": "Sign",
    "sin": "Sin",
    "cos": "Cos",
    "reciprocal": "Reciprocal",
    "floor": "Floor",
    "ceil": "Ceil",
    "logical_not": "Not",
}
BINARY = {"mul": "Mul", "div": "Div", "maximum": "Max", "minimum": "Min", "pow": "Pow"}
COMPARISONS = {
    "eq": "Equal",
    "le": "LessOrEqual",
    "lt": "Less",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
}
LOGIC = {"and": "And", "or": "Or", "xor": "Xor"}


def _unary(operator: str) -> Handler:
    return lambda builder, step: _pointwise(builder, step, operator, step.arguments["self"])


def _binary(operator: str) -> Handler:
    def handler(builder: Builder, step: Operation) -> OnnxValue:
        a = step.arguments
        return _pointwise(builder, step, operator, a["self"], a.get("other", a.get("exponent")))

    return handler


def _comparison(operator: str, *, negate: bool = False) -> Handler:
    def handler(builder: Builder, step: Operation) -> OnnxValue:
        spec, operands = spec_of(step), (step.arguments["self"], step.arguments["other"])
        tensors = [o.dtype for o in operands if isinstance(o, OnnxValue)]
        dtype = tensors[0]
        for other in tensors[1:]:
            dtype = torch.promote_types(dtype, other)
        names, shapes = zip(*(_operand(builder, o, dtype) for o in operands), strict=True)
        name = builder.emit(operator, *names)
        if negate:
            name = builder.emit("Not", name)
        return OnnxValue(name, spec.shape, spec.dtype, _broadcast(*shapes))

    return handler


for _name, _operator in UNARY.items():
    HANDLERS[_name] = _unary(_operator)
for _name, _operator in BINARY.items():
    for _overload in (".Tensor", ".Scalar", "", ".Tensor_Scalar", ".Tensor_Tensor"):
        HANDLERS[_name + _overload] = _binary(_operator)
for _name, _operator in COMPARISONS.items():
    for _overload in (".Tensor", ".Scalar"):
        HANDLERS[_name + _overload] = _comparison(_operator)
for _overload in (".Tensor", ".Scalar"):
    HANDLERS["ne" + _overload] = _comparison("Equal", negate=True)
for _name, _operator in LOGIC.items():
    HANDLERS[f"logical_{_name}"] = _binary(_operator)


@handles("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor", "bitwise_not")
def _bitwise(builder: Builder, step: Operation) -> OnnxValue:
    if spec_of(step).dtype != torch.bool:
        raise GraphCompileError("supported only on booleans")
    kind = step.target.removeprefix("bitwise_").removesuffix(".Tensor")
    if kind == "not":
        return _pointwise(builder, step, "Not", step.arguments["self"])
    operands = step.arguments["self"], step.arguments["other"]
    return _pointwise(builder, step, LOGIC[kind], *operands)


@handles("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar")
def _add(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    other = a["other"]
    if a["alpha"] != 1:
        spec = spec_of(step)
        name, held = _operand(builder, other, spec.dtype)
        name = builder.emit("Mul", name, builder.scalar(a["alpha"], spec.dtype))
        other = OnnxValue(name, held, spec.dtype, held)
    operator = "Add" if step.target.startswith("add") else "Sub"
    return _pointwise(builder, step, operator, a["self"], other)


@handles("rsub.Scalar", "rsub.Tensor")
def _rsub(builder: Builder, step: Operation) -> OnnxValue:
    if step.arguments["alpha"] != 1:
        raise GraphCompileError("alpha must be 1")
    return _pointwise(builder, step, "Sub", step.arguments["other"], step.arguments["self"])


@handles("rsqrt")
def _rsqrt(builder: Builder, step: Operation) -> OnnxValue:
    root = _pointwise(builder, step, "Sqrt", step.arguments["self"])
    return _pointwise(builder, step, "Reciprocal", root)


@handles("log1p", "expm1")
def _near_one(builder: Builder, step: Operation) -> OnnxValue:
    x = step.arguments["self"]
    if step.target == "log1p":
        return _pointwise(builder, step, "Log", _pointwise(builder, step, "Add", x, 1))
    return _pointwise(builder, step, "Sub", _pointwise(builder, step, "Exp", x), 1)


@handles("clamp", "clamp.Tensor", "hardtanh", "clamp_min", "clamp_max", "relu6")
def _clamp(builder: Builder, step: Operation) -> OnnxValue:
    a = step.arguments
    value = a["self"]
    for bound, operator in (("min", "Max"), ("min_val", "Max"), ("max", "Min"), ("max_val", "Min")):
        if a.get(bound) is not None:
            value = _pointwise(builder, step, operator, value, a[bound])
    result: OnnxValue = value
    return result


@handles("where.self", "where.ScalarOther", "where.ScalarSelf")
def _where(builder: Builder, step: Operation) -> OnnxValue:
    a, spec = step.arguments, spec_of(step)
    condition: OnnxValue = a["condition"]
    yes, yes_shape = _operand(builder, a["self"], spec.dtype)
    no, no_shape = _operand(builder, a["other"], spec.dtype)
    held = _broadcast(condition.held, yes_shape, no_shape)
    return OnnxValue(builder.emit("Where", condition.name, yes, no), spec.shape, spec.dtype, held)


@handles("_to_copy", "clone", "detach", "detach_copy", "alias", "alias_copy", "lift_fresh_copy")
def _copy(builder: Builder, step: Operation) -> OnnxValue:
    value: OnnxValue = step.arguments["self"]
    spec = spec_of(step)
    name, held = _operand(builder, value, spec.dtype)
    return OnnxValue(name, spec.shape, spec.dtype, held)


@handles("copy")
def _copy_over(builder: Builder, step: Operation) -> OnnxValue:
    """Broadcast the source to the shape it is copied over."""
    spec = spec_of(step)
    name, held = _operand(builder, step.arguments["src"], spec.dtype)
    return OnnxValue(name, spec.shape, spec.dtype, held)
