"""Means by order: the coordinate-wise median and trimmed mean over the devices that hold a block.

Each device has one vote, whatever its weight: a claimed weight must not buy a place in the middle.

- `median`: of an even number, the mean of the two middle values;
- `trimmed-mean`: without the `suspects` least and as many of the largest values, at least one each.

Yin, Chen, Kannan and Bartlett, *Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates*, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.aggregate.robust.choice import THIN, Robust
from coordinator.aggregate.robust.sums import Term, over_shards, place_blocks, spread
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

ROOM = 1 << 21
"""Values of all devices that a thread sorts at a time (8 MiB)."""


def add_ordered(
    plan: ModelPlan,
    total: Float32,
    terms: Sequence[Term],
    coverage: Indices,
    robust: Robust,
    *,
    threads: int = 1,
) -> None:
    """Add the mean by order of every block that more than two terms hold.

    Each parameter is computed on its own, so the result depends on no number of threads.
    """
    placed = place_blocks(plan, [term.blocks for term in terms])
    piece = max(1, ROOM // max(1, len(terms)))
    cut = np.zeros(len(terms) + 1, dtype=np.int64)
    for number in range(THIN + 1, len(cut)):
        median = (number - 1) // 2
        cut[number] = median if robust.name == "median" else robust.suspects(number)

    def work(start: int, end: int) -> None:
        for low in range(start, end, piece):
            high = min(low + piece, end)
            counts = spread(plan, coverage, low, high)
            where = np.flatnonzero(counts > THIN)
            if not len(where):
                continue
            # An absent value counts as infinite: it is sorted behind the others.
            values = np.full((high - low, len(terms)), np.inf, dtype=np.float32)
            for column, (term, blocks) in enumerate(zip(terms, placed, strict=True)):
                for first, last, found in blocks.between(low, high):
                    values[first - low : last - low, column] = np.float32(term.factor) * found
            if len(where) < high - low:
                values, counts = values[where], counts[where]
            total[low + where] += _middle_means(values, counts, cut[counts])

    over_shards(plan.parameters, threads, work)


def _middle_means(values: Float32, counts: Indices, cut: Indices) -> Float32:
    """Average each row's values without the `cut` least and the `cut` largest of `counts`."""
    values.sort(axis=1)
    place = np.arange(values.shape[1])
    kept = (place >= cut[:, None]) & (place < (counts - cut)[:, None])
    sums = np.sum(values, axis=1, dtype=np.float64, where=kept)
    means: Float32 = (sums / (counts - 2 * cut)).astype(np.float32)
    return means
