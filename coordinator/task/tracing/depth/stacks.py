"""Regions by depth: chains of a model's two graphs become axes, and their weights stacks.

Both graphs of a model, for training and for evaluation, must have the same chain over the same
weights. The weights that correspond to each other in its blocks become one tensor, a *stack*, whose
first dimension is the axis: everything that cuts, sends, sums and counts a width then does so with
blocks. Widths inside the blocks are tied, because one graph serves all blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator.errors import TraceError
from coordinator.task.tracing.capture.capture import Captured
from coordinator.task.tracing.depth.chains import BlockChain, find_chains, why_no_chain
from coordinator.task.tracing.factors import Factor, Factors, tie

TIED = "belongs to a block whose twins have another shape"


@dataclass(frozen=True, eq=False)
class DepthChain:
    """An axis of depth: its chain in both graphs, and the arrays that it stacks."""

    factor: Factor
    """The number of blocks."""
    train: BlockChain
    evaluate: BlockChain
    stacks: Mapping[str, tuple[str, ...]]
    """Names of the module's arrays, one for each block, by the name of the stack."""


def find_depth(train: Captured, evaluate: Captured) -> list[DepthChain]:
    """Return the chains that both graphs have. Raises `TraceError` if there are none."""
    others = find_chains(evaluate)
    taken = {*train.weights, *train.buffers}
    found = []
    for chain in find_chains(train):
        twins = _twins(chain, train)
        same = next((each for other in others if (each := _same(other, evaluate, twins))), None)
        if same is not None:
            stacks = {}
            for members in twins:
                stacks[_stack_name(members, taken)] = members
                taken.update(stacks)
            found.append(DepthChain(Factor(len(chain.blocks)), chain, same, stacks))
    if not found:
        lines = [f"  {line}" for line in why_no_chain(train)]
        raise TraceError(
            "\n".join(
                [
                    "this model has no chain of residual blocks of one shape (x + f(x), at least "
                    "two in a row with the same layers), so it cannot be cut by depth: use "
                    'regions = "width"',
                    *lines,
                ]
            )
        )
    return found


def tie_blocks(chains: Sequence[DepthChain], dims: Mapping[str, list[Factors]]) -> None:
    """Give all blocks of a chain the same widths."""
    for chain in chains:
        for first, *rest in chain.stacks.values():
            for other in rest:
                for one, two in zip(dims[first], dims[other], strict=True):
                    tie(one, two, TIED)


def stacked_dims(
    names: Collection[str], chains: Sequence[DepthChain], dims: Mapping[str, list[Factors]]
) -> dict[str, tuple[list[Factors], tuple[str, ...]]]:
    """Return the dimensions and members of every array of the plan, in order.

    A stack stands where its first member stood.
    """
    first = {
        members[0]: (name, members, chain.factor)
        for chain in chains
        for name, members in chain.stacks.items()
    }
    inside = {name for _, members, _ in first.values() for name in members}
    found: dict[str, tuple[list[Factors], tuple[str, ...]]] = {}
    for name in names:
        if name in first:
            stack, members, factor = first[name]
            found[stack] = ([[factor], *dims[name]], members)
        elif name not in inside:
            found[name] = (list(dims[name]), ())
    return found


def _twins(chain: BlockChain, captured: Captured) -> list[tuple[str, ...]]:
    """Names of arrays that correspond to each other, in the order of the module's own arrays."""
    order = {name: number for number, name in enumerate((*captured.weights, *captured.buffers))}
    columns = zip(*chain.names(captured), strict=True)
    return sorted(columns, key=lambda members: order[members[0]])


def _same(
    chain: BlockChain, captured: Captured, twins: Sequence[tuple[str, ...]]
) -> BlockChain | None:
    """Return the chain with exactly these arrays; None if it is another.

    Arrays that this graph does not use, such as counters of batches in evaluation, are added.
    """
    own = _twins(chain, captured)
    arrays = {**captured.weights, **captured.buffers}
    unused = [each for each in twins if each not in own]
    if len(own) + len(unused) != len(twins) or any(arrays[n].users for m in unused for n in m):
        return None
    return BlockChain(
        tuple(
            replace(block, arrays=(*block.arrays, *(arrays[each[at]] for each in unused)))
            for at, block in enumerate(chain.blocks)
        )
    )


def _stack_name(members: Sequence[str], taken: Collection[str]) -> str:
    """Name a stack: `blocks.*.fc1.weight`."""
    parts = [name.split(".") for name in members]
    if len({len(each) for each in parts}) == 1:
        columns = zip(*parts, strict=True)
        stem = ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
    else:
        stem = f"{members[0]}*"
    tries = [stem, *(f"{stem}#{number}" for number in range(2, len(taken) + 3))]
    return next(each for each in tries if each not in taken)
