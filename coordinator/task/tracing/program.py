"""A traced model that runs at any width: one graph, with sizes filled in per submodel.

A program is the exported graph in which every size that depends on a width or on the batch is
known as a product of factors. `at(kept, batch)` writes the graph of one submodel: a truly narrower
model, with nothing left of the other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from coordinator.task.tracing.capture.capture import Captured
from coordinator.task.tracing.capture.lookups import vocabulary
from coordinator.task.tracing.depth.chains import BlockChain
from coordinator.task.tracing.factors import Factor, Factors, leaves, segments_of, widths
from coordinator.task.tracing.masking import mask_in
from coordinator.task.tracing.walk import (
    Contraction,
    Walk,
    arguments,
    operator_name,
    shape_of,
)
from edge_sdk.protocol.task.data_spec import ArraySpec


@dataclass(frozen=True, slots=True)
class SubmodelForward:
    """The forward pass of one submodel at one batch size.

    `masks` states, for each dropout, its probability and the shape of the mask to pass in: zeros
    where a unit is dropped, `1 / (1 - p)` elsewhere. `weight_rows` and `buffer_rows` say which
    arrays are stacks: the module takes as many rows of them, one by one; 0 means the array itself.
    """

    module: fx.GraphModule
    constants: tuple[torch.Tensor, ...]
    masks: tuple[tuple[float, tuple[int, ...]], ...]
    weight_rows: tuple[int, ...]
    buffer_rows: tuple[int, ...]

    def __call__(
        self,
        weights: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        scales: Sequence[float | torch.Tensor],
        masks: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return the model's output. `scales` has one entry per axis, used only if built scaled."""
        constants = [constant.to(inputs[0].device) for constant in self.constants]
        own = [*in_rows(weights, self.weight_rows), *in_rows(buffers, self.buffer_rows)]
        (output,) = self.module.forward(*own, *constants, *inputs, *scales, *masks)
        result: torch.Tensor = output
        return result

    def in_double(self) -> SubmodelForward:
        """Return the same pass in float64, for weights and inputs in float64: a check's reference.

        Its own rounding is far below float32's, which it shows apart from mistakes.
        """
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), _double)
            makes = not any(isinstance(each, fx.Node) for each in node.args)
            if makes and "dtype" in arguments(node) and arguments(node)["dtype"] is None:
                value = node.meta.get("val")
                if value is not None and value.dtype is torch.float32:
                    node.update_kwarg("dtype", torch.float64)
        constants = tuple(
            each.double() if each.dtype is torch.float32 else each for each in self.constants
        )
        module = fx.GraphModule(torch.nn.Module(), graph)
        return replace(self, module=module, constants=constants)


