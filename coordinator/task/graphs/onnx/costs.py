"""Costs of one run of a graph, as terms that depend on widths and batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod

from coordinator.task.graphs.symbols import Operation, Size, Spec, Symbolic, as_term
from edge_sdk.protocol.task.graphs import CostTerm, sum_of

_SCATTERS = re.compile(r".*embedding.*_backward|max_pool.*_backward")

_Kind = tuple[tuple[int, ...], int]
"""Quantities a cost depends on: axes, and the power of the batch."""


def activations(graph: Symbolic) -> tuple[CostTerm, ...]:
    """Bytes of every float result of a step that is not an output.

    Where a step scatters into zeros, ONNX holds those zeros as a separate tensor.
    """
    given = {ref.name for ref in graph.outputs.values()}
    total: Counter[_Kind] = Counter()
    for step in graph.steps:
        if step.target == "getitem":
            continue  # an element of another step's result
        times = (step.name not in given) + bool(_SCATTERS.fullmatch(step.target))
        for spec in step.results:
            if spec is not None and spec.dtype.is_floating_point:
                _add(total, times * spec.dtype.itemsize, spec.shape)
    return _terms(total)


def products(graph: Symbolic) -> tuple[CostTerm, ...]:
    """Multiply-accumulates of every matrix product and convolution, and of their gradients."""
    specs = dict(graph.inputs)
    total: Counter[_Kind] = Counter()
    for step in graph.steps:
        if step.results[0] is not None:
            specs[step.name] = step.results[0]
        times, sizes = _product(step, specs)
        _add(total, times, sizes)
    return _terms(total)


def _product(step: Operation, specs: dict[str, Spec]) -> tuple[int, Sequence[Size]]:
    """Multiply-accumulates of a step: a number, and sizes to multiply it by."""

    def shape(argument: str) -> Sequence[Size]:
        return specs[step.arguments[argument].name].shape

    match step.target:
        case "mm" | "bmm":
            return 1, [*shape("self"), shape("mat2")[-1]]
        case "matmul":
            return 1, [*specs[step.name].shape, shape("self")[-1]]
        case "addmm":
            return 1, [*shape("mat1"), shape("mat2")[-1]]
        case "recurrent_layer":
            own, other = shape("inputs"), shape("weight")
            return 1, [*shape("x")[:2], own[0], sum_of([as_term(own[1]), as_term(other[1])])]
        case "recurrence":
            return 1, [*shape("gates")[:2], *shape("weight")]
        case "recurrence_backward":  # the weight's own gradient is a product beside it
            return 1, [*shape("grad")[:2], *shape("weight")]
        case "convolution":
            return 1, [*specs[step.name].shape, *shape("weight")[1:]]
        case "convolution_transposed":
            return 1, [*shape("input"), *shape("weight")[1:]]
        # The gradients of input and weight each pair up the same elements as the forward pass.
        case "convolution_backward":
            times = sum(step.arguments["output_mask"][:2])
            return times, [*shape("grad_output"), *shape("weight")[1:]]
        case "convolution_transposed_backward":
            times = sum(step.arguments["output_mask"][:2])
            return times, [*shape("input"), *shape("weight")[1:]]
    return 0, ()


def _add(total: Counter[_Kind], times: int, sizes: Iterable[Size]) -> None:
    if not times:
        return
    for terms in product(*(as_term(size).summands for size in sizes)):
        axes = tuple(sorted(axis for term in terms for axis in term.axes))
        power = sum(term.batch for term in terms)
        total[axes, power] += times * prod(term.coefficient for term in terms)


def _terms(total: Counter[_Kind]) -> tuple[CostTerm, ...]:
    return tuple(CostTerm(total[kind], *kind) for kind in sorted(total) if total[kind])
