"""Sums of blocks over devices, a piece of the model at a time.

A piece fits the processor's cache, so the running sum stays there while every device's values
stream past it once. Each parameter is summed in the order the terms are given, whatever the number
of threads: the result does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs
from edge_sdk.protocol.plan.plan import ModelPlan

PIECE = 1 << 17
"""Parameters of a piece: 512 KiB of float32. Calls this long let threads work side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """Blocks that enter a sum, multiplied by `factor`."""

    blocks: Blocks
    factor: float = 1.0


def sum_terms(plan: ModelPlan, terms: Sequence[Term], *, threads: int = 1) -> Float32:
    """Per parameter, in block order, the sum of `factor · value` over the terms that hold it."""
    total = np.zeros(plan.parameters, dtype=np.float32)
    placed = [(term, _Runs(term.blocks, plan)) for term in terms]

    def work(start: int, end: int) -> None:
        scratch = np.empty(PIECE, dtype=np.float32)
        for low in range(start, end, PIECE):
            piece = total[low : min(low + PIECE, end)]
            for term, runs in placed:
                _add(piece, low, term, runs, scratch)

    over_shards(plan.parameters, threads, work)
    return total


def over_shards(size: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Do `work(start, end)` on equal parts of a range, each in a thread of its own."""
    if threads == 1:
        return work(0, size)
    cuts = [size * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, a, b) for a, b in pairwise(cuts)]:
            done.result()
    return None


class _Runs:
    """Where a term's values lie in the model's vector: sorted starts and ends of runs."""

    def __init__(self, blocks: Blocks, plan: ModelPlan) -> None:
        runs = block_runs(blocks.ids, plan.block_offsets)
        self.starts = [whole.start for whole, _ in runs]
        self.ends = np.array([whole.stop for whole, _ in runs], dtype=np.int64)
        self.within = [part.start for _, part in runs]


def _add(piece: Float32, low: int, term: Term, runs: _Runs, scratch: Float32) -> None:
    high = low + len(piece)
    number = int(np.searchsorted(runs.ends, low, side="right"))
    while number < len(runs.starts) and runs.starts[number] < high:
        start, end = max(runs.starts[number], low), min(int(runs.ends[number]), high)
        shift = runs.within[number] - runs.starts[number]
        values = term.blocks.values[start + shift : end + shift]
        if term.factor != 1.0:
            values = np.multiply(values, np.float32(term.factor), out=scratch[: end - start])
        piece[start - low : end - low] += values
        number += 1


def block_sums(plan: ModelPlan, terms: Sequence[tuple[Blocks, float]]) -> NDArray[np.float64]:
    """Per block, the sum of the given numbers over the terms that hold it."""
    sums = np.zeros(plan.block_count)
    for blocks, number in terms:
        sums[blocks.ids] += number
    return sums
