"""A graph that multiplies in float16, made of one that computes in float32.

Matrix products and convolutions compute in float16. What lies between them does too where it only
moves, masks, adds or scales numbers that come from there (`FOLLOWING`). Everything else stays in
float32: losses, softmax, norms, exponentials, sums along dimensions, loops, the division by the
loss's scale, and all inputs and outputs.

A value has its name in float32 and, with `SUFFIX`, in float16; each is made when a node asks for
it. Weights, scales, masks and constants meet float16 in float16; any other number of float32 keeps
the result in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from coordinator.task.graphs.onnx.translation import Translated, seen_inside

LOSS_SCALE = 1024.0
"""Factor of the loss whose gradients a float16 graph computes: they would else be lost below
float16's smallest number, 6e-8. A power of two, so that it changes no bit of float32."""

SUFFIX = "~16"

MULTIPLYING = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})

COMPARING = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")

_FIRST, _ALL = (0,), None
FOLLOWING: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand"), _FIRST),
    **dict.fromkeys(("Slice", "Gather", "GatherElements", "Tile", "Relu", "Neg"), _FIRST),
    **dict.fromkeys(("Concat", "Mul", "Add", "Sub", "Max"), _ALL),
    **dict.fromkeys(COMPARING, _ALL),
    "MaxPool": _FIRST,
    "Pad": (0, 2),
    "Where": (1, 2),
}
"""Operators that compute in float16 if their numbers do, and which of their inputs are numbers;
None: all."""

_MOVING = ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Slice")


def in_half(translated: Translated) -> Translated:
    """Return the same graph with its products in float16. Its gradients are those of `LOSS_SCALE`
    times the loss, divided by that at the end.
    """
    given = onnx.load_from_string(translated.data)
    return translated.with_model(_Pass(given).model())


class _Pass:
    """One pass over the nodes of a graph, in order."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self._given = model
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._types = _types(model)
        self._nodes: list[onnx.NodeProto] = []
        self._whole = {value.name for value in graph.input} | set(self._constants)
        """Values that are there in float32, or are not of that type."""
        self._half: set[str] = set()
        """Values that are there in float16."""
        self._made_half: set[str] = set()
        """Those of them that were computed in it."""
        self._mild = {value.name for value in graph.input if value.name[:2] in ("w:", "s:")}
        self._mild |= {value.name for value in graph.input if value.name.startswith("m")}
        self._mild |= {name for name, tensor in self._constants.items() if _fits(tensor)}
        """Numbers that may meet float16 in float16."""
        self._last = _last(graph)

    def model(self) -> onnx.ModelProto:
        """Return the new model."""
        for node in self._given.graph.node:
            self._add(node)
        graph, old = onnx.GraphProto(), self._given.graph
        used = {name for node in self._nodes for name in (*node.input, *seen_inside(node))}
        graph.CopyFrom(old)
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(self._nodes)
        graph.initializer.extend(each for name, each in self._constants.items() if name in used)
        made = helper.make_model(
            graph, opset_imports=self._given.opset_import, ir_version=self._given.ir_version
        )
        onnx.checker.check_model(made)
        return made

    def _add(self, node: onnx.NodeProto) -> None:
        numbers = self._numbers(node)
        self._note_type(node, numbers)
        if node.op_type in FOLLOWING and self._all_mild(node, numbers):
            self._mild |= set(node.output)
        if not self._goes_half(node, numbers):
            for name in (*node.input, *seen_inside(node)):
                self._want_whole(name)
            self._nodes.append(node)
            self._whole |= set(node.output)
            return
        new = onnx.NodeProto()
        new.CopyFrom(node)
        for place in numbers:
            new.input[place] = self._want_half(node.input[place])
        for place, name in enumerate(node.output):
            if self._is_float(name):
                new.output[place] = name + SUFFIX
                self._half.add(name)
                self._made_half.add(name)
            else:
                self._whole.add(name)
        self._nodes.append(new)

    def _note_type(self, node: onnx.NodeProto, numbers: Sequence[int]) -> None:
        """Note the type of a result, which is its numbers', if nothing told it: sizes that are
        written into the file later stop the inference of types.
        """
        same = node.op_type in MULTIPLYING or node.op_type in FOLLOWING
        if same and node.op_type not in COMPARING and node.output[0] not in self._types:
            known = [self._types[name] for n in numbers if (name := node.input[n]) in self._types]
            self._types |= dict.fromkeys(node.output[:1], known[0]) if known else {}

    def _numbers(self, node: onnx.NodeProto) -> list[int]:
        """Return the places of the inputs that are numbers of an operator that may be halved."""
        places: Iterable[int] | None = FOLLOWING.get(node.op_type, range(len(node.input)))
        places = range(len(node.input)) if places is None else places
        return [place for place in places if place < len(node.input) and node.input[place]]

    def _all_mild(self, node: onnx.NodeProto, numbers: Sequence[int]) -> bool:
        return all(node.input[place] in self._mild for place in numbers)

    def _goes_half(self, node: onnx.NodeProto, numbers: Sequence[int]) -> bool:
        names = [node.input[place] for place in numbers]
        known = all(name in self._types for name in node.output)
        if not known or not all(map(self._is_float, names)):
            return False
        if node.op_type in MULTIPLYING:
            return all(name not in self._constants or name in self._mild for name in names)
        if node.op_type not in FOLLOWING or self._last & set(node.output):
            return False
        halved = [name in self._made_half for name in names]
        return any(halved) and all(
            half or name in self._mild for half, name in zip(halved, names, strict=True)
        )

    def _is_float(self, name: str) -> bool:
        return self._types.get(name) == TensorProto.FLOAT

    def _want_whole(self, name: str) -> None:
        if name in self._half and name not in self._whole:
            self._nodes.append(
                helper.make_node("Cast", [name + SUFFIX], [name], to=TensorProto.FLOAT)
            )
            self._whole.add(name)

    def _want_half(self, name: str) -> str:
        if name not in self._half:
            self._half.add(name)
            if name in self._constants:
                array = numpy_helper.to_array(self._constants[name]).astype(np.float16)
                self._constants[name + SUFFIX] = numpy_helper.from_array(array, name + SUFFIX)
            else:
                self._nodes.append(
                    helper.make_node("Cast", [name], [name + SUFFIX], to=TensorProto.FLOAT16)
                )
        return name + SUFFIX


def _types(model: onnx.ModelProto) -> dict[str, int]:
    """Return the type of every value whose type is known."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    found = {each.name: each.type.tensor_type.elem_type for each in values}
    return found | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _fits(tensor: onnx.TensorProto) -> bool:
    """True if float16 has these constants, rounded: none is too large for it or becomes 0."""
    if tensor.data_type != TensorProto.FLOAT:
        return False
    array = numpy_helper.to_array(tensor)
    with np.errstate(over="ignore", under="ignore"):
        half = array.astype(np.float16)
    return bool(np.all((np.isfinite(half) | ~np.isfinite(array)) & ((half != 0) | (array == 0))))


def _last(graph: onnx.GraphProto) -> set[str]:
    """Return the values from which outputs are made, back to the division by the loss's scale."""
    makers = {name: node for node in graph.node for name in node.output}
    found, ahead = set(), [value.name for value in graph.output]
    while ahead:
        name = ahead.pop()
        found.add(name)
        if (maker := makers.get(name)) is not None and maker.op_type in _MOVING:
            ahead.append(maker.input[0])
    return found
