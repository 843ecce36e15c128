"""Break stacked recurrent layers into single ones, before a graph is walked.

torch has one operator for all layers and directions of an `nn.LSTM`, `nn.GRU` or `nn.RNN`. Here
each layer and direction gets its own, with the dropout between layers and the concatenation of
directions as ordinary operators. So every layer has its own width, and dropout its own mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from coordinator.task.tracing.walk import arguments

aten = torch.ops.aten

_library: Any = torch.library.Library("tessera_trace", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "layers(Tensor input, Tensor[] hx, Tensor[] params, bool has_biases, int num_layers, "
    "float dropout, bool train, bool bidirectional, bool batch_first, str kind) -> Tensor[]"
)

LAYERS = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "tanh",
    aten.rnn_relu.input: "relu",
}
"""Operators of recurrent layers over sequences of one length, and their kinds."""


def _shapes(x: torch.Tensor, hx: Sequence[torch.Tensor], *more: Any) -> list[torch.Tensor]:
    directions = 2 if more[5] else 1
    steps = x.new_empty(*x.shape[:-1], hx[0].shape[-1] * directions)
    return [steps, *(state.new_empty(state.shape) for state in hx)]


torch.library.register_fake("tessera_trace::layers", _shapes, lib=_library)


class WholeLayers(TorchFunctionMode):
    """Makes torch.export see recurrent layers as one operator.

    By itself it would go through every step only to learn the shapes, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace layers of sequences of one length (`split_layers` takes it back), and cells."""
        if func in _CELLS:
            return _CELLS[func](*args, **(kwargs or {}))
        kind = _FUNCTIONS.get(func)
        if kind is None or kwargs or len(args) != 9 or isinstance(args[3], (list, tuple)):
            return func(*args, **(kwargs or {}))
        x, hx, *more = args
        states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
        return tuple(torch.ops.tessera_trace.layers(x, states, *more, kind))


def _lstm_cell(
    x: torch.Tensor, hx: Sequence[torch.Tensor], *params: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    h, c = hx
    own, other = _gates(x, h, *params)
    i, f, g, o = (own + other).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(x: torch.Tensor, h: torch.Tensor, *params: Any) -> torch.Tensor:
    own, other = (gates.chunk(3, 1) for gates in _gates(x, h, *params))
    reset, update = ((one + two).sigmoid() for one, two in zip(own[:2], other[:2], strict=True))
    new = (own[2] + reset * other[2]).tanh()
    return new + update * (h - new)


def _tanh_cell(x: torch.Tensor, h: torch.Tensor, *params: Any) -> torch.Tensor:
    own, other = _gates(x, h, *params)
    return (own + other).tanh()


def _relu_cell(x: torch.Tensor, h: torch.Tensor, *params: Any) -> torch.Tensor:
    own, other = _gates(x, h, *params)
    return (own + other).relu()


def _gates(
    x: torch.Tensor,
    h: torch.Tensor,
    weight: torch.Tensor,
    own: torch.Tensor,
    bias: torch.Tensor | None = None,
    own_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the input and the hidden state give to each gate."""
    return F.linear(x, weight, bias), F.linear(h, own, own_bias)


_CELLS: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _tanh_cell,
    torch.rnn_relu_cell: _relu_cell,
}
"""Cells in plain operators, which can be narrowed and differentiated one by one."""

_FUNCTIONS = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "tanh",
    torch.rnn_relu: "relu",
}


def split_layers(graph: fx.Graph) -> None:
    """Replace every stacked or bidirectional recurrent operator by operators of one layer each."""
    for node in list(graph.nodes):
        if node.target is torch.ops.tessera_trace.layers.default:
            x, states, *more, kind = node.args
            node.target = next(target for target in LAYERS if LAYERS[target] == kind)
            node.args = (x, states if kind == "lstm" else states[0], *more)
        if node.op == "call_function" and node.target in LAYERS:
            given = arguments(node)
            stacked = given["num_layers"] > 1 or given["bidirectional"]
            if stacked and given["input"].meta["val"].ndim == 3:
                with graph.inserting_before(node):
                    _split(_Writer(graph, node), node, given)


