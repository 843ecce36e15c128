"""Recurrent layers as two operators of our own: all steps forward, and all steps back.

torch would unroll a layer step by step, and the graph would grow with the sequence. Here the
products of all inputs with their weights are one product, and what remains, the steps themselves,
is the operator `recurrence`, which ONNX has as a loop (`onnx/operators/recurrence.py`). Its
gradient is `recurrence_backward`; the gradient of the weights is one product again.

A graph for evaluation keeps no gates: there the whole layer is one operator, `recurrent_layer`,
which ONNX has as well.

All operators exist only in graphs: they have shapes, but compute nothing. Gates are in torch's
order: i, f, g, o of an LSTM, r, z, n of a GRU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional as F

from coordinator.task.graphs.errors import GraphCompileError

_library: Any = torch.library.Library("tessera", "DEF")  # type: ignore[no-untyped-call]
_library.define(
    "recurrence(Tensor gates, Tensor[] states, Tensor weight, Tensor? bias, str kind, bool keep)"
    " -> Tensor[]"
)
_library.define(
    "recurrence_backward(Tensor grad, Tensor? grad_cell, Tensor before, Tensor[] kept,"
    " Tensor weight, str kind) -> Tensor[]"
)
_library.define(
    "recurrent_layer(Tensor x, Tensor inputs, Tensor? own, Tensor[] states, Tensor weight,"
    " Tensor? bias, str kind) -> Tensor[]"
)


def recurrent_layer(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    *,
    has_biases: bool,
    batch_first: bool,
    trains: bool,
) -> tuple[torch.Tensor, ...]:
    """Compute one layer in one direction: its steps, and its final states (1, batch, width).

    `trains`: a gradient may be taken.
    """
    if len(params) != (4 if has_biases else 2):
        raise GraphCompileError("an LSTM with proj_size has no translation")
    inputs, weight, *biases = params
    own, bias = biases or (None, None)
    x = x.transpose(0, 1) if batch_first else x
    if not trains and x.dtype == torch.float32:  # ONNX's layers have no other type
        found = torch.ops.tessera.recurrent_layer(x, inputs, own, states, weight, bias, kind)
        return (found[0].transpose(0, 1) if batch_first else found[0], *found[1:])
    gates = F.linear(x, inputs, own)
    first = [state.squeeze(0) for state in states]
    found = torch.ops.tessera.recurrence(gates, first, weight, bias, kind, False)
    steps = found[0].transpose(0, 1) if batch_first else found[0]
    return (steps, *(each[-1:] for each in found[: len(states)]))


def _layer_shapes(
    x: torch.Tensor,
    _inputs: torch.Tensor,
    _own: torch.Tensor | None,
    states: Sequence[torch.Tensor],
    weight: torch.Tensor,
    _bias: torch.Tensor | None,
    _kind: str,
) -> list[torch.Tensor]:
    """Give the steps, and the final states."""
    steps = x.new_empty(*x.shape[:2], weight.shape[1])
    return [steps, *(state.new_empty(state.shape) for state in states)]


def _forward_shapes(
    gates: torch.Tensor,
    states: Sequence[torch.Tensor],
    weight: torch.Tensor,
    _bias: torch.Tensor | None,
    kind: str,
    keep: bool,
) -> list[torch.Tensor]:
    """Each state after every step; if kept, also what the gradient needs.

    That is the gates of an LSTM, those of a GRU with the hidden part of n; nothing of an RNN.
    """
    sizes = [weight.shape[1]] * len(states)
    sizes += [4 * weight.shape[1]] if keep and kind in ("lstm", "gru") else []
    return [gates.new_empty(*gates.shape[:2], size) for size in sizes]


def _backward_shapes(
    grad: torch.Tensor,
    _grad_cell: torch.Tensor | None,
    _before: torch.Tensor,
    _kept: Sequence[torch.Tensor],
    weight: torch.Tensor,
    kind: str,
) -> list[torch.Tensor]:
    """Gradients of gates, of their hidden parts (the same but for a GRU), of the first states."""
    gates = [grad.new_empty(*grad.shape[:2], weight.shape[0]) for _ in range(2)]
    return gates + [grad.new_empty(grad.shape[1:]) for _ in range(2 if kind == "lstm" else 1)]


class _Recurrence(_SingleLevelFunction):
    """The gradient of `recurrence`."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        gates: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *states: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            found = torch.ops.tessera.recurrence(gates, states, weight, bias, kind, True)
        ctx.kind, ctx.states, ctx.biased = kind, len(states), bias is not None
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*found[len(states) :])
        ctx.save_for_backward(weight, *states, *found)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        weight, *rest = ctx.saved_tensors
        states, found = rest[: ctx.states], rest[ctx.states :]
        before = [
            torch.cat([state.unsqueeze(0), steps[:-1]])
            for state, steps in zip(states, found[: ctx.states], strict=True)
        ]
        grad = torch.zeros_like(found[0]) if grads[0] is None else grads[0]
        grad_cell = grads[1] if ctx.states > 1 else None
        kept = found[1:] if ctx.states > 1 or ctx.kind == "gru" else found
        of_gates, of_hidden, *of_states = torch.ops.tessera.recurrence_backward(
            grad, grad_cell, before[-1], kept, weight, ctx.kind
        )
        rows = of_hidden.reshape(-1, weight.shape[0])
        of_weight = rows.t() @ before[0].reshape(-1, weight.shape[1])
        of_bias = of_hidden.sum((0, 1)) if ctx.biased else None
        return (None, of_gates, of_weight, of_bias, *of_states)


def _differentiable(
    gates: torch.Tensor,
    states: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    keep: bool,
) -> list[torch.Tensor]:
    tensors = [gates, weight, *states, *([] if bias is None else [bias])]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        # torch.func asks more of a Function than one that is inside an operator can give.
        with enable_single_level_autograd_function():
            function: Any = _Recurrence
            return list(function.apply(kind, gates, weight, bias, *states))
    with torch._C._AutoDispatchBelowAutograd():
        found: list[torch.Tensor] = torch.ops.tessera.recurrence(
            gates, states, weight, bias, kind, keep
        )
        return found


torch.library.register_fake("tessera::recurrence", _forward_shapes, lib=_library)
torch.library.register_fake("tessera::recurrence_backward", _backward_shapes, lib=_library)
torch.library.register_fake("tessera::recurrent_layer", _layer_shapes, lib=_library)
_library.impl("recurrence", _differentiable, "Autograd")
