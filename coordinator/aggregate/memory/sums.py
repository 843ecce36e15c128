"""Running sums over all entries, and the one pass that takes new values and lets old ones go.

Three sums are made in device-name order: the new values as they were given, the same as they are
held, and the old values that leave. The first minus the last is what a rule wants to know; the
second minus the last moves `total`, which therefore stays the sum of what is held.

The pass goes over the model in spans. In a span, long stretches of each device's values are first
rounded and stored, or read; then their terms are added up tile by tile, so that a tile's sums stay
in a core's cache. Few long numpy calls let threads work side by side: each gives up the
interpreter's lock for as long as it runs. Terms of the most common factor are added as they are,
and the sum multiplied once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Float64
from coordinator.aggregate.memory.runs import TILE, EntryRun, Runs, tile_count
from coordinator.aggregate.memory.store import Slot
from coordinator.aggregate.memory.values import Held, ValueType
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

STRETCH = 1 << 17
"""Values of a device that a span is to hold, so that calls are long."""

MOST_TILES = 16
"""Of a span."""


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """New values of one device: all of `values` is taken, and put in the slot."""

    ids: Indices
    values: Float32
    runs: Runs
    factor: float
    """What a value enters `total` with."""
    weight: float
    slot: Slot


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """Old values of one movement: those that the runs name."""

    ids: Indices
    values: Held
    runs: Runs
    factor: float
    weight: float


class Sums:
    """`total`, `weight` and `entries` of a memory, and the threads that work on them."""

    def __init__(self, plan: ModelPlan, kind: ValueType, *, totals: bool, threads: int) -> None:
        self._plan = plan
        self._kind = kind
        self._totals = totals
        self.total: Float64 = np.zeros(plan.parameters if totals else 0)
        self.weight: Float64 = np.zeros(plan.block_count if totals else 0)
        self.entries: NDArray[np.int64] = np.zeros(plan.block_count, dtype=np.int64)
        self._tiles = tile_count(plan.parameters)
        self._pool = ThreadPoolExecutor(threads, "memory") if threads > 1 else None
        self._local = threading.local()

    @property
    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """All sums, as they are made durable."""
        return self.total, self.weight, self.entries

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def fade(self, factor: float) -> None:
        """Multiply `total`."""
        if not self._totals or factor == 1.0:
            return

        def work(start: int) -> None:
            part = self.total[start * TILE : (start + MOST_TILES) * TILE]
            np.multiply(part, factor, out=part)

        self.each(work, range(0, self._tiles, MOST_TILES))

    def replace(
        self, coming: Sequence[Coming], leaving: Sequence[Leaving], change: Float64 | None = None
    ) -> None:
        """Put new values in their slots, add them, take off the old; write the change."""
        common_new = _most_common(one.factor for one in coming)
        parts: list[Coming | Leaving] = [*coming, *leaving]
        common = _most_common(
            part.factor * self._kind.unit * part.runs.runs[0][3] for part in parts
        )
        span = _span_tiles(parts, self._plan.parameters)

        def work(first: int) -> None:
            tiles = range(first, min(first + span, self._tiles))
            terms = _Terms(self._kind, self._room(), tiles, self._totals)
            for one in coming:
                terms.take(one, common_new, common)
            if self._totals:
                for old in leaving:
                    terms.let_go(old, common)
                self._add_up(terms, tiles, (common_new, common, common), change)

        self.each(work, range(0, self._tiles, span))
        for part in parts:
            sign = 1 if isinstance(part, Coming) else -1
            self.entries[part.ids] += sign
            if self._totals:
                self.weight[part.ids] += sign * part.weight
        self._clear_empty(leaving)

    def each(self, work: Callable[[int], None], numbers: range) -> None:
        """Do `work(number)` for all numbers, in whatever thread is free."""
        if self._pool is None:
            for number in numbers:
                work(number)
        else:
            for _ in self._pool.map(work, numbers):
                pass

    def _add_up(
        self,
        terms: _Terms,
        tiles: range,
        factors: tuple[float, float, float],
        change: Float64 | None,
    ) -> None:
        """Add the terms of a span to `total`, and write the change."""
        room, scaled = self._room(), self._kind.scaled
        for tile in tiles:
            low = tile * TILE
            size = min(TILE, self._plan.parameters - low)
            sums = (room.new[:size], room.held[:size], room.left[:size])
            lists = terms.of_tile(tile)
            if not any(lists):
                if change is not None:
                    change[low : low + size] = 0
                continue
            for part, factor, found in zip(sums, factors, lists, strict=True):
                part.fill(0)
                if found:
                    _add_terms(part, found, room.float64)
                    np.multiply(part, factor, out=part)
            new, held, left = sums
            np.subtract(new, left, out=new)
            if scaled:
                np.subtract(held, left, out=held)
            total = self.total[low : low + size]
            np.add(total, held if scaled else new, out=total)
            if change is not None:
                change[low : low + size] = new

    def _clear_empty(self, leaving: Sequence[Leaving]) -> None:
        """Where no entry is left the sum is zero, whatever rounding made of it."""
        if not self._totals or not leaving:
            return
        gone = np.unique(np.concatenate([old.ids for old in leaving]))
        offsets = self._plan.block_offsets
        for block in gone[self.entries[gone] == 0].tolist():
            self.total[offsets[block] : offsets[block + 1]] = 0
            self.weight[block] = 0

    def _room(self) -> _Room:
        room: _Room | None = getattr(self._local, "room", None)
        if room is None:
            room = self._local.room = _Room()
        return room


MemoryTerm = tuple[int, int, Held, int, float]
"""Start and end in the tile, an array, where the terms start in it, what to multiply them by."""


class _Terms:
    """What is to be added up in a span of tiles."""

    def __init__(self, kind: ValueType, room: _Room, tiles: range, totals: bool) -> None:
        self._kind = kind
        self._room = room
        self._tiles = tiles
        self._totals = totals
        self._lists: list[tuple[list[MemoryTerm], list[MemoryTerm], list[MemoryTerm]]] = [
            ([], [], []) for _ in tiles
        ]
        room.used = 0

    def of_tile(self, tile: int) -> tuple[list[MemoryTerm], list[MemoryTerm], list[MemoryTerm]]:
        """Terms of new values as given, as held, and of old values."""
        return self._lists[tile - self._tiles.start]

    def take(self, one: Coming, common_new: float, common: float) -> None:
        """Store a device's values in the span, and note their terms."""
        by_tile = one.runs
        first, last = by_tile.tiles[self._tiles.start], by_tile.tiles[self._tiles.stop]
        if first == last:
            return
        runs = by_tile.runs[first:last]
        start = runs[0][2]
        end = runs[-1][2] + runs[-1][1] - runs[-1][0]
        values = one.values[start:end]
        if self._kind.scaled:
            short = self._room.short(end - start, self._kind)
            terms = self._room.terms(end - start)
            for low, high, scale in _stretches(runs):
                part = slice(low - start, high - start)
                self._kind.shorten(values[part], scale, short[part], terms[part])
            if self._totals:
                self._note(1, one.runs, one.factor, common, [(start, end, terms)])
        else:
            short = values
        if self._totals:
            ratio = one.factor / common_new
            for tile in self._tiles:
                self.of_tile(tile)[0].extend(
                    (a, b, values, source - start, ratio)
                    for a, b, source, _ in by_tile.within(tile)
                )
        one.slot.put(start, short)

    def let_go(self, old: Leaving, common: float) -> None:
        """Read a movement's old values in the span, and note their terms."""
        runs = old.runs.runs[old.runs.tiles[self._tiles.start] : old.runs.tiles[self._tiles.stop]]
        parts = []
        for low, high in _contiguous(runs):
            room = self._room.terms(high - low) if self._kind.scaled else old.values[:0]
            parts.append((low, high, self._kind.terms(old.values[low:high], room)))
        self._note(2, old.runs, old.factor, common, parts)

    def _note(
        self,
        which: int,
        runs: Runs,
        factor: float,
        common: float,
        parts: list[tuple[int, int, Held]],
    ) -> None:
        """Note terms of runs whose values lie in these parts of the device's own."""
        following = iter(parts)
        low = high = 0
        for tile in self._tiles:
            noted = self.of_tile(tile)[which]
            for start, end, source, scale in runs.within(tile):
                while source >= high:
                    low, high, terms = next(following)
                ratio = factor * self._kind.unit * scale / common
                noted.append((start, end, terms, source - low, ratio))


