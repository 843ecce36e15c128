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
from numpy.typing import NDArray

from coordinator.aggregate.robust.choice import THIN, Robust
from coordinator.aggregate.robust.distances import distance_shares
from coordinator.aggregate.robust.order import add_ordered
from coordinator.aggregate.robust.sums import Float64, Term, sum_terms
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, eq=False)
class Weighed:
    """A vector of some blocks that counts in a mean."""

    blocks: Blocks
    weight: float
    factor: float = 1.0
    """Number that its values are multiplied by."""
    judged: Blocks | None = None
    """Movement of the same blocks by which `multi-krum` selects; None: the values themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class RobustMean:
    """A mean over devices, in block order, and who had no part in it."""

    values: Float32
    """0 where no term holds a block."""
    left_out: NDArray[np.bool_]
    """Marks the terms (rows) that were not selected for a block (column) that they hold."""


def robust_mean(
    plan: ModelPlan, weighed: Sequence[Weighed], robust: Robust, *, threads: int = 1
) -> RobustMean:
    """Compute the mean of each block over those that hold it.

    Terms of weight 0 do not count. Blocks that at most two terms hold get the plain mean.
    """
    left_out = np.zeros((len(weighed), plan.block_count), dtype=np.bool_)
    counting = [row for row, each in enumerate(weighed) if each.weight > 0]
    terms = [Term(weighed[row].blocks, weighed[row].factor) for row in counting]
    weights = np.zeros((len(counting), plan.block_count))
    for number, row in enumerate(counting):
        weights[number, weighed[row].blocks.ids] = weighed[row].weight
    coverage = np.count_nonzero(weights, axis=0).astype(np.int64)
    thin = coverage <= (THIN if robust.combines else len(counting))
    shares = _mean_shares(np.where(thin, weights, 0.0))
    if robust.name == "geometric-median":
        shares += distance_shares(plan, terms, weights, coverage, robust, threads=threads)
    elif robust.name == "multi-krum":
        judged = [weighed[row].judged or weighed[row].blocks for row in counting]
        seen = [Term(own, term.factor) for own, term in zip(judged, terms, strict=True)]
        shares += distance_shares(plan, seen, weights, coverage, robust, threads=threads)
        left_out[counting] = (weights > 0) & (shares == 0)
    shared = [Term(term.blocks, term.factor, own) for term, own in zip(terms, shares, strict=True)]
    total = sum_terms(plan, shared, threads=threads)
    if robust.name in ("median", "trimmed-mean"):
        add_ordered(plan, total, terms, coverage, robust, threads=threads)
    return RobustMean(total, left_out)


def _mean_shares(weights: Float64) -> Float64:
    sums = weights.sum(axis=0)
    shares: Float64 = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
    return shares
