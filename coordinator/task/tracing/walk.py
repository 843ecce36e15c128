"""One walk over a traced graph, collecting facts about the dimensions each operator touches.

`walk_graph` visits the nodes in order and asks `operators.py` about each. The facts are in terms of
factors (`factors.py`), which keep changing until the last graph of a model has been walked; only
then do they become a plan (`trace.py`) and programs (`program.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from coordinator.errors import TraceError
from coordinator.task.tracing.factors import Factor, Factors, freeze, fresh, leaves, tie

Value = Any
"""Dimensions of a tensor (`list[Dim]`), a tuple of such for several outputs, or None."""

Handler = Callable[["Walk", fx.Node, dict[str, Any]], Value]

DRAWS = "draws random numbers; use nn.Dropout, whose mask is ours"
"""The refusal of randomness that cannot become a mask."""


@dataclass(frozen=True, slots=True)
class Patch:
    """An argument that holds sizes, recomputed for each submodel and batch size.

    A tuple of dimensions stands for a list of sizes, one dimension for a single size.
    """

    node: str
    argument: str
    sizes: Factors | tuple[Factors, ...]


@dataclass(frozen=True, slots=True)
class Contraction:
    """A sum over `dim` of an activation (argument `argument`) with a weight: where rescale acts.

    `behind` is the number of the activation's dimensions after this one.
    """

    node: str
    argument: str
    dim: Factors
    behind: int


@dataclass(frozen=True, slots=True)
class Dropout:
    """A dropout whose mask becomes an input, so that every backend can draw the same mask.

    `probability` is that of zeros; other elements of the mask are `1 / (1 - probability)`.
    """

    node: str
    probability: float
    mask: list[Factors]


@dataclass(frozen=True, slots=True)
class NarrowedNorm:
    """A norm over dimensions that a submodel narrows, with the statistics of what it keeps."""

    node: str
    dims: tuple[Factors, ...]


@dataclass
class Walk:
    """The facts gathered from one graph."""

    graph: fx.Graph
    values: dict[fx.Node, Value]
    weights: set[fx.Node]
    """Weights and buffers, and views of them: they are cut like the model itself."""
    narrow_norms: bool = False
    """True if a LayerNorm may be narrowed: `layer_norm="submodel"`."""
    patches: list[Patch] = field(default_factory=list)
    contractions: list[Contraction] = field(default_factory=list)
    dropouts: list[Dropout] = field(default_factory=list)
    norms: list[NarrowedNorm] = field(default_factory=list)
    products: list[tuple[fx.Node, int, Factors]] = field(default_factory=list)
    """Multiply-accumulates: a constant times these factors, per product, and the node it is of."""
    written: set[fx.Node] = field(default_factory=set)
    """Placeholders that the graph writes to."""
    directions: dict[fx.Node, int] = field(default_factory=dict)
    """Weights of which only the direction counts (weight_norm), and the dimension of their units:
    without any unit's weights there is no direction."""

    def dims(self, node: fx.Node) -> list[Factors]:
        """Return the dimensions of a node whose value is a tensor."""
        value: list[Factors] = self.values[node]
        return value

    def ban(self, node: fx.Node, dim: Iterable[Factor], why: str) -> None:
        """Freeze a dimension, and say where."""
        freeze(dim, describe(node, why))

    def tie(self, node: fx.Node, one: Factors, other: Factors) -> None:
        """Note that two dimensions are the same at this node."""
        tie(one, other, describe(node, "is regrouped in a way that cannot be followed"))

    def patch(self, node: fx.Node, argument: str, sizes: Factors | tuple[Factors, ...]) -> None:
        """Note that this argument states sizes (a tuple) or a size (one dimension)."""
        self.patches.append(Patch(node.name, argument, sizes))

    def count(self, node: fx.Node, dims: Sequence[Factors], constant: int = 1) -> None:
        """Count multiply-accumulates of a node: the product of all sizes."""
        self.products.append((node, constant, [factor for dim in dims for factor in dim]))

    def contract(
        self, node: fx.Node, left: tuple[str, fx.Node, Factors], right: tuple[str, fx.Node, Factors]
    ) -> None:
        """Note a sum over one dimension of two operands, each (argument name, node, dimension)."""
        self.tie(node, left[2], right[2])
        is_weight = [side[1] in self.weights for side in (left, right)]
        if sum(is_weight) == 1:
            argument, source, dim = right if is_weight[0] else left
            dims = self.dims(source)
            at = next((at for at, each in enumerate(dims) if each is dim), len(dims) - 1)
            self.contractions.append(Contraction(node.name, argument, dim, len(dims) - 1 - at))
        else:
            self.ban(node, left[2], "is summed over between two activations")