class _Room:
    """One thread's room to work in."""

    def __init__(self) -> None:
        self.new: Float64 = np.empty(TILE)
        self.held: Float64 = np.empty(TILE)
        self.left: Float64 = np.empty(TILE)
        self.float64: Float64 = np.empty(TILE)
        self.used = 0
        self._terms: list[Float32] = []
        self._short: Held = np.empty(0)

    def short(self, size: int, kind: ValueType) -> Held:
        """Room for held values, until it is asked for again."""
        if len(self._short) < size:
            self._short = np.empty(size, dtype=kind.dtype)
        return self._short[:size]

    def terms(self, size: int) -> Float32:
        """Room for terms, until `used` is set back."""
        if self.used == len(self._terms):
            self._terms.append(np.empty(size, dtype=np.float32))
        elif len(self._terms[self.used]) < size:
            self._terms[self.used] = np.empty(size, dtype=np.float32)
        self.used += 1
        return self._terms[self.used - 1][:size]


def _add_terms(sums: Float64, terms: list[MemoryTerm], scratch: Float64) -> None:
    for start, end, array, source, ratio in terms:
        part, values = sums[start:end], array[source : source + end - start]
        if ratio == 1.0:
            np.add(part, values, out=part)
        else:
            product = np.multiply(values, np.float64(ratio), out=scratch[: end - start])
            np.add(part, product, out=part)


def _stretches(runs: list[EntryRun]) -> list[tuple[int, int, float]]:
    """Stretches of one scale among a device's own values: start, end, scale."""
    found: list[tuple[int, int, float]] = []
    for start, end, source, scale in runs:
        if found and found[-1][1:] == (source, scale):
            found[-1] = (found[-1][0], source + end - start, scale)
        else:
            found.append((source, source + end - start, scale))
    return found


def _contiguous(runs: list[EntryRun]) -> list[tuple[int, int]]:
    """Stretches without gaps among a device's own values."""
    found: list[tuple[int, int]] = []
    for start, end, source, _ in runs:
        if found and found[-1][1] == source:
            found[-1] = (found[-1][0], source + end - start)
        else:
            found.append((source, source + end - start))
    return found


def _span_tiles(parts: Sequence[Coming | Leaving], parameters: int) -> int:
    """Tiles of a span: as many as hold about `STRETCH` values of a device."""
    values = sum(len(part.values) for part in parts)
    return max(1, min(MOST_TILES, STRETCH * len(parts) * parameters // max(1, values * TILE)))


def _most_common(factors: Iterable[float]) -> float:
    """Never 0, which nothing can be a multiple of: a device without samples has that factor."""
    counted = Counter(factor for factor in factors if factor).most_common(1)
    return counted[0][0] if counted else 1.0
