"""Recurrent layers: ONNX's own for evaluation, loops for training.

ONNX's LSTM, GRU and RNN keep no gates, so training is a Scan over the steps, and one in reverse for
the gradients. Weights are seen from inside the loop; nothing grows with the length. ONNX's layers
state their width as a number, which the device writes into the file (`GraphEntry.slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import helper

from coordinator.task.graphs.onnx.builder import Builder, OnnxValue, onnx_type
from coordinator.task.graphs.onnx.operators.registry import handles, result, spec_of
from coordinator.task.graphs.symbols import Operation


class _Loop:
    """The body of a Scan: one step."""

    def __init__(self, builder: Builder, dtype: torch.dtype) -> None:
        self._builder = builder
        self._dtype = dtype
        self._stem = f"step{len(builder.nodes)}_"
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[str] = []
        self.one = builder.scalar(1, dtype)

    def given(self, name: str) -> str:
        """Add an input."""
        self._inputs.append(self._stem + name)
        return self._inputs[-1]

    def emit(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator of one result."""
        return self.emit_many(1, operator, *inputs, **attributes)[0]

    def emit_many(self, count: int, operator: str, *inputs: str, **attributes: Any) -> list[str]:
        """Add an operator of several results."""
        names = [f"{self._stem}{len(self._nodes)}_{index}" for index in range(count)]
        self._nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names

    def parts(self, name: str, count: int) -> list[str]:
        """Split a value into equal parts, one per gate."""
        if count == 1:
            return [name]
        return self.emit_many(count, "Split", name, axis=1, num_outputs=count)

    def slope(self, gate: str) -> str:
        """Derivative of a sigmoid whose value this is."""
        return self.emit("Mul", gate, self.emit("Sub", self.one, gate))

    def tanh_slope(self, value: str) -> str:
        """Derivative of a tanh whose value this is."""
        return self.emit("Sub", self.one, self.emit("Mul", value, value))

    def run(
        self, first: Sequence[str], steps: Sequence[str], results: Sequence[str], *, back: bool
    ) -> tuple[str, ...]:
        """Add the loop, from states and inputs of steps; `results` are new states, then values."""
        kind = onnx_type(self._dtype)
        # A Scan's results must be made in it, each under a name of its own.
        outs = [self.emit("Identity", name) for name in results]
        body = helper.make_graph(
            self._nodes,
            self._stem,
            [helper.make_tensor_value_info(name, kind, [None, None]) for name in self._inputs],
            [helper.make_tensor_value_info(name, kind, [None, None]) for name in outs],
        )
        turned = {
            "scan_input_directions": [1] * len(steps),
            "scan_output_directions": [1] * (len(outs) - len(first)),
        }
        return self._builder.emit_many(
            len(outs),
            "Scan",
            *first,
            *steps,
            body=body,
            num_scan_inputs=len(steps),
            **(turned if back else {}),
        )


_LAYERS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "lstm": ("LSTM", (0, 3, 1, 2), {}),
    "gru": ("GRU", (1, 0, 2), {"linear_before_reset": 1}),
    "tanh": ("RNN", (0,), {"activations": ["Tanh"]}),
    "relu": ("RNN", (0,), {"activations": ["Relu"]}),
}
"""ONNX's operator of each kind, the places of its gates among torch's, and more attributes."""


@handles("recurrent_layer")
def _recurrent_layer(builder: Builder, step: Operation) -> list[OnnxValue]:
    a = step.arguments
    operator, order, more = _LAYERS[a["kind"]]

    def reordered(value: OnnxValue) -> str:
        name = builder.full(value)
        if len(order) == 1:
            return name
        gates = builder.emit_many(len(order), "Split", name, axis=0, num_outputs=len(order))
        return builder.emit("Concat", *(gates[place] for place in order), axis=0)

    first = builder.ints([0])
    weights = [builder.emit("Unsqueeze", reordered(a[key]), first) for key in ("inputs", "weight")]
    bias = ""
    if a["bias"] is not None:
        both = builder.emit("Concat", reordered(a["own"]), reordered(a["bias"]), axis=0)
        bias = builder.emit("Unsqueeze", both, first)
    states = [builder.full(state) for state in a["states"]]
    steps, *ends = builder.emit_many(
        1 + len(states),
        operator,
        builder.full(a["x"]),
        *weights,
        bias,
        "",  # all sequences have the same length
        *states,
        hidden_size=a["weight"].shape[1],
        **more,
    )
    names = [builder.emit("Squeeze", steps, builder.ints([1])), *ends]  # of one direction
    return [result(step, name, index) for index, name in enumerate(names)]


@handles("recurrence")
def _recurrence(builder: Builder, step: Operation) -> list[OnnxValue]:
    a = step.arguments
    kind, dtype = a["kind"], spec_of(step).dtype
    weight = builder.emit("Transpose", builder.full(a["weight"]), perm=[1, 0])
    loop = _Loop(builder, dtype)
    states = [loop.given(f"state{index}") for index in range(len(a["states"]))]
    gates, hidden = loop.given("gates"), loop.emit("MatMul", states[0], weight)
    if a["bias"] is not None:
        hidden = loop.emit("Add", hidden, builder.full(a["bias"]))
    new, kept = _STEPS[kind](loop, gates, hidden, states)
    results = [*new, *new, *(kept if a["keep"] else [])]
    first = [builder.full(state) for state in a["states"]]
    names = loop.run(first, [builder.full(a["gates"])], results, back=False)
    return [result(step, name, index) for index, name in enumerate(names[len(states) :])]


