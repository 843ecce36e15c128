"""The robust mean: a mean over devices that a minority of them cannot move far.

Laws (tests/property/robust): the result is between the least and the largest value of a parameter;
equal vectors give that vector; it does not depend on the order of the terms, but for ties, nor on
the number of threads; one bad device of three or more moves it no further than the others differ,
or, where it is only clipped, by its share of the yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.aggregate.robust.choice import THIN, Robust
from coordinator.aggregate.robust.distances import distance_shares
from coordinator.aggregate.robust.order import add_ordered
from coordinator.aggregate.sums import Float64, Term, block_sums, divide, sum_terms
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """A vector of some blocks that counts in a mean."""

    blocks: Blocks
    weight: float
    factor: float = 1.0
    """Number that its values are multiplied by."""


def robust_mean(
    plan: ModelPlan, weighed: Sequence[Weighed], robust: Robust, *, threads: int = 1
) -> Float32:
    """Return the mean of each block over those that hold it, in block order; 0 where none does.

    Terms of weight 0 do not count. Blocks that at most two terms hold get the plain mean.
    """
    weighed = [each for each in weighed if each.weight > 0]
    if not robust.combines:
        terms = [Term(each.blocks, each.weight * each.factor) for each in weighed]
        total = sum_terms(plan, terms, threads=threads)
        return divide(plan, total, block_sums(plan, [(e.blocks, e.weight) for e in weighed]))
    terms = [Term(each.blocks, each.factor) for each in weighed]
    weights = np.zeros((len(weighed), plan.block_count))
    for row, each in enumerate(weighed):
        weights[row, each.blocks.ids] = each.weight
    coverage = np.count_nonzero(weights, axis=0).astype(np.int64)
    shares = _mean_shares(np.where(coverage > THIN, 0.0, weights))
    if robust.name in ("geometric-median", "multi-krum"):
        shares += distance_shares(plan, terms, weights, coverage, robust, threads=threads)
    total = sum_terms(
        plan,
        [Term(term.blocks, term.factor, share) for term, share in zip(terms, shares, strict=True)],
        threads=threads,
    )
    if robust.name in ("median", "trimmed-mean"):
        add_ordered(plan, total, terms, coverage, robust, threads=threads)
    return total


def _mean_shares(weights: Float64) -> Float64:
    sums = weights.sum(axis=0)
    shares: Float64 = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    return shares
