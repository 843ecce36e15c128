"""Chains of residual blocks of one shape, found in a traced graph.

A *residual block* is a part of the graph with one value in and one of the same shape out, where the
value comes out as it went in plus something computed from it: a path from entry to exit goes
through additions alone, and through what usually follows them (ReLU, LayerNorm, dropout). Nothing
else leaves the block, and what enters it beside the value and the block's own weights (an attention
mask, say) is the same for all blocks of a chain.

A *chain* is a run of at least two such blocks, one after the other, with the same operators,
connected in the same way, with the same constants, over weights of the same shapes. Its blocks are
interchangeable: the graph of any block computes every other one, given that one's weights. A block
that is left out is the identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import fx

from coordinator.task.tracing.capture.capture import Captured
from coordinator.task.tracing.walk import arguments, describe, operator_name, shape_of
from edge_sdk.protocol.plan.specs import MAX_GROUPS

PASSES = frozenset(
    {"relu", "hardtanh", "relu6", "layer_norm", "rms_norm", "dropout", "to", "clone", "contiguous"}
)
"""Operators that may follow the addition of a residual block, inside the block."""

REACH = 8
"""Most additions that one block may have along its residual path."""


@dataclass(frozen=True, eq=False)
class ChainBlock:
    """A residual block: nodes from behind `entry` up to `exit`, in graph order, and counters.

    `arrays` are the weights and buffers that it alone uses, in order of their first use.
    """

    entry: fx.Node
    exit: fx.Node
    nodes: tuple[fx.Node, ...]
    arrays: tuple[fx.Node, ...]
    form: tuple[Any, ...]
    """Its structure; blocks of equal form are interchangeable."""


@dataclass(frozen=True, eq=False)
class BlockChain:
    """Interchangeable residual blocks, one after the other."""

    blocks: tuple[ChainBlock, ...]

    def names(self, captured: Captured) -> list[tuple[str, ...]]:
        """Names of the arrays of every block, in the order of `ChainBlock.arrays`."""
        by_node = {
            node: name for name, node in (*captured.weights.items(), *captured.buffers.items())
        }
        return [tuple(by_node[node] for node in block.arrays) for block in self.blocks]


def find_chains(captured: Captured) -> list[BlockChain]:
    """Return all chains of a graph, in graph order; none share a node."""
    return _Search(captured).chains()


def why_no_chain(captured: Captured) -> list[str]:
    """Say, for neighbouring residual blocks that are not alike, what differs; one line each."""
    return _Search(captured).differences()


class _Search:
    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._nodes: list[fx.Node] = list(captured.graph.nodes)
        self._number = {node: number for number, node in enumerate(self._nodes)}
        self._before: list[int] = []
        """For every node, itself and all nodes that it depends on, as bits."""
        for node in self._nodes:
            bits = 1 << len(self._before)
            for source in node.all_input_nodes:
                bits |= self._before[self._number[source]]
            self._before.append(bits)
        self._users = [self._bits(node.users) for node in self._nodes]
        self._inputs = set(captured.inputs)
        self._owned = {*captured.weights.values(), *captured.buffers.values()}

    def chains(self) -> list[BlockChain]:
        """Take the chain that covers most of the graph, then the next one beside it, and so on."""
        found: list[BlockChain] = []
        pairs = self._blocks
        while runs := self._runs(pairs):
            best = max(runs, key=lambda run: (sum(len(b.nodes) for b in run), len(run)))
            best = best[:MAX_GROUPS]
            found.append(BlockChain(tuple(best)))
            taken = {node for block in best for node in block.nodes}
            pairs = [block for block in pairs if taken.isdisjoint(block.nodes)]
        return sorted(found, key=lambda chain: self._number[chain.blocks[0].exit])

    def differences(self) -> list[str]:
        """See `why_no_chain`."""
        found = []
        for block, others in self._followers(self._blocks).items():
            for other in others:
                operators = [[each[0] for each in side.form] for side in (block, other)]
                if operators[0] != operators[1]:
                    continue
                twins = enumerate(zip(block.form, other.form, strict=True))
                at = next((number for number, (one, two) in twins if one != two), None)
                if at is not None:
                    where = describe(block.nodes[at], "differs from its twin in the next block")
                    found.append(f"{where}: {_shown(block.form[at])} and {_shown(other.form[at])}")
        return list(dict.fromkeys(found))

    @cached_property
    def _blocks(self) -> list[ChainBlock]:
        """All residual blocks, whatever follows them."""
        sources: dict[fx.Node, list[fx.Node]] = {}
        found = []
        for node in self._nodes:
            if node.op != "call_function":
                continue
            sources[node] = self._sources(node, sources)
            for source in sources[node][:REACH]:
                block = self._block(source, node)
                if block is not None:
                    found.append(block)
        return found

    def _sources(self, node: fx.Node, known: dict[fx.Node, list[fx.Node]]) -> list[fx.Node]:
        """Values that reach the node through additions, the nearest first."""
        name = operator_name(node)
        if name in PASSES:
            return known.get(node.all_input_nodes[0], []) if node.all_input_nodes else []
        if name != "add":
            return []
        given = arguments(node)
        sides = [each for each in (given["self"], given["other"]) if isinstance(each, fx.Node)]
        if given.get("alpha", 1) != 1 or len(sides) != 2:
            return []
        if any(shape_of(side) != shape_of(node) for side in sides):
            return []
        found = {each for side in sides for each in (side, *known.get(side, ()))}
        found = {each for each in found if each.op == "call_function" or each in self._inputs}
        return sorted(found, key=lambda each: -self._number[each])

    def _block(self, entry: fx.Node, exit: fx.Node) -> ChainBlock | None:
        """Return what lies between two values, if it is a block with weights of its own."""
        start, end = self._number[entry], self._number[exit]
        if shape_of(entry) != shape_of(exit) or entry.meta["val"].dtype != exit.meta["val"].dtype:
            return None
        inside = self._closed(start, end)
        if inside is None:
            return None
        nodes = tuple(self._listed(inside))
        places = {place for node in nodes if (place := _module(node))}
        counters = [node for node in self._counters if _module(node) in places]
        nodes = (*nodes, *counters)
        inside |= self._bits(counters)
        arrays: dict[fx.Node, None] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                if source in self._owned and not self._users[self._number[source]] & ~inside:
                    arrays[source] = None
        trained = {node for node in arrays if node in self._captured.weights.values()}
        if not any(
            self._before[self._number[node]] >> start & 1 and trained & set(node.all_input_nodes)
            for node in nodes
        ):
            return None  # nothing trained works on the value itself
        form = self._form(entry, nodes, tuple(arrays))
        return ChainBlock(entry, exit, nodes, tuple(arrays), form)

    def _closed(self, start: int, end: int) -> int | None:
        """Return the nodes that only this part needs, as bits; None if the value leaks."""
        inside = self._before[end] & ~self._before[start]
        inside &= self._computed
        while True:
            shared = 0
            for number in _ones(inside & ~(1 << end)):
                if self._users[number] & ~inside:
                    if self._before[number] >> start & 1:
                        return None
                    shared |= 1 << number  # made for others too, such as an attention mask
            if not shared:
                return inside
            inside &= ~shared

    @cached_property
    def _counters(self) -> list[fx.Node]:
        """Nodes that only change arrays of their own: BatchNorm's number of batches."""
        return [
            node
            for node in self._nodes
            if node.op == "call_function"
            and not node.users
            and node.all_input_nodes
            and all(each in self._owned and len(each.users) == 1 for each in node.all_input_nodes)
        ]

    @cached_property
    def _computed(self) -> int:
        return self._bits(node for node in self._nodes if node.op == "call_function")

    def _form(
        self, entry: fx.Node, nodes: Sequence[fx.Node], arrays: Sequence[fx.Node]
    ) -> tuple[Any, ...]:
        names: dict[fx.Node, Any] = {entry: "entry"}
        names |= {node: ("node", number) for number, node in enumerate(nodes)}
        trained = set(self._captured.weights.values())
        for number, array in enumerate(arrays):
            value = array.meta["val"]
            names[array] = ("array", number, tuple(value.shape), value.dtype, array in trained)

        def named(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if value in self._captured.constants:
                    return _digest(self._captured.constants[value])
                return names.get(value, ("outside", value.name))
            if isinstance(value, (list, tuple)):
                return tuple(named(each) for each in value)
            if isinstance(value, dict):
                return tuple((key, named(each)) for key, each in value.items())
            return repr(value)

        return tuple((str(n.target), named(n.args), named(n.kwargs)) for n in nodes)

    def _runs(self, blocks: Sequence[ChainBlock]) -> list[list[ChainBlock]]:
        """Return the longest runs of blocks that are alike."""
        follower: dict[ChainBlock, ChainBlock] = {}
        for block, others in self._followers(blocks).items():
            alike = [other for other in others if other.form == block.form]
            if alike:
                follower[block] = alike[0]
        followed = set(follower.values())
        found = []
        for block in follower:
            if block not in followed:
                run = [block]
                while run[-1] in follower:
                    run.append(follower[run[-1]])
                found.append(run)
        return found

    def _followers(self, blocks: Sequence[ChainBlock]) -> dict[ChainBlock, list[ChainBlock]]:
        """Return, for every block, those that take its value, if nothing else does."""
        starting: dict[fx.Node, list[ChainBlock]] = {}
        for block in blocks:
            starting.setdefault(block.entry, []).append(block)
        return {
            block: [other for other in starting.get(block.exit, ()) if users <= set(other.nodes)]
            for block in blocks
            for users in [block.exit.users.keys()]
        }

    def _bits(self, nodes: Iterable[fx.Node]) -> int:
        bits = 0
        for node in nodes:
            bits |= 1 << self._number[node]
        return bits

    def _listed(self, bits: int) -> list[fx.Node]:
        return [self._nodes[number] for number in _ones(bits)]


def _ones(bits: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


def _module(node: fx.Node) -> str:
    """Return the path of the innermost module that a node came from; empty: the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return list(stack.values())[-1][0] if stack else ""


def _digest(constant: torch.Tensor) -> tuple[Any, ...]:
    data = constant.detach().cpu().contiguous()
    content = sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return ("constant", tuple(data.shape), data.dtype, content)


def _shown(part: tuple[Any, ...]) -> str:
    name, args, _ = part
    plain = [each for each in args if isinstance(each, str) and each != "entry"]
    shapes = [each[2] for each in args if isinstance(each, tuple) and each[:1] == ("array",)]
    return f"{name}({', '.join([*map(str, shapes), *plain])})"
