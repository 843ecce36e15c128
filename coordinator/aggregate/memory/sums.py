"""Running sums over all entries, and the one pass that takes new values and lets old ones go.

Three sums are made in device-name order: the new values as given, the same values as held, and the
old values that leave. The first minus the last is the change a rule asks for; the second minus the
last moves `total`, which therefore stays the sum of the held values.

The pass goes over the model in spans. In a span, long stretches of each device's values are first
rounded and stored, or read; then their terms are added up tile by tile, so that a tile's sums stay
in a core's cache. Few long numpy calls let threads work side by side: each gives up the
interpreter's lock for as long as it runs. Terms of the most common factor are added as they are,
and the sum multiplied once. The change of a span goes to its reader at once; that of the whole
model, two models large, is never held.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Float64, Reader
from coordinator.aggregate.memory.runs import TILE, EntryRun, Runs, tile_count
from coordinator.aggregate.memory.store import Slot
from coordinator.aggregate.memory.values import Held, ValueType
from coordinator.aggregate.robust.threads import side_by_side
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

STRETCH = 1 << 17
"""Values of a device that a span is to hold, so that calls are long."""

MOST_TILES = 16
"""Of a span."""

ROOM = 1 << 22
"""Terms of a span that a thread holds in float32 (16 MiB), unless one tile has more."""

PAGE = 1 << 20
"""Terms of one allocation."""


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """New values of one device: all of `values` is taken and put in the slot."""

    ids: Indices
    values: Float32
    runs: Runs
    factor: float
    """Factor of its values in `total`."""
    weight: float
    slot: Slot

    @property
    def size(self) -> int:
        """Number of values that come."""
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class Leaving:
    """Old values of one movement: those that the runs name."""

    ids: Indices
    values: Held
    runs: Runs
    factor: float
    weight: float
    size: int
    """Number of values that leave."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryBatch:
    """Movements of different devices that are added up before they change `total`."""

    coming: Sequence[Coming]
    leaving: Sequence[Leaving]

    @property
    def parts(self) -> list[Coming | Leaving]:
        """New values, then old ones."""
        return [*self.coming, *self.leaving]


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
        """All sums, in the order they are written to disk."""
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

    def replace(self, batches: Sequence[MemoryBatch], reader: Reader | None = None) -> None:
        """Put new values in their slots, add them, take off the old; show the change.

        A device is in one batch only. Batches change `total` one after the other, in one pass.
        """
        factors = [self._common_factors(batch) for batch in batches]
        span = min((self._span_tiles(batch) for batch in batches), default=1)

        def work(first: int) -> None:
            tiles = range(first, min(first + span, self._tiles))
            low, end = first * TILE, min(tiles.stop * TILE, self._plan.parameters)
            room = self._room()
            change = None if reader is None else room.change(end - low)
            for batch, (common_new, common) in zip(batches, factors, strict=True):
                terms = _Terms(self._kind, room, tiles, self._totals)
                for one in batch.coming:
                    terms.take(one, common_new, common)
                if self._totals:
                    for old in batch.leaving:
                        terms.let_go(old, common)
                    self._add_up(terms, tiles, (common_new, common, common), change)
            if reader is not None and change is not None:
                reader(low, change)

        self.each(work, range(0, self._tiles, span))
        for batch in batches:
            for part in batch.parts:
                sign = 1 if isinstance(part, Coming) else -1
                self.entries[part.ids] += sign
                if self._totals:
                    self.weight[part.ids] += sign * part.weight
            self._clear_empty(batch.leaving)

    def each(self, work: Callable[[int], None], numbers: range) -> None:
        """Run `work(number)` for all numbers, each in the next free thread."""
        if self._pool is None:
            for number in numbers:
                work(number)
        else:
            side_by_side(self._pool, [partial(work, number) for number in numbers])

    def _add_up(
        self,
        terms: _Terms,
        tiles: range,
        factors: tuple[float, float, float],
        change: Float64 | None,
    ) -> None:
        """Add the terms of a span to `total`, and to the span's change."""
        room, scaled = self._room(), self._kind.scaled
        for tile in tiles:
            low = tile * TILE
            size = min(TILE, self._plan.parameters - low)
            sums = (room.new[:size], room.held[:size], room.left[:size])
            lists = terms.of_tile(tile)
            if not any(lists):
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
                part = change[low - tiles.start * TILE :][:size]
                np.add(part, new, out=part)

    def _common_factors(self, batch: MemoryBatch) -> tuple[float, float]:
        """Most common factors of new values, and of all held ones with their scales."""
        held = (part.factor * self._kind.unit * part.runs.runs[0][3] for part in batch.parts)
        return _most_common(one.factor for one in batch.coming), _most_common(held)

    def _span_tiles(self, batch: MemoryBatch) -> int:
        """Tiles of a span: enough for about `STRETCH` values of a device, and at most `ROOM`."""
        parts = batch.parts
        lying = sum(len(part.values) for part in parts)
        span = STRETCH * len(parts) * self._plan.parameters // max(1, lying * TILE)
        if self._kind.scaled:
            terms = sum(part.size for part in parts)
            span = min(span, ROOM * self._plan.parameters // max(1, terms * TILE))
        return max(1, min(MOST_TILES, span))

    def _clear_empty(self, leaving: Sequence[Leaving]) -> None:
        """Set the sums to zero where no entry is left, whatever rounding made of them."""
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
"""Start and end in the tile, an array, the first term in it, the factor of the terms."""


class _Terms:
    """Terms to add up in a span of tiles."""

    def __init__(self, kind: ValueType, room: _Room, tiles: range, totals: bool) -> None:
        self._kind = kind
        self._room = room
        self._tiles = tiles
        self._totals = totals
        self._lists: list[tuple[list[MemoryTerm], list[MemoryTerm], list[MemoryTerm]]] = [
            ([], [], []) for _ in tiles
        ]
        room.clear()

    def of_tile(self, tile: int) -> tuple[list[MemoryTerm], list[MemoryTerm], list[MemoryTerm]]:
        """Return the terms of new values as given, as held, and of old values."""
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
            # An upload's numbers lie at any address, where numpy works many times slower.
            given = values if values.flags.aligned else terms
            if given is terms:
                np.copyto(terms, values)
            for low, high, scale in _stretches(runs):
                part = slice(low - start, high - start)
                self._kind.shorten(given[part], scale, short[part], terms[part])
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
    """Working space of one thread."""

    def __init__(self) -> None:
        self.new: Float64 = np.empty(TILE)
        self.held: Float64 = np.empty(TILE)
        self.left: Float64 = np.empty(TILE)
        self.float64: Float64 = np.empty(TILE)
        self._pages: list[Float32] = []
        self._page = 0
        """The page that terms are put in, and how much of it is used."""
        self._used = 0
        self._short: Held = np.empty(0)
        self._change: Float64 = np.empty(0)

    def change(self, size: int) -> Float64:
        """Zeros for the change of a span, until asked for again."""
        if len(self._change) < size:
            self._change = np.empty(size)
        part = self._change[:size]
        part.fill(0)
        return part

    def short(self, size: int, kind: ValueType) -> Held:
        """Room for held values, until asked for again."""
        if len(self._short) < size:
            self._short = np.empty(size, dtype=kind.dtype)
        return self._short[:size]

    def terms(self, size: int) -> Float32:
        """Room for terms, until `clear`."""
        if not self._pages or self._used + size > len(self._pages[self._page]):
            self._page += bool(self._used)
            self._used = 0
            if self._page >= len(self._pages) or len(self._pages[self._page]) < size:
                self._pages.insert(self._page, np.empty(max(size, PAGE), dtype=np.float32))
        self._used += size
        return self._pages[self._page][self._used - size : self._used]

    def clear(self) -> None:
        """Let all room for terms be used again."""
        self._page = self._used = 0


def _add_terms(sums: Float64, terms: list[MemoryTerm], scratch: Float64) -> None:
    for start, end, array, source, ratio in terms:
        part, values = sums[start:end], array[source : source + end - start]
        if ratio == 1.0:
            np.add(part, values, out=part)
        else:
            product = np.multiply(values, np.float64(ratio), out=scratch[: end - start])
            np.add(part, product, out=part)


def _stretches(runs: list[EntryRun]) -> list[tuple[int, int, float]]:
    """Find stretches of one scale among a device's own values: start, end, scale."""
    found: list[tuple[int, int, float]] = []
    for start, end, source, scale in runs:
        if found and found[-1][1:] == (source, scale):
            found[-1] = (found[-1][0], source + end - start, scale)
        else:
            found.append((source, source + end - start, scale))
    return found


def _contiguous(runs: list[EntryRun]) -> list[tuple[int, int]]:
    """Find stretches without gaps among a device's own values."""
    found: list[tuple[int, int]] = []
    for start, end, source, _ in runs:
        if found and found[-1][1] == source:
            found[-1] = (found[-1][0], source + end - start)
        else:
            found.append((source, source + end - start))
    return found


def _most_common(factors: Iterable[float]) -> float:
    """Pick the most common factor, never 0: a device without samples has that one."""
    counted = Counter(factor for factor in factors if factor).most_common(1)
    return counted[0][0] if counted else 1.0
