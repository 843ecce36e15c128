"""Finds movements out of the ordinary, block by block: beside the past, and beside its cohort.

Movements are compared per unit of learning rate, so a schedule does not look like an attack.

The past (`Usual`) is the usual RMS of every block at a level. A level is unknown until some
movements of it were counted; until then it is judged by the nearest known level. One movement
cannot shift the usual RMS far: a block counts as at most twice the usual one.

The cohort (`cohort_objections`) is the movements of the same round. A block is judged by its median
RMS over the movements of that level; where fewer than `MIN_COHORT` hold it, over all levels, and
where these are too few as well, by the median over its tensor, whichever blocks they hold. As long
as fewer than half of them are bad, the median is that of an honest one. It is the lower of two
middle ones: two devices in a cohort of four cannot make themselves the yardstick. A block that most
hardly move is judged by the RMS over all blocks, or a device with rare data would stand out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

Float64 = NDArray[np.float64]
K = TypeVar("K")

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
MIN_COHORT = 3
"""Movements of a round that hold a block before they are compared with each other."""
USUAL = "usual/"
"""Beginning of the names of arrays in a checkpoint that say what is usual."""
EXPECTED = 2**20
"""Blocks whose expected sizes are remembered within a round."""
TABLE = 2**21
"""Most values of the table of which medians are taken at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Mean square movement over γ² per block of one level, and the number of movements."""

    square: Float64
    times: NDArray[np.int64]

    @classmethod
    def like(cls, seen: _Seen | None, blocks: int) -> _Seen:
        """Return a copy; None: of a level that was never seen."""
        if seen is None:
            return cls(np.zeros(blocks), np.zeros(blocks, dtype=np.int64))
        return cls(seen.square.copy(), seen.times.copy())


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """Size of a movement: per block that it holds, the mean square over γ²."""

    level: float
    blocks: int
    """Blocks of the whole plan."""
    ids: Indices
    square: Float64


_Expected = tuple[Float64, NDArray[np.bool_]] | None
"""Per block of a movement, the usual mean square, and if it can be judged; None: nothing can."""


@dataclass(frozen=True, slots=True)
class Usual:
    """Usual movements of each level. A value: `learn` gives a new one."""

    levels: Mapping[float, _Seen] = field(default_factory=dict)
    _found: dict[tuple[int, float], tuple[Indices, _Expected]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Expectations of the movements of a round, by the blocks that they hold: few differ."""

    def objection(self, plan: ModelPlan, scale: Scale, limit: float) -> str | None:
        """Name the block of a movement whose RMS is above `limit` times the usual; None if none."""
        key = id(scale.ids), scale.level
        known = self._found.get(key)
        if known is None:
            if len(self._found) * len(scale.ids) > EXPECTED:
                self._found.clear()
            # With the ids, so that no others get their place in memory.
            known = self._found[key] = scale.ids, _expected(self.levels, scale)
        if known[1] is None:
            return None
        expected, judged = known[1]
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

    def learn(self, *scales: Scale) -> Usual:
        """Return the usual movements once these were accepted, one after the other."""
        levels, own = dict(self.levels), set[float]()
        for scale in scales:
            key, ids = _key(scale.level), scale.ids
            if key not in own:
                own.add(key)
                levels[key] = _Seen.like(levels.get(key), scale.blocks)
            seen, learned = levels[key], scale.square
            found = _expected(levels, scale)
            if found is not None:
                expected, judged = found
                learned = np.where(judged, np.minimum(learned, LEARNED**2 * expected), learned)
            times = seen.times[ids] + 1
            seen.times[ids] = times
            square = seen.square[ids]
            seen.square[ids] = square + np.maximum(1 / times, MEMORY) * (learned - square)
        return Usual(levels)


def _expected(levels: Mapping[float, _Seen], scale: Scale) -> _Expected:
    """Find the usual mean square of the movement's blocks, and which of them can be judged."""
    for key in sorted(levels, key=lambda level: (abs(level - scale.level), level)):
        seen = levels[key]
        usual, known = seen.square[scale.ids], seen.times[scale.ids] >= MIN_SEEN
        if known.any():
            expected = np.maximum(usual, FLOOR**2 * _mean(usual[known]))
            return expected, known & (expected > 0)
    return None


def _mean(values: Float64) -> float:
    """Return the mean; several times as fast as numpy's for the few blocks of a small model."""
    return float(np.add.reduce(values)) / len(values)


def pack_usual(usual: Usual) -> dict[str, NDArray[Any]]:
    """Return what is usual as named arrays, for a checkpoint."""
    found: dict[str, NDArray[Any]] = {}
    for level, seen in usual.levels.items():
        found[f"{USUAL}{level}/square"] = seen.square
        found[f"{USUAL}{level}/times"] = seen.times
    return found


def unpack_usual(arrays: Mapping[str, NDArray[Any]]) -> Usual:
    """Read what is usual from a checkpoint's arrays. Raises `KeyError`, `ValueError`."""
    names = [name for name in arrays if name.startswith(USUAL) and name.endswith("/square")]
    levels = sorted(float(name.removeprefix(USUAL).removesuffix("/square")) for name in names)
    return Usual(
        {
            level: _Seen(arrays[f"{USUAL}{level}/square"], arrays[f"{USUAL}{level}/times"])
            for level in levels
        }
    )