def _lstm(
    loop: _Loop, gates: str, hidden: str, states: Sequence[str]
) -> tuple[list[str], list[str]]:
    parts = loop.parts(loop.emit("Add", gates, hidden), 4)
    i, f, o = (loop.emit("Sigmoid", parts[gate]) for gate in (0, 1, 3))
    g = loop.emit("Tanh", parts[2])
    cell = loop.emit("Add", loop.emit("Mul", f, states[1]), loop.emit("Mul", i, g))
    out = loop.emit("Mul", o, loop.emit("Tanh", cell))
    return [out, cell], [loop.emit("Concat", i, f, g, o, axis=1)]


def _gru(
    loop: _Loop, gates: str, hidden: str, states: Sequence[str]
) -> tuple[list[str], list[str]]:
    from_x, from_h = loop.parts(gates, 3), loop.parts(hidden, 3)
    r, z = (loop.emit("Sigmoid", loop.emit("Add", from_x[k], from_h[k])) for k in (0, 1))
    n = loop.emit("Tanh", loop.emit("Add", from_x[2], loop.emit("Mul", r, from_h[2])))
    # (1 − z)·n + z·h
    out = loop.emit("Add", n, loop.emit("Mul", z, loop.emit("Sub", states[0], n)))
    return [out], [loop.emit("Concat", r, z, n, from_h[2], axis=1)]


def _tanh(
    loop: _Loop, gates: str, hidden: str, _states: Sequence[str]
) -> tuple[list[str], list[str]]:
    return [loop.emit("Tanh", loop.emit("Add", gates, hidden))], []


def _relu(
    loop: _Loop, gates: str, hidden: str, _states: Sequence[str]
) -> tuple[list[str], list[str]]:
    return [loop.emit("Relu", loop.emit("Add", gates, hidden))], []


_STEPS = {"lstm": _lstm, "gru": _gru, "tanh": _tanh, "relu": _relu}


@handles("recurrence_backward")
def _recurrence_backward(builder: Builder, step: Operation) -> list[OnnxValue]:
    a = step.arguments
    kind, dtype = a["kind"], spec_of(step).dtype
    weight = builder.full(a["weight"])
    loop = _Loop(builder, dtype)
    count = len(step.results) - 2
    states = [loop.given(f"state{index}") for index in range(count)]
    given = [value for value in (a["grad"], a["before"], *a["kept"]) if value is not None]
    if a["grad_cell"] is not None:
        given.append(a["grad_cell"])
    names = [loop.given(f"given{index}") for index in range(len(given))]
    grad = loop.emit("Add", states[0], names[0])
    of_gates, of_hidden, more = _BACK[kind](loop, grad, names[1:], states)
    before = loop.emit("MatMul", of_hidden, weight)
    before = loop.emit("Add", before, more[0]) if kind == "gru" else before
    new = [before, *more] if kind == "lstm" else [before]
    results = [*new, of_gates] if of_gates == of_hidden else [*new, of_gates, of_hidden]
    zeros = [
        builder.full(OnnxValue(builder.scalar(0, dtype), spec.shape, dtype, ()))
        for spec in (spec_of(step, 2 + index) for index in range(count))
    ]
    found = loop.run(zeros, [builder.full(value) for value in given], results, back=True)
    ends, gates = found[:count], found[count:]
    ordered = (gates[0], gates[-1], *ends)
    return [result(step, name, index) for index, name in enumerate(ordered)]


def _lstm_back(
    loop: _Loop, grad: str, given: Sequence[str], states: Sequence[str]
) -> tuple[str, str, list[str]]:
    before, cell, gates, *of_cell = given
    i, f, g, o = loop.parts(gates, 4)
    tanh = loop.emit("Tanh", cell)
    through = loop.emit("Mul", loop.emit("Mul", grad, o), loop.tanh_slope(tanh))
    whole = loop.emit("Add", states[1], through)
    if of_cell:
        whole = loop.emit("Add", whole, of_cell[0])
    slopes = [loop.slope(i), loop.slope(f), loop.tanh_slope(g), loop.slope(o)]
    parts = [
        loop.emit("Mul", loop.emit("Mul", one, other), slope)
        for one, other, slope in zip(
            (whole, whole, whole, grad), (g, before, i, tanh), slopes, strict=True
        )
    ]
    of_gates = loop.emit("Concat", *parts, axis=1)
    return of_gates, of_gates, [loop.emit("Mul", whole, f)]


def _gru_back(
    loop: _Loop, grad: str, given: Sequence[str], _states: Sequence[str]
) -> tuple[str, str, list[str]]:
    before, gates = given
    r, z, n, hidden = loop.parts(gates, 4)
    of_z = loop.emit("Mul", loop.emit("Mul", grad, loop.emit("Sub", before, n)), loop.slope(z))
    kept = loop.emit("Mul", grad, loop.emit("Sub", loop.one, z))
    of_n = loop.emit("Mul", kept, loop.tanh_slope(n))
    of_r = loop.emit("Mul", loop.emit("Mul", of_n, hidden), loop.slope(r))
    of_gates = loop.emit("Concat", of_r, of_z, of_n, axis=1)
    of_hidden = loop.emit("Concat", of_r, of_z, loop.emit("Mul", of_n, r), axis=1)
    return of_gates, of_hidden, [loop.emit("Mul", grad, z)]


def _tanh_back(
    loop: _Loop, grad: str, given: Sequence[str], _states: Sequence[str]
) -> tuple[str, str, list[str]]:
    found = loop.emit("Mul", grad, loop.tanh_slope(given[1]))
    return found, found, []


def _relu_back(
    loop: _Loop, grad: str, given: Sequence[str], _states: Sequence[str]
) -> tuple[str, str, list[str]]:
    found = loop.emit("Mul", grad, loop.emit("Sign", given[1]))
    return found, found, []


_BACK = {"lstm": _lstm_back, "gru": _gru_back, "tanh": _tanh_back, "relu": _relu_back}
