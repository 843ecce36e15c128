"""Clipping: movements longer than those of their round are shortened to them.

`clip` shortens a whole movement to a fixed norm, as devices shorten gradients. All others clip
**block by block**: a block is compared with the same block of the other devices, so levels need no
yardstick of their own, and no device can spend the length of its whole movement on one block. The
yardstick of block `i` is `factor` times the median norm of `D_n,i / γ_n` over the cohort, that is
the fresh and the replayed movements that hold it. Of two middle ones the lower is taken, so that
the yardstick is no longer than the longest honest block while bad devices are at most half.

- Where at most two devices hold `i`, the yardstick comes from the tensor: the median, over the
  cohort, of the RMS over what each device holds of it.
- No yardstick is below a tenth of that, so that a block which most devices leave alone (an
  embedding's rare rows) can still learn from the others.
- A cohort of fewer than three has no median: nothing is clipped.

Adaptive clipping at a quantile of the round's norms: Andrew et al., *Differentially Private
Learning with Adaptive Clipping*, NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.robust.choice import THIN, Robust
from coordinator.aggregate.robust.scratch import spool
from coordinator.aggregate.robust.sums import Float64
from coordinator.aggregate.robust.threads import side_by_side
from coordinator.aggregate.screening import block_squares
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

FLOOR = 0.1
"""Share of a tensor's usual RMS that no yardstick of its blocks is below."""

ROOM = 1 << 20
"""Norms that are sorted at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Lengths of one movement: per block that it holds, the squared norm over γ²."""

    ids: Indices
    squares: Float64


def measure(plan: ModelPlan, parts: Sequence[Contribution], *, threads: int = 1) -> list[Lengths]:
    """Measure movements, each in the next free thread."""

    def one(part: Contribution) -> Lengths:
        sizes = plan.block_sizes[part.blocks.ids]
        squares = block_squares(part.blocks.values, sizes) / part.learning_rate**2
        return Lengths(part.blocks.ids, squares)

    if threads == 1:
        return [one(part) for part in parts]
    with ThreadPoolExecutor(threads) as pool:
        return side_by_side(pool, [partial(one, part) for part in parts])


def yardstick(plan: ModelPlan, cohort: Sequence[Lengths]) -> Float64:
    """Return the squared norm over γ² that each block may have; infinite in a small cohort."""
    cohort = [each for each in cohort if len(each.ids)]
    if len(cohort) <= THIN:
        return np.full(plan.block_count, np.inf)
    sizes = plan.block_sizes
    held = [sizes[each.ids] for each in cohort]
    pairs = list(zip(cohort, held, strict=True))
    totals = [float(each.squares.sum()) / float(own.sum()) for each, own in pairs]
    usual = FLOOR**2 * _lower_median(np.array([totals]))[0]
    tensors, count = plan.block_tensors, len(plan.tensors)
    by_tensor = np.full((count, len(cohort)), np.inf)
    for column, (each, own) in enumerate(pairs):
        square = np.bincount(tensors[each.ids], each.squares, count)
        size = np.bincount(tensors[each.ids], own, count)
        np.divide(square, size, out=by_tensor[:, column], where=size > 0)
    of_tensor = _lower_median(by_tensor)
    few = np.isfinite(by_tensor).sum(axis=1) <= THIN
    of_tensor = np.maximum(np.where(few, usual / FLOOR**2, of_tensor), usual)
    least = of_tensor[tensors] * sizes
    medians, coverage = _block_medians(plan, cohort)
    limit: Float64 = np.where(coverage <= THIN, least, np.maximum(medians, FLOOR**2 * least))
    return limit


def clipped(
    plan: ModelPlan,
    robust: Robust,
    cohort: Sequence[Contribution],
    others: Sequence[Contribution] = (),
    *,
    root: Float64 | None = None,
    threads: int = 1,
    scratch: Path | None = None,
) -> list[Contribution]:
    """Return the cohort, then the others, with what is too long shortened.

    `others`, late movements, have no say in the yardstick. `root` is one that replaces the
    cohort's: squared norms over γ². Movements that are short enough are returned as they are.
    """
    parts = [*cohort, *others]
    lengths = measure(plan, parts, threads=threads)
    if robust.name == "clip" and robust.norm is not None:
        shares = [
            _whole_share(part, each, robust.norm) for part, each in zip(parts, lengths, strict=True)
        ]
    else:
        limit = yardstick(plan, lengths[: len(cohort)]) if root is None else root
        shares = [_block_shares(each, robust.factor**2 * limit[each.ids]) for each in lengths]
    long = [number for number, share in enumerate(shares) if (share < 1).any()]
    spooled = spool((_shortened(plan, parts[number], shares[number]) for number in long), scratch)
    for number, values in zip(long, spooled, strict=True):
        parts[number] = replace(parts[number], blocks=Blocks(parts[number].blocks.ids, values))
    return parts


def _whole_share(part: Contribution, lengths: Lengths, norm: float) -> Float64:
    length = float(np.sqrt(lengths.squares.sum())) * part.learning_rate
    return np.full(len(lengths.ids), norm / length if length > norm else 1.0)


def _block_shares(lengths: Lengths, limit: Float64) -> Float64:
    long = lengths.squares > limit
    ratio = np.divide(limit, lengths.squares, out=np.ones_like(limit), where=long)
    return np.sqrt(ratio)


def _shortened(plan: ModelPlan, part: Contribution, share: Float64) -> Float32:
    factors = np.repeat(share.astype(np.float32), plan.block_sizes[part.blocks.ids])
    shortened: Float32 = np.multiply(part.blocks.values, factors, out=factors)
    return shortened


def _block_medians(plan: ModelPlan, cohort: Sequence[Lengths]) -> tuple[Float64, Indices]:
    """Return the median square of each block over those that hold it, and their number."""
    medians, coverage = np.zeros(plan.block_count), np.zeros(plan.block_count, dtype=np.int64)
    for each in cohort:
        coverage[each.ids] += 1
    step = max(1, ROOM // len(cohort))
    for low in range(0, plan.block_count, step):
        high = min(low + step, plan.block_count)
        room = np.full((high - low, len(cohort)), np.inf)
        for column, each in enumerate(cohort):
            first, last = np.searchsorted(each.ids, (low, high))
            room[each.ids[first:last] - low, column] = each.squares[first:last]
        medians[low:high] = _lower_median(room)
    return medians, coverage


def _lower_median(rows: NDArray[np.float64]) -> Float64:
    """Return the lower median of the finite numbers in each row; infinite where there are none."""
    found = np.isfinite(rows).sum(axis=1)
    middle = np.maximum(found - 1, 0) // 2
    return np.take_along_axis(np.sort(rows, axis=1), middle[:, None], axis=1)[:, 0]