def cohort_objections(
    plan: ModelPlan, cohort: Mapping[str, Scale], others: Mapping[str, Scale], limit: float
) -> dict[str, str]:
    """Return the devices with a block above `limit` times the cohort's median RMS, and the words.

    `others` are judged too, but do not belong to the cohort: replays. The result does not depend on
    the order of either.
    """
    levels: dict[float, list[Scale]] = {}
    for scale in cohort.values():
        levels.setdefault(_key(scale.level), []).append(scale)
    over_all = _medians(plan.block_count, list(cohort.values()))
    tensors = plan.block_tensors
    of_tensor = _medians(len(plan.tensors), _by_tensor(plan, list(cohort.values())))
    over_all = np.where(np.isnan(over_all), of_tensor[tensors], over_all)
    of_level = {
        level: _medians(plan.block_count, scales) if len(levels) > 1 else over_all
        for level, scales in levels.items()
    }
    judged = {**others, **cohort}
    found: dict[str, str] = {}
    for alike in _alike(judged, lambda name: _key(judged[name].level)):
        first = judged[alike[0]]
        own = of_level.get(_key(first.level), over_all)[first.ids]
        usual = np.where(np.isnan(own), over_all[first.ids], own)
        known = np.isfinite(usual)
        if not known.any():
            continue
        # Of a few devices, most may leave a block alone: it may move as much as the others do.
        expected = np.maximum(usual, _mean(usual[known]))
        judges, rows = known & (expected > 0), max(1, TABLE // len(first.ids))
        for start in range(0, len(alike), rows):
            names = alike[start : start + rows]
            over = np.zeros((len(names), len(first.ids)))
            squares = np.stack([judged[name].square for name in names])
            np.divide(squares, expected, out=over, where=judges)
            for row in np.flatnonzero(over.max(axis=1) > limit**2).tolist():
                worst = int(np.argmax(over[row]))
                block = int(first.ids[worst])
                tensor = plan.tensors[int(tensors[block])].name
                found[names[row]] = (
                    f"block {block} of {tensor!r} moves by {math.sqrt(over[row, worst]):.3g} times "
                    f"the median RMS of this round's {len(cohort)} movements; the limit is "
                    f"{limit:g}"
                )
    return found


def _alike(
    scales: Mapping[K, Scale], kind: Callable[[K], object] = lambda _: None
) -> list[list[K]]:
    """Put those together that hold the same blocks, as those of equal submodels do."""
    found: dict[tuple[int, object], list[K]] = {}
    for name, scale in scales.items():
        found.setdefault((id(scale.ids), kind(name)), []).append(name)
    return list(found.values())


def _by_tensor(plan: ModelPlan, scales: Sequence[Scale]) -> list[Scale]:
    """Return the sizes of movements with a mean for every tensor in place of its blocks."""
    found = []
    for alike in _alike(dict(enumerate(scales))):
        ids, at = np.unique(plan.block_tensors[scales[alike[0]].ids], return_inverse=True)
        counts = np.bincount(at)
        for number in alike:
            means = np.bincount(at, scales[number].square) / counts
            found.append(Scale(scales[number].level, len(plan.tensors), ids, means))
    return found


def _medians(blocks: int, scales: Sequence[Scale]) -> Float64:
    """Return the lower median of every block; NaN where too few movements hold it."""
    medians = np.full(blocks, np.nan)
    if len(scales) < MIN_COHORT:
        return medians
    width = max(1, TABLE // len(scales))
    groups = [[scales[number] for number in alike] for alike in _alike(dict(enumerate(scales)))]
    for start in range(0, blocks, width):
        stop = min(start + width, blocks)
        table = np.full((len(scales), stop - start), np.inf)
        held = np.zeros(stop - start, dtype=np.int64)
        row = 0
        for alike in groups:
            ids = alike[0].ids
            first, last = np.searchsorted(ids, (start, stop))
            at = ids[first:last] - start
            table[row : row + len(alike), at] = [each.square[first:last] for each in alike]
            held[at] += len(alike)
            row += len(alike)
        table.sort(axis=0)
        middle = np.take_along_axis(table, np.maximum(held - 1, 0)[None] // 2, axis=0)[0]
        medians[start:stop] = np.where(held >= MIN_COHORT, middle, np.nan)
    return medians


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
    if len(values) <= piece:
        return np.add.reduceat(np.square(values, dtype=np.float64), ends - sizes)
    result = np.zeros(len(sizes))
    first = 0
    while first < len(sizes):  # in pieces: a float64 copy of a model is large
        start = int(ends[first] - sizes[first])
        behind = max(first + 1, int(np.searchsorted(ends, start + piece, side="right")))
        squares = np.square(values[start : int(ends[behind - 1])], dtype=np.float64)
        starts = ends[first:behind] - sizes[first:behind] - start
        result[first:behind] = np.add.reduceat(squares, starts)
        first = behind
    return result


def _key(level: float) -> float:
    """Treat levels that agree to a hundredth as one."""
    return round(level, 2)
