"""Put an exported graph into plainer words that mean the same.

- Regions under `torch.no_grad` or `torch.autocast` become part of the graph they stand in.
- Statements about types are left out.
- A concatenation with nothing (a cache that is still empty) is left out.
- `chunk` and `split` state the size of every piece.
- Indexing by position, with every position of each dimension in order, is a reshape.
- `x · rsqrt(mean(x²) + ε)` over the last dimension is RMSNorm.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from coordinator.errors import TraceError
from coordinator.task.tracing.walk import arguments, describe, operator_name, shape_of

aten = torch.ops.aten


def simplify(module: fx.GraphModule) -> None:
    """Rewrite the module's graph in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            _inline(module, node, name)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = operator_name(node)
        if name == "_assert_tensor_metadata":
            graph.erase_node(node)
        elif name == "cat":
            _drop_empty(graph, node)
        elif name in ("chunk", "split"):
            _state_sizes(node)
        elif name == "index":
            _as_reshape(graph, node)
        elif name == "rsqrt":
            _as_rms_norm(graph, node)


def _inline(module: fx.GraphModule, node: fx.Node, name: str) -> None:
    """Copy the region's graph to where it is used; a region without gradients ends in `detach`."""
    graph = module.graph
    at = next(place for place, each in enumerate(node.args) if _is_region(each))
    region: Any = node.args[at]
    inner: fx.GraphModule = getattr(module, str(region.target))
    simplify(inner)
    if name == "wrap_with_autocast" and node.args[2] is not False:  # device, type, enabled, …
        raise TraceError(
            describe(node, "computes in reduced precision; train without torch.autocast")
        )
    copies: dict[fx.Node, Any] = {}
    given = iter(node.args[at + 1 :])
    with graph.inserting_before(node):
        for each in inner.graph.nodes:
            if each.op == "placeholder":
                copies[each] = next(given)
            elif each.op == "output":
                results = each.args[0]
            else:
                copies[each] = graph.node_copy(each, lambda source: copies[source])
        outputs = [copies[result] for result in results]
        if name == "wrap_with_set_grad_enabled" and node.args[0] is False:
            outputs = [_detached(graph, output) for output in outputs]
    for user in list(node.users):
        if user.target is operator.getitem:
            place: Any = user.args[1]
            user.replace_all_uses_with(outputs[place])
            graph.erase_node(user)
    graph.erase_node(node)
    if not region.users:
        graph.erase_node(region)


def _detached(graph: fx.Graph, output: fx.Node) -> fx.Node:
    if not output.meta["val"].is_floating_point():
        return output
    made = graph.call_function(aten.detach.default, (output,))
    made.meta = dict(output.meta)
    return made


def _is_region(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "get_attr"


def _drop_empty(graph: fx.Graph, node: fx.Node) -> None:
    """Leave out pieces of shape (0,), which torch still accepts beside others."""
    pieces = arguments(node)["tensors"]
    full = [piece for piece in pieces if shape_of(piece) != (0,)]
    if len(full) == len(pieces) or not full:
        return
    if len(full) == 1:
        node.replace_all_uses_with(full[0])
        graph.erase_node(node)
    else:
        node.update_arg(0, full)


def _state_sizes(node: fx.Node) -> None:
    given = arguments(node)
    dim = given["dim"]
    sizes = [int(piece.shape[dim]) for piece in node.meta["val"]]
    node.target = aten.split_with_sizes.default
    node.args, node.kwargs = (given["self"], sizes, dim), {}


def _as_reshape(graph: fx.Graph, node: fx.Node) -> None:
    """Recognise `x[rows[:, None, None], columns[None, None, :]]` over all rows and columns."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if None in indices or any(index.meta["val"].dtype is torch.bool for index in indices):
        return
    shape, result = shape_of(source), shape_of(node)
    if len(indices) != len(shape):
        return
    place = -1
    for size, index in zip(shape, indices, strict=True):
        wide = [
            at for at, length in enumerate(shape_of(index), -len(shape_of(index))) if length != 1
        ]
        if len(wide) != 1 or wide[0] + len(result) <= place or not _counts(index, size):
            return
        place = wide[0] + len(result)
    if prod(result) != prod(shape):
        return
    with graph.inserting_before(node):
        made = graph.call_function(aten.reshape.default, (source, list(result)))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _as_rms_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Recognise `x * rsqrt((x ** 2).mean(-1, keepdim=True) + eps)`, as Llama's code has it."""
    raised = _only(node.args[0], "add")
    mean = _only(raised.args[0], "mean") if raised else None
    if raised is None or mean is None or not isinstance(raised.args[1], float):
        return
    squares: Any = mean.args[0]
    x, over = _root_of(squares), arguments(mean)
    if x is None or len(squares.users) != 1 or not over["keepdim"]:
        return
    rank = len(shape_of(x))
    if [dim % rank for dim in over["dim"] or ()] != [rank - 1] or any(map(_writes, x.users)):
        return
    products = [user for user in node.users if set(user.args) == {x, node} and _is(user, "mul")]
    if len(products) != len(node.users):
        return
    for product in products:
        with graph.inserting_before(product):
            given = (x, [shape_of(x)[-1]], None, raised.args[1])
            made = graph.call_function(aten.rms_norm.default, given)
        made.meta = dict(product.meta)
        product.replace_all_uses_with(made)
        graph.erase_node(product)
    for each in (node, raised, mean, squares):
        graph.erase_node(each)


def _root_of(squares: Any) -> fx.Node | None:
    """Return `x` of `x ** 2` or `x * x`."""
    if not isinstance(squares, fx.Node) or not squares.args:
        return None
    root, *rest = squares.args
    square = (
        (_is(squares, "pow") and rest == [2])
        or (_is(squares, "mul") and rest == [root])
        or _is(squares, "square")
    )
    return root if square and isinstance(root, fx.Node) else None


def _only(value: Any, name: str) -> fx.Node | None:
    """Return a call of this operator that has one user."""
    return value if _is(value, name) and len(value.users) == 1 else None


def _is(value: Any, name: str) -> bool:
    is_call = isinstance(value, fx.Node) and value.op == "call_function"
    return is_call and operator_name(value) == name


def _writes(node: fx.Node) -> bool:
    """Tell whether a node may change its operands."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _counts(index: Any, size: int) -> bool:
    """Tell whether a tensor made in forward() holds 0, 1, … size − 1 along its one dimension."""
    while isinstance(index, fx.Node) and index.op == "call_function":
        name = operator_name(index)
        if name == "arange":
            given = arguments(index)
            ends = (given.get("start", 0), given["end"], given.get("step", 1))
            return ends == (0, size, 1)
        others = [each for each in index.args[1:] if name == "add"]
        if name not in ("unsqueeze", "view", "reshape", "to", "expand") and others != [0]:
            return False
        index = index.args[0]
    return False
