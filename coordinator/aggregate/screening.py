"""Finds movements out of the ordinary: per-block RMS against the usual RMS of that level.

Movements are compared per unit of learning rate, so a schedule does not look like an attack. A
level is unknown until some movements of it were accepted; until then it is judged by the nearest
known level. One movement cannot shift the usual RMS far: a block counts as at most twice the usual
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

Float64 = NDArray[np.float64]

MIN_SEEN = 5
"""Movements of a level that held a block before its RMS is judged."""
MEMORY = 0.1
"""Share of the newest movement in the usual RMS."""
LEARNED = 2.0
"""Limit, in multiples of the usual RMS, that a movement counts with in the next usual RMS."""
PIECE = 2**20
"""Values squared at a time, unless a single block has more."""
FLOOR = 0.01
"""No block is expected to move by less than this share of the RMS over all blocks of a level."""


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Mean square movement over γ² per block of one level, and the number of movements."""

    square: Float64
    times: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Size of a movement: per block that it holds, the mean square over γ²."""

    level: float
    blocks: int
    """Blocks of the whole plan."""
    ids: Indices
    square: Float64


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual movements of each level. A value: `learn` gives a new one."""

    levels: Mapping[float, _Seen] = field(default_factory=dict)

    def objection(self, plan: ModelPlan, scale: Scale, limit: float) -> str | None:
        """Name the block of a movement whose RMS is above `limit` times the usual; None if none."""
        found = self._expected(scale)
        if found is None:
            return None
        expected, judged = found
        over = np.zeros(len(scale.ids))
        np.divide(scale.square, expected, out=over, where=judged)
        worst = int(np.argmax(over))
        if over[worst] <= limit**2:
            return None
        block = int(scale.ids[worst])
        name = plan.tensors[int(plan.block_tensors[block])].name
        return (
            f"block {block} of {name!r} moves by {math.sqrt(over[worst]):.3g} times the RMS that "
            f"level {scale.level:.0%} usually sends; the limit is {limit:g}"
        )

    def _expected(self, scale: Scale) -> tuple[Float64, NDArray[np.bool_]] | None:
        """Find the usual mean square of the movement's blocks, and which of them can be judged."""
        for key in sorted(self.levels, key=lambda level: abs(level - scale.level)):
            seen = self.levels[key]
            usual, known = seen.square[scale.ids], seen.times[scale.ids] >= MIN_SEEN
            if known.any():
                expected = np.maximum(usual, FLOOR**2 * float(usual[known].mean()))
                return expected, known & (expected > 0)
        return None

    def learn(self, scale: Scale) -> Usual:
        """Return the usual movements once this one was accepted."""
        key, ids = _key(scale.level), scale.ids
        seen = self.levels.get(key)
        if seen is None:
            blocks = scale.blocks
            square, times = np.zeros(blocks), np.zeros(blocks, dtype=np.int64)
        else:
            square, times = seen.square.copy(), seen.times.copy()
        found = self._expected(scale)
        learned = scale.square
        if found is not None:
            expected, judged = found
            learned = np.where(judged, np.minimum(learned, LEARNED**2 * expected), learned)
        times[ids] += 1
        share = np.maximum(1 / times[ids], MEMORY)
        square[ids] += share * (learned - square[ids])
        return Usual({**self.levels, key: _Seen(square, times)})


def scale_of(plan: ModelPlan, blocks: Blocks, *, level: float, learning_rate: float) -> Scale:
    """Measure a movement of these blocks."""
    sizes = plan.block_sizes[blocks.ids]
    square = block_squares(blocks.values, sizes) / (np.maximum(sizes, 1) * learning_rate**2)
    return Scale(level, plan.block_count, blocks.ids, square)


def block_squares(
    values: NDArray[np.float32], sizes: NDArray[np.int64], *, piece: int = PIECE
) -> Float64:
    """Sum the squared values of each block; blocks lie one behind the other."""
    ends = np.cumsum(sizes)
    result = np.zeros(len(sizes))
    first = 0
    while first < len(sizes):  # in pieces: a float64 copy of a model is large
        start = int(ends[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(ends, start + piece, side="right")))
        with np.errstate(over="ignore"):
            squares = np.square(values[start : int(ends[behind - 1])], dtype=np.float64)
        starts = ends[first:behind] - sizes[first:behind] - start
        result[first:behind] = np.add.reduceat(squares, starts)
        first = behind
    return result


def _key(level: float) -> float:
    """Treat levels that agree to a hundredth as one."""
    return round(level, 2)
