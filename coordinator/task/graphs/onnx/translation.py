"""Translate a symbolic graph to an ONNX file of standard operators, step by step.

Where a value can be computed in several ways, the file holds all of them, each as a field of its
own: a protobuf message may come in pieces, whose lists are joined when it is read. A way that is
not taken is cut out of the bytes. Ways besides the default may use `CONTRIBUTED` operators; such a
piece imports them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import onnx
from onnx import helper

from coordinator.task.graphs.errors import GraphCompileError, NotSymbolicError
from coordinator.task.graphs.onnx.builder import (
    LATER,
    PLACEHOLDER,
    Builder,
    MadePlace,
    OnnxValue,
    onnx_type,
)
from coordinator.task.graphs.onnx.operators import HANDLERS
from coordinator.task.graphs.symbols import Operation, Ref, Spec, Symbolic, as_term
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.codec import slot_bytes
from edge_sdk.protocol.task.graphs import (
    CONTRIBUTED,
    PLACE,
    SLOT_BYTES,
    GraphPlace,
    GraphWay,
    SizeSlot,
    SizeTerm,
)

OPSET = 18
IR_VERSION = 9


@dataclass(frozen=True, slots=True)
class Translated:
    """An ONNX file: its bytes, and what a manifest says of them (`GraphEntry`)."""

    data: bytes
    inputs: frozenset[str]
    """Names of the inputs."""
    slots: tuple[SizeSlot, ...]
    places: tuple[GraphPlace, ...]
    placeholders: Mapping[SizeTerm, int]
    """Numbers in place of sizes that are written into the file later."""

    def with_model(self, model: onnx.ModelProto) -> Translated:
        """Return the file of another model, with placeholders of this one and without places."""
        data = model.SerializeToString(deterministic=True)
        inputs = frozenset(value.name for value in model.graph.input)
        slots = _slots(data, self.placeholders, model.graph.node)
        return Translated(data, inputs, slots, (), self.placeholders)


def translate(
    graph: Symbolic, plan: ModelPlan, batch_source: str, ways_batch: int = 0
) -> Translated:
    """Return the ONNX file; raises `GraphCompileError` for an operator without translation.

    `ways_batch`: values that can be computed in several ways keep all that work with such a batch;
    0: only their default.
    """
    builder = Builder(plan, batch_source, ways_batch)
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
    return _file(builder, graph, outputs)


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


def _file(builder: Builder, graph: Symbolic, outputs: dict[str, Spec]) -> Translated:
    nodes, choices, needed = _needed(builder, outputs)
    inputs = {n: s for n, s in graph.inputs.items() if n in needed and n not in graph.constants}
    edges = [0, *(choice.at for choice in choices), len(nodes)]
    parts = [[node for node in nodes[start:end] if node] for start, end in pairwise(edges)]
    proto = helper.make_graph(
        parts[0],
        "tessera",
        [_value_info(name, spec) for name, spec in inputs.items()],
        [_value_info(name, spec) for name, spec in outputs.items()],
        [tensor for name, tensor in builder.initializers.items() if name in needed],
    )
    head = helper.make_model(
        proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
    )
    data = head.SerializeToString(deterministic=True)
    places = []
    for number, (choice, part) in enumerate(zip(choices, parts[1:], strict=True)):
        options = []
        for way, made in choice.ways:
            start = len(data)
            data += _piece(made, f"{PLACE}{number}")
            multiples = tuple((as_term(size), least) for size, least in way.multiples)
            options.append(GraphWay(way.name, start, len(data), multiples))
        places.append(GraphPlace(choice.name, tuple(options)))
        data += _piece(part)
    every = [node for part in parts for node in part]
    every += [node for choice in choices for _, made in choice.ways for node in made]
    slots = _slots(data, builder.placeholders, every)
    _check(data, places)
    return Translated(data, frozenset(inputs), slots, tuple(places), builder.placeholders)


def _needed(
    builder: Builder, outputs: Iterable[str]
) -> tuple[list[onnx.NodeProto | None], list[MadePlace], set[str]]:
    """Return nodes and choices that the outputs need, and the names of all values that they use.

    A node that is not needed is None: its number stays.
    """
    needed = set(outputs)
    nodes: list[onnx.NodeProto | None] = [None] * len(builder.nodes)
    choices: list[MadePlace] = []
    ahead = list(builder.choices)
    for at in range(len(nodes), -1, -1):
        while ahead and ahead[-1].at == at:
            choice = ahead.pop()
            if choice.output in needed:
                choices.append(choice)
                for _, made in choice.ways:
                    needed |= {name for node in made for name in node.input}
        if at and needed & set(builder.nodes[at - 1].output):
            node = nodes[at - 1] = builder.nodes[at - 1]
            needed |= set(node.input) | seen_inside(node)
    return nodes, choices[::-1], needed


def _piece(nodes: Sequence[onnx.NodeProto], name: str = "") -> bytes:
    """Return nodes as a piece of a file, named so that a profile shows where they belong."""
    piece = onnx.ModelProto()
    for number, node in enumerate(nodes):
        piece.graph.node.append(node)
        piece.graph.node[-1].name = f"{name}.{number}" if name else ""
    for domain in sorted({node.domain for node in nodes} - {""}):
        piece.opset_import.append(helper.make_opsetid(domain, CONTRIBUTED[domain]))
    return piece.SerializeToString(deterministic=True) if nodes else b""


def _slots(
    data: bytes, placeholders: Mapping[SizeTerm, int], nodes: Sequence[onnx.NodeProto]
) -> tuple[SizeSlot, ...]:
    found = []
    for size, placeholder in placeholders.items():
        # As protobuf writes an attribute: its name is field 1, its integer field 3.
        for name in LATER:
            written = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x18"
            written = re.escape(written + slot_bytes(placeholder))
            ends = [match.end() for match in re.finditer(written, data)]
            found += [SizeSlot(end - SLOT_BYTES, size) for end in ends]
    numbers = [each.i for node in nodes for each in node.attribute if each.name in LATER]
    if len(found) != len([number for number in numbers if number >= PLACEHOLDER]):
        raise GraphCompileError("the width of a layer is not where it should be")
    return tuple(sorted(found, key=lambda slot: slot.offset))


def _check(data: bytes, places: Sequence[GraphPlace]) -> None:
    """Check the model with its defaults: the checker does not know contributed operators."""
    whole = bytearray(data)
    for place in reversed(places):
        del whole[place.options[1].start : place.options[-1].end]
    onnx.checker.check_model(onnx.load_from_string(bytes(whole)))


def seen_inside(node: onnx.NodeProto) -> set[str]:
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
