"""Translate a symbolic graph to an ONNX model of standard operators, step by step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
from onnx import helper

from coordinator.task.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.task.graphs.onnx.builder import LATER, PLACEHOLDER, Builder, OnnxValue, onnx_type
from coordinator.task.graphs.onnx.operators import HANDLERS
from coordinator.task.graphs.symbols import Operation, Ref, Spec, Symbolic
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.codec import slot_bytes
from edge_sdk.protocol.task.graphs import SLOT_BYTES, SizeSlot, SizeTerm

OPSET = 18
IR_VERSION = 9


@dataclass(frozen=True, slots=True)
class Translated:
    """An ONNX model, and sizes that numbers in it stand for (`GraphEntry.slots`)."""

    model: onnx.ModelProto
    placeholders: dict[SizeTerm, int]

    def encoded(self) -> tuple[bytes, tuple[SizeSlot, ...]]:
        """Return the model's bytes, and the slots in them."""
        data = self.model.SerializeToString(deterministic=True)
        found = []
        for size, placeholder in self.placeholders.items():
            # As protobuf writes an attribute: its name is field 1, its integer field 3.
            for name in LATER:
                written = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x18"
                written = re.escape(written + slot_bytes(placeholder))
                ends = [match.end() for match in re.finditer(written, data)]
                found += [SizeSlot(end - SLOT_BYTES, size) for end in ends]
        nodes = self.model.graph.node
        numbers = [each.i for node in nodes for each in node.attribute if each.name in LATER]
        if len(found) != len([number for number in numbers if number >= PLACEHOLDER]):
            raise GraphCompileError("the width of a layer is not where it should be")
        return data, tuple(sorted(found, key=lambda slot: slot.offset))


def translate(graph: Symbolic, plan: ModelPlan, batch_source: str) -> Translated:
    """Return the ONNX model; raises `GraphCompileError` for an operator without translation."""
    builder = Builder(plan, batch_source)
    values: dict[str, OnnxValue | Sequence[OnnxValue | None]] = {}
    for name, spec in graph.inputs.items():
        held = name
        if name in graph.constants:
            held = builder.constant(graph.constants[name].detach().cpu().numpy())
        values[name] = OnnxValue(held, spec.shape, spec.dtype, spec.shape)
    for step in graph.steps:
        handler = HANDLERS.get(step.target)
        if handler is None:
            raise GraphCompileError(
                f"the operator aten.{step.target} ({_where(step)}) has no translation to ONNX"
            )
        try:
            values[step.name] = handler(builder, _filled(step, values))
        except NotSymbolicError as error:
            raise NotSymbolicError(f"aten.{step.target} ({_where(step)}): {error}") from error
        except GraphCompileError as error:
            raise GraphCompileError(f"aten.{step.target} ({_where(step)}): {error}") from error
        except Exception as error:  # a translation met a form of its operator that it does not know
            raise GraphCompileError(
                f"aten.{step.target} ({_where(step)}): its translation fails with "
                f"{type(error).__name__}: {error}; write this step with other operators, and tell "
                "us about the model"
            ) from error
    outputs = {}
    for name, ref in graph.outputs.items():
        value = values[ref.name]
        if not isinstance(value, OnnxValue):
            raise GraphCompileError(f"output {name!r} is not a single tensor")
        builder.nodes.append(helper.make_node("Identity", [builder.full(value)], [name]))
        outputs[name] = Spec(value.shape, value.dtype)
    return Translated(_model(builder, graph, outputs), builder.placeholders)


def _where(step: Operation) -> str:
    return f"module {step.module!r}" if step.module else "the model's own forward() or the loss"


def _filled(step: Operation, values: dict[str, Any]) -> Operation:
    """Return the step with values in place of references."""

    def filled(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.name]
        if isinstance(value, (list, tuple)):
            return type(value)(filled(part) for part in value)
        return value

    return replace(step, arguments={key: filled(v) for key, v in step.arguments.items()})


def _model(builder: Builder, graph: Symbolic, outputs: dict[str, Spec]) -> onnx.ModelProto:
    needed = set(outputs)
    nodes = []
    for node in reversed(builder.nodes):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(node.input) | _seen_inside(node)
    inputs = {n: s for n, s in graph.inputs.items() if n in needed and n not in graph.constants}
    proto = helper.make_graph(
        nodes[::-1],
        "tessera",
        [_value_info(name, spec) for name, spec in inputs.items()],
        [_value_info(name, spec) for name, spec in outputs.items()],
        [tensor for name, tensor in builder.initializers.items() if name in needed],
    )
    model = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    onnx.checker.check_model(model)
    return model


def _seen_inside(node: onnx.NodeProto) -> set[str]:
    """Return what a loop's body takes from around it."""
    bodies = [each.g for each in node.attribute if each.type == onnx.AttributeProto.GRAPH]
    made = {name for body in bodies for inner in body.node for name in inner.output}
    made |= {value.name for body in bodies for value in body.input}
    used = {name for body in bodies for inner in body.node for name in inner.input}
    return used - made


def _value_info(name: str, spec: Spec) -> onnx.ValueInfoProto:
    # Symbolic sizes stay unnamed: names would only be compared with each other.
    shape = [size if isinstance(size, int) else None for size in spec.shape]
    return helper.make_tensor_value_info(name, onnx_type(spec.dtype), shape)