def walk_graph(
    graph: fx.Graph,
    values: Mapping[fx.Node, list[Factors]],
    weights: Iterable[fx.Node],
    handlers: Mapping[str, Handler],
    *,
    narrow_norms: bool = False,
) -> Walk:
    """Follow dimensions through a graph, given those of its placeholders."""
    walk = Walk(graph, dict(values), set(weights), narrow_norms)
    for node in graph.nodes:
        if node.op == "output":
            for result in node.all_input_nodes:
                for dim in walk.dims(result):
                    others = [factor for factor in leaves(dim) if not factor.batch]
                    freeze(others, "is an output of the model")
        elif node.op == "call_function":
            try:
                walk.values[node] = _visit(walk, node, handlers)
                _check_rank(walk, node)
            except GuardOnDataDependentSymNode as error:
                raise TraceError(describe(node, "has a size that depends on the data")) from error
            except TraceError:
                raise
            except Exception as error:  # a rule met a form of its operator that it does not know
                why = f"the tracer's rule fails with {type(error).__name__}: {error}"
                cure = "write this step with other operators, and tell us about the model"
                raise TraceError(f"{describe(node, why)}; {cure}") from error
        elif node not in walk.values:
            raise TraceError(describe(node, f"a {node.op} ({node.target}) cannot be traced"))
    return walk


def describe(node: fx.Node, why: str) -> str:
    """Return the reason, with the operator and the module it came from."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    where = f"module {path!r}" if path else "the model's own forward()"
    return f"{why} ({operator_name(node)}, {where})"


def operator_name(node: fx.Node) -> str:
    """`linear` for aten.linear.default; in-place variants (`relu_`) count as the operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        name = name.rstrip("_") if not name.startswith("__") else name
        return name if namespace == "aten" else f"{namespace}::{name}"
    return getattr(target, "__name__", str(target))


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the node's arguments by name, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return dict(enumerate(node.args))  # type: ignore[arg-type]  # only operator.getitem
    bound: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value if argument.has_default_value() else None
    return bound


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape the node had when it was traced."""
    return tuple(int(size) for size in node.meta["val"].shape)


def _visit(walk: Walk, node: fx.Node, handlers: Mapping[str, Handler]) -> Value:
    if node.target is operator.getitem:
        source, index = node.args
        return walk.values[source][index]  # type: ignore[index]
    handler = handlers.get(operator_name(node))
    tags = getattr(node.target, "tags", ())
    if handler is None and torch.Tag.nondeterministic_seeded in tags:
        raise TraceError(describe(node, DRAWS))
    drawn = torch.Tag.nondeterministic_seeded in tags
    made = not any(isinstance(walk.values.get(n), (list, tuple)) for n in node.all_input_nodes)
    if made and not (drawn and handler):
        return create(walk, node)
    _note_writes(walk, node)
    if handler is not None:
        return handler(walk, node, arguments(node))
    if torch.Tag.pointwise in tags:
        return handlers["pointwise"](walk, node, arguments(node))
    return not_understood(walk, node)


def create(walk: Walk, node: fx.Node) -> Value:
    """Handle a tensor made from nothing (zeros, arange): free until something constrains it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    dims = [fresh(size) for size in shape_of(node)]
    if "size" in arguments(node):
        walk.patch(node, "size", tuple(dims))
    else:
        freeze([factor for dim in dims for factor in dim], describe(node, "is a constant"))
    return dims


def _note_writes(walk: Walk, node: fx.Node) -> None:
    """Remember placeholders that an in-place operator changes, directly or through a view."""
    if isinstance(node.target, torch._ops.OpOverload):
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, fx.Node):
                owner = memory_of(value)
                if owner.op == "placeholder":
                    walk.written.add(owner)


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one may share."""
    while node.op == "call_function":
        if isinstance(node.target, torch._ops.OpOverload):
            first = next(iter(node.target._schema.arguments), None)
            if first is None or (first.alias_info is None and "dropout" not in str(node.target)):
                break
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def not_understood(walk: Walk, node: fx.Node) -> Value:
    """Keep whole everything an unknown operator touches; assume that the batch passes.

    A numerical check at the end of every trace verifies the assumption.
    """
    inputs = [walk.dims(n) for n in node.all_input_nodes if isinstance(walk.values.get(n), list)]
    for dims in inputs:
        for dim in dims:
            others = [factor for factor in leaves(dim) if not factor.batch]
            walk.ban(node, others, "is used by an operator that is not understood")

    def outcome(value: Any) -> Value:
        if not isinstance(value, torch.Tensor):
            return None
        dims = []
        for position, size in enumerate(value.shape):
            batch = [
                leaves(d[position])
                for d in inputs
                if position < len(d) and [f.batch for f in leaves(d[position])] == [True]
            ]
            passed = batch and batch[0][0].size == size
            dims.append(batch[0] if passed else fresh(size, frozen=describe(node, "is unknown")))
        return dims

    value = node.meta.get("val")
    return tuple(map(outcome, value)) if isinstance(value, (list, tuple)) else outcome(value)


def _check_rank(walk: Walk, node: fx.Node) -> None:
    value = walk.values[node]
    if isinstance(value, list) and len(value) != len(shape_of(node)):
        raise TraceError(describe(node, f"followed {len(value)} dimensions of {shape_of(node)}"))
