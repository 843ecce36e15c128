"""Sums of blocks over devices, a piece of the model at a time.

A piece fits the processor's cache, so the running sum stays there while every device's values
stream past it once, straight from the mapped uploads. Each parameter is summed in the order the
terms are given, whatever the number of threads: the result does not depend on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.robust.threads import side_by_side
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

Float64 = NDArray[np.float64]

PIECE = 1 << 17
"""Parameters of a piece: 512 KiB of float32. Calls this long let threads work side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """Blocks that enter a sum, multiplied by `factor` and by their `shares`."""

    blocks: Blocks
    factor: float = 1.0
    shares: Float64 | None = None
    """A number for every block of the plan; None: 1 for all."""


def sum_terms(plan: ModelPlan, terms: Sequence[Term], *, threads: int = 1) -> Float32:
    """Sum `factor · value` per parameter, in block order, over the terms that hold it."""
    total = np.zeros(plan.parameters, dtype=np.float32)
    placed = list(zip(terms, place_blocks(plan, [term.blocks for term in terms]), strict=True))

    def work(start: int, end: int) -> None:
        scratch = np.empty(PIECE, dtype=np.float32)
        for low in range(start, end, PIECE):
            piece = total[low : min(low + PIECE, end)]
            for term, runs in placed:
                _add(plan, piece, low, term, runs, scratch)

    over_shards(plan.parameters, threads, work)
    return total


def over_shards(size: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Run `work(start, end)` on equal parts of a range, each in a thread of its own."""
    if threads == 1:
        return work(0, size)
    cuts = [size * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        side_by_side(pool, [partial(work, low, high) for low, high in pairwise(cuts)])
    return None


def add_scaled(
    plan: ModelPlan, result: Float32, start: int, source: Float64, numbers: Float64
) -> None:
    """Add `number_i · source` for every block `i`; `source` begins at parameter `start`."""
    for low in range(start, start + len(source), PIECE):
        high = min(low + PIECE, start + len(source))
        part = spread(plan, numbers, low, high)
        part *= source[low - start : high - start]
        result[low:high] += part.astype(np.float32)


def divide(plan: ModelPlan, total: Float32, by: Float64, *, threads: int = 1) -> Float32:
    """Divide `total` in place by a number per block; 0 where that is 0."""
    share = np.divide(1.0, by, out=np.zeros_like(by), where=by > 0).astype(np.float32)

    def work(start: int, end: int) -> None:
        for low in range(start, end, PIECE):
            part = total[low : min(low + PIECE, end)]
            part *= spread(plan, share, low, low + len(part))

    over_shards(len(total), threads, work)
    return total


def spread(plan: ModelPlan, numbers: NDArray[Any], low: int, high: int) -> NDArray[Any]:
    """Repeat one number per block as one per parameter, for the parameters from low to high."""
    offsets = plan.block_offsets
    first = int(np.searchsorted(offsets, low, side="right")) - 1
    last = int(np.searchsorted(offsets, high, side="left"))
    edges: Indices = np.clip(offsets[first : last + 1], low, high)
    return np.repeat(numbers[first:last], edges[1:] - edges[:-1])


class BlockRuns:
    """Where blocks with these ids lie in the model's vector: sorted starts and ends of runs."""

    def __init__(self, ids: Indices, plan: ModelPlan) -> None:
        runs = block_runs(ids, plan.block_offsets)
        self.starts = [whole.start for whole, _ in runs]
        self.ends = [whole.stop for whole, _ in runs]
        self.within = [part.start for _, part in runs]


class PlacedBlocks:
    """A term's values, and where they lie in the model's vector."""

    def __init__(self, values: Float32, runs: BlockRuns) -> None:
        self._values = values
        self._runs = runs

    def between(self, low: int, high: int) -> Iterator[tuple[int, int, Float32]]:
        """Give the stretches that lie between two parameters: start, end and values."""
        starts, ends, within = self._runs.starts, self._runs.ends, self._runs.within
        number = bisect_right(ends, low)
        while number < len(starts) and starts[number] < high:
            start, end = max(starts[number], low), min(ends[number], high)
            shift = within[number] - starts[number]
            yield start, end, self._values[start + shift : end + shift]
            number += 1


def place_blocks(plan: ModelPlan, terms: Sequence[Blocks]) -> list[PlacedBlocks]:
    """Place the blocks of several terms; those that share their ids are located once."""
    known: dict[int, BlockRuns] = {}
    found = []
    for blocks in terms:
        if id(blocks.ids) not in known:
            known[id(blocks.ids)] = BlockRuns(blocks.ids, plan)
        found.append(PlacedBlocks(blocks.values, known[id(blocks.ids)]))
    return found


def _add(
    plan: ModelPlan, piece: Float32, low: int, term: Term, placed: PlacedBlocks, scratch: Float32
) -> None:
    for start, end, found in placed.between(low, low + len(piece)):
        values, room = found, scratch[: end - start]
        if not values.flags.aligned:
            # An upload's numbers lie at any address. numpy copies such at full speed, but adds
            # them many times slower.
            np.copyto(room, values)
            values = room
        if term.factor != 1.0:
            values = np.multiply(values, np.float32(term.factor), out=room)
        if term.shares is not None:
            shares = spread(plan, term.shares, start, end).astype(np.float32)
            values = np.multiply(values, shares, out=room)
        piece[start - low : end - low] += values


def block_sums(plan: ModelPlan, terms: Sequence[tuple[Blocks, float]]) -> Float64:
    """Sum the given numbers per block over the terms that hold it."""
    sums = np.zeros(plan.block_count)
    for blocks, number in terms:
        sums[blocks.ids] += number
    return sums