class _Writer:
    """Adds nodes that belong to one module, with the shapes of their results."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph = graph
        self._meta = {key: value for key, value in node.meta.items() if key != "val"}

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator."""

        def value(part: Any) -> Any:
            return part.meta["val"] if isinstance(part, fx.Node) else part

        with torch.no_grad():
            result = target(*fx.node.map_aggregate(args, value), **kwargs)
        return self.add(result, target, *args, **kwargs)

    def add(self, result: Any, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operator whose result is known."""
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {**self._meta, "val": result}
        return node


def _split(writer: _Writer, node: fx.Node, given: dict[str, Any]) -> None:
    directions = 2 if given["bidirectional"] else 1
    states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    numbers = range(given["num_layers"] * directions)
    share = len(given["params"]) // len(numbers)
    time = 1 if given["batch_first"] else 0
    steps, finals = given["input"], []
    for layer in range(given["num_layers"]):
        outs = []
        for turned in range(directions):
            number = layer * directions + turned
            x = writer.call(aten.flip.default, steps, [time]) if turned else steps
            own = [_part(writer, state, number) for state in states]
            weights = given["params"][number * share : (number + 1) * share]
            out, *last = _layer(writer, node, given, x, own, weights)
            outs.append(writer.call(aten.flip.default, out, [time]) if turned else out)
            finals.append(last)
        steps = writer.call(aten.cat.default, outs, 2) if directions == 2 else outs[0]
        if given["dropout"] and given["train"] and layer + 1 < given["num_layers"]:
            steps = writer.call(aten.dropout.default, steps, given["dropout"], True)
    for user in list(node.users):
        index: Any = user.args[1]
        if index == 0:
            user.replace_all_uses_with(steps)
        else:
            _replace_finals(writer, user, [each[index - 1] for each in finals])
        user.graph.erase_node(user)
    node.graph.erase_node(node)


def _layer(
    writer: _Writer,
    node: fx.Node,
    given: dict[str, Any],
    x: fx.Node,
    states: Sequence[fx.Node],
    weights: Sequence[fx.Node],
) -> list[fx.Node]:
    """Add one layer in one direction; return its steps and its final states."""
    value, hidden = x.meta["val"], [state.meta["val"] for state in states]
    results = (value.new_empty(*value.shape[:2], hidden[0].shape[2]), *hidden)
    hx = list(states) if isinstance(given["hx"], (list, tuple)) else states[0]
    # one layer, no dropout, one direction
    more = (given["has_biases"], 1, 0.0, given["train"], False, given["batch_first"])
    layer = writer.add(results, node.target, x, hx, list(weights), *more)  # type: ignore[arg-type]
    return [writer.add(result, operator.getitem, layer, i) for i, result in enumerate(results)]


def _part(writer: _Writer, state: fx.Node, number: int) -> fx.Node:
    """Return the initial state of one layer: zeros of its own, or a slice of what was given."""
    if state.target is aten.zeros.default:
        result = state.meta["val"][:1]
        sizes: Any = state.args[0]
        size = [1, *sizes[1:]]
        return writer.add(result, aten.zeros.default, size, **state.kwargs)
    return writer.call(aten.slice.Tensor, state, 0, number, number + 1)


def _replace_finals(writer: _Writer, used: fx.Node, finals: Sequence[fx.Node]) -> None:
    """Give users of the stacked final states those of one layer where they select it."""
    for user in list(used.users):
        if user.target is aten.select.int and user.args[1] == 0:
            own = finals[user.args[2]]  # type: ignore[index]
            user.replace_all_uses_with(writer.call(aten.select.int, own, 0, 0))
            user.graph.erase_node(user)
    if used.users:
        used.replace_all_uses_with(writer.call(aten.cat.default, list(finals), 0))
