"""Means by distance: the geometric median and Multi-Krum of each block's vectors.

Both are weighted means whose shares follow from the distances between devices. All distances of a
block follow from the inner products of its vectors, which one pass over the values finds; the
iterations then work on a few numbers for every block, not on the values.

- `geometric-median`: the point with the least sum of weighted distances, by the smoothed Weiszfeld
  algorithm from the weighted mean. Pillutla, Kakade and Harchaoui, *Robust Aggregation for
  Federated Learning*, IEEE Transactions on Signal Processing 2022 (RFA).
- `multi-krum`: of `Γ` devices of which `f` may be bad, those `Γ − f` with the least sum of squared
  distances to their `Γ − f − 2` (at least one) nearest; their weighted mean. Ties go to the device
  whose name comes first. Without `Γ ≥ 2 f + 3` there is no guarantee. Blanchard et al., *Machine
  Learning with Adversaries*, NeurIPS 2017.

The products take `Γ²` times the parameters, in float64, without BLAS: its sums may depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.robust.choice import THIN, Robust
from coordinator.aggregate.robust.sums import Float64, Term, over_shards
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

ROOM = 1 << 20
"""Values of all devices, in float64, that a thread holds at a time (8 MiB)."""
SMOOTHING = 1e-6
"""Least distance in Weiszfeld's algorithm, as a share of the mean distance from the start."""
ITERATIONS = 200
TOLERANCE = 1e-7
"""Change of the largest share below which a block's iterations end."""


def distance_shares(
    plan: ModelPlan,
    terms: Sequence[Term],
    weights: Float64,
    coverage: Indices,
    robust: Robust,
    *,
    threads: int = 1,
) -> Float64:
    """Return the share of every term (row) in the mean of every block (column).

    `weights` has the same form, 0 where a term does not hold a block. Blocks that at most two terms
    hold get shares of 0. Each block is computed on its own: the result depends on no number of
    threads.
    """
    shares = np.zeros_like(weights)
    places = [_places(plan, term) for term in terms]
    blocks = np.flatnonzero(coverage > THIN)
    at_once = max(1, ROOM // max(1, len(terms)) ** 2)

    def work(start: int, end: int) -> None:
        for low in range(start, end, at_once):
            some = blocks[low : min(low + at_once, end)]
            products = np.zeros((len(some), len(terms), len(terms)))
            for number, block in enumerate(some.tolist()):
                _add_products(products[number], terms, places, block, plan)
            own = weights[:, some].T
            if robust.name == "geometric-median":
                found = weiszfeld(products, own)
            else:
                suspects = np.array([robust.suspects(int(each)) for each in coverage[some]])
                found = krum(products, own, suspects)
            shares[:, some] = found.T

    over_shards(len(blocks), threads, work)
    return shares


def weiszfeld(products: Float64, weights: Float64) -> Float64:
    """Return the shares of the geometric median, given the inner products of each block's vectors.

    An iterate is a weighted mean `z = Σ β_k x_k`, so `‖z − x_k‖² = βᵀGβ − 2 (Gβ)_k + G_kk`.
    """
    shares: Float64 = weights / weights.sum(axis=1, keepdims=True)
    least: Float64 | None = None
    going = np.arange(len(shares))
    for _ in range(ITERATIONS):
        distances = _distances(products[going], shares[going])
        if least is None:
            least = SMOOTHING * np.sum(shares * distances, axis=1)
        apart = least[going] > 0  # else all vectors are equal
        going, distances = going[apart], distances[apart]
        if not len(going):
            break
        new = weights[going] / np.maximum(distances, least[going, None])
        new /= new.sum(axis=1, keepdims=True)
        moved = np.abs(new - shares[going]).max(axis=1) > TOLERANCE
        shares[going] = new
        going = going[moved]
    return shares


def krum(products: Float64, weights: Float64, suspects: NDArray[np.int64]) -> Float64:
    """Return the shares of Multi-Krum: those of the selected devices, by weight."""
    held = weights > 0
    count = held.sum(axis=1)
    squares = np.einsum("bii->bi", products)
    apart = squares[:, :, None] + squares[:, None, :] - 2 * products
    apart = np.where(held[:, :, None] & held[:, None, :], np.maximum(apart, 0), np.inf)
    np.einsum("bii->bi", apart)[...] = np.inf
    apart.sort(axis=2)
    near = np.maximum(count - suspects - 2, 1)
    sums = np.cumsum(apart, axis=2)
    scores = np.take_along_axis(sums, (near - 1)[:, None, None], axis=2)[:, :, 0]
    scores = np.where(held, scores, np.inf)
    ranks = np.argsort(np.argsort(scores, axis=1, kind="stable"), axis=1)
    chosen = np.where(ranks < (count - suspects)[:, None], weights, 0.0)
    shares: Float64 = chosen / chosen.sum(axis=1, keepdims=True)
    return shares


def _distances(products: Float64, shares: Float64) -> Float64:
    along = np.einsum("bij,bj->bi", products, shares)
    own = np.einsum("bi,bi->b", along, shares)
    squares = own[:, None] - 2 * along + np.einsum("bii->bi", products)
    distances: Float64 = np.sqrt(np.maximum(squares, 0))
    return distances


def _places(plan: ModelPlan, term: Term) -> Indices:
    """Return where each block of the plan begins among a term's values; −1: it is not there."""
    places = np.full(plan.block_count, -1, dtype=np.int64)
    sizes = plan.block_sizes[term.blocks.ids]
    places[term.blocks.ids] = np.cumsum(sizes) - sizes
    return places


def _add_products(
    products: Float64, terms: Sequence[Term], places: Sequence[Indices], block: int, plan: ModelPlan
) -> None:
    """Add the inner products of a block's vectors, less their mean, which loses no distance."""
    holders = [number for number, place in enumerate(places) if place[block] >= 0]
    size, step = int(plan.block_sizes[block]), max(1, ROOM // len(holders))
    found = np.zeros((len(holders), len(holders)))
    for low in range(0, size, step):
        high = min(low + step, size)
        values = np.empty((len(holders), high - low))
        for row, number in enumerate(holders):
            first = int(places[number][block])
            np.copyto(values[row], terms[number].blocks.values[first + low : first + high])
            values[row] *= terms[number].factor
        values -= values.mean(axis=0)
        for row in range(len(holders)):
            found[row, row:] += np.einsum("jk,k->j", values[row:], values[row])
    found = np.triu(found) + np.triu(found, 1).T
    products[np.ix_(holders, holders)] = found
