"""Pointwise operators: arithmetic, comparisons, choices."""

from __future__ import annotations

import math
from typing import Any

import torch

from coordinator.task.graphs.errors import GraphCompileError
from coordinator.task.graphs.onnx.builder import Builder, OnnxValue
from coordinator.task.graphs.onnx.operators.registry import (
    HANDLERS,
    Handler,
    broadcast,
    handles,
    spec_of,
)
from coordinator.task.graphs.symbols import Operation, Shape


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
    return OnnxValue(builder.emit(operator, *names), spec.shape, spec.dtype, broadcast(*shapes))


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
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "round": "Round",
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
        both = spec_of(step).dtype == torch.bool and operator == "Mul"
        name = "And" if both else operator
        return _pointwise(builder, step, name, a["self"], a.get("other", a.get("exponent")))

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
        return OnnxValue(name, spec.shape, spec.dtype, broadcast(*shapes))

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


@handles("erfc")
def _erfc(builder: Builder, step: Operation) -> OnnxValue:
    return _pointwise(
        builder, step, "Sub", 1, _pointwise(builder, step, "Erf", step.arguments["self"])
    )


@handles("log2", "log10", "exp2")
def _other_base(builder: Builder, step: Operation) -> OnnxValue:
    x = step.arguments["self"]
    scale = math.log(10 if step.target == "log10" else 2)
    if step.target == "exp2":
        return _pointwise(builder, step, "Exp", _pointwise(builder, step, "Mul", x, scale))
    return _pointwise(builder, step, "Div", _pointwise(builder, step, "Log", x), scale)


@handles("trunc")
def _trunc(builder: Builder, step: Operation) -> OnnxValue:
    return _toward_zero(builder, step, step.arguments["self"])


def _toward_zero(builder: Builder, step: Operation, x: Any) -> OnnxValue:
    sign = _pointwise(builder, step, "Sign", x)
    whole = _pointwise(builder, step, "Floor", _pointwise(builder, step, "Abs", x))
    return _pointwise(builder, step, "Mul", sign, whole)


@handles("isnan", "isinf")
def _odd_values(builder: Builder, step: Operation) -> OnnxValue:
    x: OnnxValue = step.arguments["self"]
    name = builder.emit("IsNaN" if step.target == "isnan" else "IsInf", x.name)
    return OnnxValue(name, spec_of(step).shape, torch.bool, x.held)


@handles("remainder.Scalar", "remainder.Tensor", "fmod.Scalar", "fmod.Tensor")
def _remainder(builder: Builder, step: Operation) -> OnnxValue:
    """Compute a remainder with the divisor's sign, or the dividend's for fmod."""
    a, spec = step.arguments, spec_of(step)
    (x, x_shape), (by, by_shape) = (_operand(builder, a[k], spec.dtype) for k in ("self", "other"))
    held = broadcast(x_shape, by_shape)
    if step.target.startswith("fmod") or not spec.dtype.is_floating_point:
        name = builder.emit("Mod", x, by, fmod=int(step.target.startswith("fmod")))
    else:
        whole = builder.emit("Floor", builder.emit("Div", x, by))
        name = builder.emit("Sub", x, builder.emit("Mul", whole, by))
    return OnnxValue(name, spec.shape, spec.dtype, held)


@handles("div.Tensor_mode", "div.Scalar_mode", "floor_divide", "floor_divide.Scalar")
def _whole_quotient(builder: Builder, step: Operation) -> OnnxValue:
    a, spec = step.arguments, spec_of(step)
    mode = a.get("rounding_mode", "floor")
    if mode is None:
        return _pointwise(builder, step, "Div", a["self"], a["other"])
    if spec.dtype.is_floating_point:
        quotient = _pointwise(builder, step, "Div", a["self"], a["other"])
        if mode == "trunc":
            return _toward_zero(builder, step, quotient)
        return _pointwise(builder, step, "Floor", quotient)
    if mode == "trunc":  # as ONNX divides whole numbers
        return _pointwise(builder, step, "Div", a["self"], a["other"])
    (x, x_shape), (by, by_shape) = (_operand(builder, a[k], spec.dtype) for k in ("self", "other"))
    exact = builder.emit("Sub", x, builder.emit("Mod", x, by))
    held = broadcast(x_shape, by_shape)
    return OnnxValue(builder.emit("Div", exact, by), spec.shape, spec.dtype, held)


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
@handles("clamp_min.Tensor", "clamp_max.Tensor")
def _clamp(builder: Builder, step: Operation) -> OnnxValue:
    a, spec = step.arguments, spec_of(step)
    value = a["self"]
    bounds = [a.get("min", a.get("min_val")), a.get("max", a.get("max_val"))]
    numbers = [bound for bound in bounds if isinstance(bound, (int, float))]
    if len(numbers) == 2 and spec.dtype.is_floating_point:
        names = (builder.scalar(bound, spec.dtype) for bound in numbers)
        name, held = _operand(builder, value, spec.dtype)
        return OnnxValue(builder.emit("Clip", name, *names), spec.shape, spec.dtype, held)
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
    held = broadcast(condition.held, yes_shape, no_shape)
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
