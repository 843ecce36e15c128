"""Trust in memory, measured in every round from the movements that arrived.

Two questions, each answered by a regression through the origin and cut to [0, 1]:

- `own` λ: does a device's remembered movement tell its new one? `Σ w ⟨D_n, u_n⟩ / Σ w ‖u_n‖²` over
  the fresh movements and the blocks that memory has of the same device.
- `alone` μ: does the mean of memory tell the fresh mean? `Σ ⟨D̄_i, ū_i⟩ / Σ ‖ū_i‖²` over the blocks
  that were trained in the round.

Where nothing can be compared, trust is 0. Sums are float64 and made a piece of the model at a time,
in a fixed order, so the result does not depend on the number of threads. Nothing is kept from round
to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Memory
from coordinator.aggregate.robust.sums import (
    PIECE,
    Float64,
    PlacedBlocks,
    over_shards,
    place_blocks,
    spread,
)
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs


@dataclass(frozen=True, slots=True)
class MemoryTrust:
    """Trust in memory in one round."""

    own: float
    """λ, in [0, 1]: the share of `ū_i` and `u_n,i` that counts where a block was trained."""
    alone: float
    """μ, in [0, 1]: the share of `ū_i` that moves a block nobody trained."""
    ratio: float | None
    """`‖ū‖ / ‖D̄‖`, the remembered mean movement relative to the fresh one, over the blocks that
    were trained and that memory has; None if there are none, or they did not move."""


def measure_trust(
    memory: Memory,
    fresh: Sequence[Contribution],
    weights: Sequence[float],
    *,
    learning_rate: float,
    mean: Float32,
    remembered: Float64,
    threads: int = 1,
) -> MemoryTrust:
    """Compare fresh movements with memory, before they enter it.

    `mean` is the fresh mean; `remembered` turns memory's running sum into `ū`, block by block, and
    is 0 for blocks that are not to be compared.
    """
    along = length = 0.0
    placed_parts = place_blocks(memory.plan, [part.blocks for part in fresh])
    for part, placed, weight in zip(fresh, placed_parts, weights, strict=True):
        for piece in memory.recall(part.device, part.blocks.ids):
            rate = learning_rate / piece.made.learning_rate
            shared, own = _products(memory, placed, piece.blocks, threads)
            along += weight * rate * shared
            length += weight * rate**2 * own
    shared, old, new = _mean_products(memory, mean, remembered, threads)
    return MemoryTrust(
        own=_share(along, length),
        alone=_share(shared, old),
        ratio=float(np.sqrt(old / new)) if new > 0 else None,
    )


def _share(along: float, length: float) -> float:
    return min(1.0, max(0.0, along / length)) if length > 0 else 0.0


def _products(
    memory: Memory, placed: PlacedBlocks, old: Blocks, threads: int
) -> tuple[float, float]:
    """Return the products of old values with a fresh movement, and with themselves."""
    pieces = [
        (low, min(low + PIECE, whole.stop), within.start - whole.start)
        for whole, within in block_runs(old.ids, memory.plan.block_offsets)
        for low in range(whole.start, whole.stop, PIECE)
    ]
    sums = np.zeros((len(pieces), 2))

    def work(first: int, last: int) -> None:
        for number in range(first, last):
            low, high, shift = pieces[number]
            for start, end, values in placed.between(low, high):
                one = old.values[start + shift : end + shift].astype(np.float64)
                sums[number, 0] += np.einsum("i,i->", values.astype(np.float64), one)
                sums[number, 1] += np.einsum("i,i->", one, one)

    over_shards(len(pieces), threads, work)
    shared, own = sums.sum(axis=0).tolist()
    return shared, own


def _mean_products(
    memory: Memory, mean: Float32, remembered: Float64, threads: int
) -> tuple[float, float, float]:
    """Return ⟨D̄, ū⟩, ‖ū‖² and ‖D̄‖² over the blocks that are compared."""
    pieces = -(-len(mean) // PIECE)
    sums = np.zeros((pieces, 3))

    def work(first: int, last: int) -> None:
        for number in range(first, last):
            low, high = number * PIECE, min((number + 1) * PIECE, len(mean))
            old: Float64 = spread(memory.plan, remembered, low, high)
            new = mean[low:high] * (old > 0)
            old *= memory.total[low:high]
            pairs = ((new, old), (old, old), (new, new))
            sums[number] = [np.einsum("i,i->", a.astype(np.float64), b) for a, b in pairs]

    over_shards(pieces, threads, work)
    shared, old, new = sums.sum(axis=0).tolist()
    return shared, old, new