def in_rows(arrays: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    """Take stacks apart: their rows (views), where `rows` is not 0, in place of the stack."""
    return [
        part
        for array, count in zip(arrays, rows, strict=True)
        for part in (array.unbind(0) if count else (array,))
    ]


def in_stacks(parts: Sequence[torch.Tensor], rows: Sequence[int]) -> list[torch.Tensor]:
    """Put rows together again; inverse of `in_rows`."""
    left = iter(parts)
    return [
        torch.stack([next(left) for _ in range(count)]) if count else next(left) for count in rows
    ]


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class TracedProgram:
    """A model's graph in one mode (training or evaluation), for every width and batch size."""

    def __init__(
        self,
        captured: Captured,
        walk: Walk,
        axes: dict[Factor, int],
        chains: Mapping[int, BlockChain] | None = None,
    ) -> None:
        """`axes` numbers the widths, `chains` are the blocks of every axis of depth, by number."""
        self._captured = captured
        self._walk = walk
        self._axes = axes
        self._chains = dict(chains or {})
        self._axis_count = len(axes) + len(self._chains)
        self._dropped = {dropout.node: dropout for dropout in walk.dropouts}
        self._patches: dict[str, list[tuple[str, Factors | tuple[Factors, ...]]]] = {}
        for patch in walk.patches:
            self._patches.setdefault(patch.node, []).append((patch.argument, patch.sizes))
        self.at = lru_cache(maxsize=64)(self._at)

    @property
    def inputs(self) -> tuple[ArraySpec, ...]:
        """Inputs the model takes for every sample, in order."""
        return tuple(
            ArraySpec(
                str(node.meta["val"].dtype).removeprefix("torch."),
                shape_of(node)[1:],
                None if (ids := vocabulary(node)) is None else ids - 1,
            )
            for node in self._captured.inputs
        )

    @property
    def directions(self) -> dict[str, int]:
        """Names of weights that are divided by their norm, and the dimension of their units."""
        names = {node: name for name, node in self._captured.weights.items()}
        return {names[node]: dim for node, dim in self._walk.directions.items() if node in names}

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the model's output, without its first dimension; widths never appear there."""
        (output,) = (node for node in self._captured.graph.nodes if node.op == "output")
        return shape_of(output.args[0][0])[1:]

    def _at(
        self,
        kept: tuple[int, ...],
        batch: int,
        scaled: bool = False,
        present: Sequence[Sequence[bool]] | None = None,
    ) -> SubmodelForward:
        """Build the submodel with `kept` atoms per axis; `scaled` multiplies layer inputs.

        Of a chain it has the first blocks, since they can compute any others.

        `present` (by axis and atom) is for a whole model that is zero outside a submodel: the norms
        a submodel narrows then take the statistics of what is present, and a chain has the blocks
        that are present themselves. It must compute the same.
        """
        stays = {
            number: tuple(range(kept[number]))
            if present is None
            else tuple(block for block, there in enumerate(present[number]) if there)
            for number in self._chains
        }
        skipped, ends = self._skipped(stays)
        old, new = self._captured.graph, fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        weights = self._rows(self._captured.weights.values(), stays)
        buffers = self._rows(self._captured.buffers.values(), stays)
        arrays = [node for row in (*weights, *buffers) for node in row]
        for node in (*arrays, *self._captured.constants, *self._captured.inputs):
            copies[node] = new.placeholder(node.name)
        scales = [new.placeholder(f"scale_{axis}") for axis in range(self._axis_count)]
        masks = {
            name: new.placeholder(f"mask_{name}") for name in self._dropped if name not in skipped
        }
        for node in self._captured.inputs:
            if node in self._walk.written:  # a second pass needs the original input
                copies[node] = new.call_function(torch.ops.aten.clone.default, (copies[node],))
        factors = self._scaled_arguments() if scaled else {}
        sums = self._scaled_sums() if scaled else {}
        norms = {norm.node: norm.dims for norm in self._walk.norms}
        scaled_nodes: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in old.nodes:
            if node.op == "placeholder":
                continue
            if node.name in skipped:
                if node in ends:
                    copies[node] = copies[ends[node]]
                continue
            if node.name in masks:
                probability = self._dropped[node.name].probability
                copies[node] = mask_in(new, node, copies, masks[node.name], probability)
                continue
            if node.op == "call_function" and "dropout" in operator_name(node):
                copies[node] = copies[node.all_input_nodes[0]]
                continue
            if operator_name(node) == "_weight_norm":  # torch has no gradient of it in plain words
                given = {name: copies.get(value, value) for name, value in arguments(node).items()}
                copies[node] = new.call_function(normed_weight, (), given)
                continue
            if present is not None and node.name in norms:
                given = {name: copies.get(value, value) for name, value in arguments(node).items()}
                given["present"] = [self._present(dim, present) for dim in norms[node.name]]
                copies[node] = new.call_function(NORMS_OVER[operator_name(node)], (), given)
                continue
            copy = copies[node] = new.node_copy(node, lambda source: copies[source])
            for argument, sizes in self._patches.get(node.name, ()):
                _set_argument(copy, argument, self._sizes(sizes, kept, batch))
            if operator_name(node) == "squeeze":
                _squeeze_as_traced(copy, shape_of(node.all_input_nodes[0]))
            for contraction in sums.get(node.name, ()):
                with new.inserting_before(copy):
                    scale = self._scale_of(new, contraction, scales, kept)
                    source = _get_argument(copy, contraction.argument)
                    product = new.call_function(torch.ops.aten.mul.Tensor, (source, scale))
                _set_argument(copy, contraction.argument, product)
            for argument, axis in factors.get(node.name, ()):
                source = _get_argument(copy, argument)
                if (source, axis) not in scaled_nodes:
                    with new.inserting_before(copy):
                        scaled_nodes[source, axis] = new.call_function(
                            torch.ops.aten.mul.Tensor, (source, scales[axis])
                        )
                _set_argument(copy, argument, scaled_nodes[source, axis])
        return SubmodelForward(
            fx.GraphModule(torch.nn.Module(), new),
            tuple(self._captured.constants.values()),
            tuple(
                (dropout.probability, tuple(self._size(dim, kept, batch) for dim in dropout.mask))
                for dropout in self._dropped.values()
                if dropout.node not in skipped
            ),
            tuple(len(row) if row[0] in self._stacks else 0 for row in weights),
            tuple(len(row) if row[0] in self._stacks else 0 for row in buffers),
        )

    @cached_property
    def _stacks(self) -> dict[fx.Node, tuple[int, int]]:
        """The axis of every array that is a row of a stack, and its position in the block."""
        return {
            node: (number, position)
            for number, chain in self._chains.items()
            for block in chain.blocks
            for position, node in enumerate(block.arrays)
        }

    def _rows(
        self, arrays: Iterable[fx.Node], stays: Mapping[int, tuple[int, ...]]
    ) -> list[list[fx.Node]]:
        """Return each array alone, and the rows of the blocks that stay in place of the first."""
        found: list[list[fx.Node]] = []
        for node in arrays:
            if node not in self._stacks:
                found.append([node])
                continue
            number, position = self._stacks[node]
            blocks = self._chains[number].blocks
            if node is blocks[0].arrays[position]:
                found.append([blocks[each].arrays[position] for each in stays[number]])
        return found

    def _skipped(
        self, stays: Mapping[int, tuple[int, ...]]
    ) -> tuple[set[str], dict[fx.Node, fx.Node]]:
        """Return the nodes of blocks that are left out, and the entry that stands for each exit."""
        names: set[str] = set()
        ends = {}
        for number, chain in self._chains.items():
            for position, block in enumerate(chain.blocks):
                if position not in stays[number]:
                    names.update(node.name for node in block.nodes)
                    ends[block.exit] = block.entry
        return names, ends

    def _scaled_arguments(self) -> dict[str, list[tuple[str, int]]]:
        """Map each contraction over an axis to the argument to scale and the axis."""
        found: dict[str, list[tuple[str, int]]] = {}
        for contraction in self._walk.contractions:
            for leaf in leaves(contraction.dim):
                if leaf in self._axes:
                    entry = (contraction.argument, self._axes[leaf])
                    found.setdefault(contraction.node, []).append(entry)
        return found

    def _scaled_sums(self) -> dict[str, list[Contraction]]:
        """Return the contractions over a concatenation that has an axis, by node."""
        found: dict[str, list[Contraction]] = {}
        for contraction in self._walk.contractions:
            sums = [leaf for leaf in leaves(contraction.dim) if leaf.segments]
            if any(each in self._axes for each in widths(sums)):
                found.setdefault(contraction.node, []).append(contraction)
        return found

    def _scale_of(
        self,
        graph: fx.Graph,
        contraction: Contraction,
        scales: Sequence[fx.Node],
        kept: tuple[int, ...],
    ) -> fx.Node:
        """Build the scales of a concatenation: one number per element, each segment its own."""
        aten = torch.ops.aten
        first, *rest = leaves(contraction.dim)
        inner = self._size(rest, kept, 1)
        pieces = []
        for segment in segments_of(first):
            shape = [self._size(segment, kept, 1) * inner]
            axes = [self._axes[leaf] for leaf in segment if leaf in self._axes]
            if axes:
                one = graph.call_function(aten.reshape.default, (scales[axes[0]], [1]))
                pieces.append(graph.call_function(aten.expand.default, (one, shape)))
            else:
                pieces.append(graph.call_function(aten.full.default, (shape, 1.0)))
        whole = graph.call_function(aten.cat.default, (pieces,))
        shape = [self._size(contraction.dim, kept, 1), *[1] * contraction.behind]
        return graph.call_function(aten.reshape.default, (whole, shape))

    def _present(self, dim: Factors, present: Sequence[Sequence[bool]]) -> list[bool]:
        """Return which elements of a dimension are present, given the atoms that are."""
        found = [True]
        for leaf in leaves(dim):
            if leaf.segments:
                own = [each for part in segments_of(leaf) for each in self._present(part, present)]
            elif leaf in self._axes:
                own = list(present[self._axes[leaf]])
            else:
                own = [True] * leaf.size
            found = [outer and inner for outer in found for inner in own]
        return found

    def _sizes(
        self, sizes: Factors | tuple[Factors, ...], kept: tuple[int, ...], batch: int
    ) -> int | list[int]:
        if isinstance(sizes, tuple):
            return [self._size(dim, kept, batch) for dim in sizes]
        return self._size(sizes, kept, batch)

    def _size(self, dim: Factors, kept: tuple[int, ...], batch: int) -> int:
        return prod(self._factor(leaf, kept, batch) for leaf in leaves(dim))

    def _factor(self, leaf: Factor, kept: tuple[int, ...], batch: int) -> int:
        if leaf.segments:
            return sum(self._size(segment, kept, batch) for segment in segments_of(leaf))
        if leaf.batch:
            return batch
        return kept[self._axes[leaf]] if leaf in self._axes else leaf.size


def normed_weight(*, v: torch.Tensor, g: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute torch's weight_norm: `v` scaled to the norm `g`, for each index of `dim`."""
    others = [other for other in range(v.ndim) if dim < 0 or other != dim]
    return v * (g / (v * v).sum(others, keepdim=dim >= 0).sqrt())


def layer_norm_over(
    *,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    present: Sequence[Sequence[bool]],
    **_: object,
) -> torch.Tensor:
    """Compute LayerNorm of the elements that are present, and the shift elsewhere."""
    marked, dims = _marked(input, present)
    mean = (input * marked).sum(dims, keepdim=True) / marked.sum()
    centred = (input - mean) * marked
    variance = (centred * centred).sum(dims, keepdim=True) / marked.sum()
    out = centred * (variance + eps).rsqrt()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def group_norm_over(
    *,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    present: Sequence[Sequence[bool]],
    **_: object,
) -> torch.Tensor:
    """Compute GroupNorm of one group over the channels that are present."""
    pixels = [[True] * size for size in input.shape[2:]]
    out = layer_norm_over(input=input, weight=None, bias=None, eps=eps, present=[*present, *pixels])
    shape = [-1, *[1] * len(pixels)]
    out = out if weight is None else out * weight.reshape(shape)
    return out if bias is None else out + bias.reshape(shape)


def rms_norm_over(
    *,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float | None,
    present: Sequence[Sequence[bool]],
    **_: object,
) -> torch.Tensor:
    """Compute RMSNorm of the elements that are present, and zero elsewhere."""
    marked, dims = _marked(input, present)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    squares = (input * input * marked).sum(dims, keepdim=True) / marked.sum()
    out = input * marked * (squares + eps).rsqrt()
    return out if weight is None else out * weight


NORMS_OVER: dict[str, Callable[..., torch.Tensor]] = {
    "layer_norm": layer_norm_over,
    "group_norm": group_norm_over,
    "rms_norm": rms_norm_over,
}


def _marked(
    input: torch.Tensor, dims: Sequence[Sequence[bool]]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return ones and zeros that broadcast over the last dimensions, and these dimensions."""
    marked = torch.ones((), dtype=input.dtype, device=input.device)
    for dim in dims:
        marked = marked.unsqueeze(-1) * torch.tensor(dim, dtype=input.dtype, device=input.device)
    return marked, tuple(range(-len(dims), 0))


def _squeeze_as_traced(copy: fx.Node, shape: tuple[int, ...]) -> None:
    """Squeeze dimensions of size one in the trace, not those a submodel or batch made so."""
    named = arguments(copy).get("dim", range(len(shape)))
    named = [named] if isinstance(named, int) else named
    dims = [dim % len(shape) for dim in named if shape[dim] == 1]
    in_place = copy.target._schema.name.endswith("_")  # type: ignore[union-attr]
    copy.target = torch.ops.aten.squeeze_.dims if in_place else torch.ops.aten.squeeze.dims
    copy.args = (copy.args[0], dims)
    copy.kwargs = {}


def _position(node: fx.Node, argument: str) -> int:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    return [entry.name for entry in schema.arguments].index(argument)


def _get_argument(node: fx.Node, argument: str) -> fx.Node:
    """Return an argument by name; `tensors.1` is the second of a list."""
    name, _, index = argument.partition(".")
    value: Any = node.kwargs[name] if name in node.kwargs else node.args[_position(node, name)]
    found: fx.Node = value[int(index)] if index else value
    return found


def _set_argument(node: fx.Node, argument: str, value: Any) -> None:
    name, _, index = argument.partition(".")
    position = _position(node, name)
    if index:
        members: Any = node.args[position]
        value = [value if at == int(index) else each for at, each in enumerate(members)]
    if position < len(node.args):
        node.update_arg(position, value)
    else:
        node.update_kwarg(name, value)
