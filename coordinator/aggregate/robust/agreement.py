"""Agreement: does a movement point where the others of its round point?

A device's agreement is the cosine between its movement and the mean of the others, over the blocks
that at least two others hold. In one round it says little: data differ, and close to the end honest
movements are mostly noise. Over several rounds it tells apart those who lead the model away, as by
a reversed sign, from those who merely have other data (`rounds/reputation.py`).

All of it follows from three sums for every block: with `S` the sum over `Γ` devices and `v` one of
them, the others' mean is `(S − v) / (Γ − 1)`, and its products follow from `S·S`, `S·v` and `v·v`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.robust.choice import THIN
from coordinator.aggregate.robust.sums import Float64, Term, block_sums, sum_terms
from coordinator.aggregate.screening import block_squares
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs
from edge_sdk.protocol.plan.plan import ModelPlan

PIECE = 2**20
"""Values multiplied at a time, unless a single block has more."""


def agreements(
    plan: ModelPlan, parts: Sequence[Contribution], *, threads: int = 1
) -> dict[str, float]:
    """Return the agreement of each device with the others, from −1 to 1.

    Devices of whose blocks too few others hold any have none, nor has one that did not move.
    Movements count as if made at the same learning rate, and each once, whatever its weight.
    """
    terms = [Term(part.blocks, 1 / part.learning_rate) for part in parts]
    total = sum_terms(plan, terms, threads=threads)
    coverage = block_sums(plan, [(part.blocks, 1.0) for part in parts])
    totals = block_squares(total, plan.block_sizes)
    found = {}
    for part, term in zip(parts, terms, strict=True):
        ids = part.blocks.ids
        judged, others = coverage[ids] > THIN, np.maximum(coverage[ids] - 1, 1)
        own = term.factor**2 * block_squares(part.blocks.values, plan.block_sizes[ids])
        shared = term.factor * _products(plan, part.blocks, total)
        along = float(((shared - own) / others)[judged].sum())
        lengths = float(((totals[ids] - 2 * shared + own) / others**2)[judged].sum())
        length = math.sqrt(max(0.0, lengths * float(own[judged].sum())))
        if length > 0 and math.isfinite(length):
            found[part.device] = max(-1.0, min(1.0, along / length))
    return found


def _products(plan: ModelPlan, blocks: Blocks, whole: Float32) -> Float64:
    """Return the inner product of each block with the same block of a whole vector."""
    sizes = plan.block_sizes[blocks.ids]
    ends = np.cumsum(sizes)
    result = np.zeros(len(sizes))
    first = 0
    while first < len(sizes):
        start = int(ends[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(ends, start + PIECE, side="right")))
        values = blocks.values[start : int(ends[behind - 1])].astype(np.float64)
        for place, within in block_runs(blocks.ids[first:behind], plan.block_offsets):
            values[within] *= whole[place]
        result[first:behind] = np.add.reduceat(
            values, ends[first:behind] - sizes[first:behind] - start
        )
        first = behind
    return result
