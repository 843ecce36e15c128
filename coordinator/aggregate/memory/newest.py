"""Memory over a store: takes newer blocks, drops the ones they replace, updates the sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory.contract import (
    Float64,
    Made,
    MemoryConfig,
    Piece,
    Reader,
    Rounds,
)
from coordinator.aggregate.memory.runs import find_runs
from coordinator.aggregate.memory.store import DeviceMemory, Store, Stored
from coordinator.aggregate.memory.sums import Coming, Leaving, MemoryBatch, Sums
from coordinator.aggregate.memory.values import VALUE_TYPES, Held, expand
from edge_sdk.protocol.errors import BlockError, StateError
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

MOST_DEVICES = 64
MOST_OLD = 256
"""Devices and old movements of a batch. Fixed: the last bits of the sums follow from them."""
MOST_SEGMENTS = 128
"""Files of old movements, above which a pass takes no further batch: each is an open map."""


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """A contribution, cut down to the blocks that are newer than what is held."""

    device: str
    made: Made
    ids: Indices
    values: Float32
    rounds: Rounds
    """The device's, with this movement included."""
    leaving: Sequence[Leaving]
    lost: Sequence[tuple[Stored, int, int]]


class Memory:
    """The newest movement of every device, block by block. Not safe for use by two threads.

    It lies over a store, which keeps the movements.
    """

    def __init__(
        self, plan: ModelPlan, config: MemoryConfig, store: Store, sums: Sums, now: int = 0
    ) -> None:
        self.plan = plan
        self.config = config
        self.total = sums.total
        """Per parameter, in block order: Σ weight · damping^(now − made) · u / learning_rate.

        Updated in place; not to be changed by others. Empty without sums."""
        self.weight = sums.weight
        """Per block, the sum of the entries' weights. Empty without sums."""
        self.entries = sums.entries
        """Per block, the number of entries."""
        self._store = store
        self._sums = sums
        self._kind = VALUE_TYPES[config.memory_type]
        self._now = now
        self._changed = False
        self._prepared = False
        self._broken = False

    @property
    def now(self) -> int:
        """Round that `advance` last went to; 0 at first."""
        return self._now

    # -- reading ----------------------------------------------------------------------------

    def recall(self, device: str, ids: Indices | None = None) -> list[Piece]:
        """Return the entries of a device, by round made; only of these blocks, if ids are given.

        `ids` are ascending. An unknown device has no pieces.
        """
        self._check_usable()
        kept = self._store.kept(device)
        wanted = np.ones(self.plan.block_count, dtype=bool)
        if ids is not None:
            wanted[...] = False
            wanted[ids] = True
        pieces = []
        for stored in kept.movements:
            live = stored.live(kept.rounds) & wanted[stored.ids]
            if live.any():
                pieces.append(Piece(stored.made, self._blocks(stored, live)))
        return pieces

    def rounds(self, device: str) -> Rounds:
        """Return per block the round its entry was made in; 0 where there is none. Read-only."""
        self._check_usable()
        rounds = self._store.kept(device).rounds
        rounds.flags.writeable = False
        return rounds

    def oldest(self) -> int | None:
        """Return the earliest round made that is still held; None when nothing is."""
        self._check_usable()
        return self._store.oldest()

    def _blocks(self, stored: Stored, live: NDArray[np.bool_]) -> Blocks:
        sizes = self.plan.block_sizes[stored.ids]
        values = expand(
            self._kind,
            pick(stored.values, sizes, live),
            stored.scales[live] if self._kind.scaled else stored.scales,
            sizes[live],
        ).view()
        values.flags.writeable = False
        return Blocks(stored.ids[live], values)

    # -- changing ---------------------------------------------------------------------------

    def advance(self, now: int) -> None:
        """Go to round `now`: `total` fades by damping per round passed, stale entries leave.

        Raises `StateError` if that is before the present round.
        """
        if now < self._now:
            raise StateError(f"memory is at round {self._now}; it cannot go back to {now}")
        with self._changing():
            self._sums.fade(self.config.damping ** (now - self._now))
            self._now = now
            limit = now - self.config.max_staleness
            while devices := self._store.made_before(limit, MOST_DEVICES):
                self._drop(devices, limit)

    def write(self, contributions: Sequence[Contribution], reader: Reader | None = None) -> None:
        """Take movements where they are newer than what is held and not stale.

        `reader` is shown, stretch by stretch, the change of `total` per parameter with the new
        values as given rather than as held: Σ weight · damping^(now − made) · D / learning_rate
        over what was taken, minus what left. Without sums it is shown nothing.

        Values are finite, ids ascending and the plan's: a `Contribution` has been checked. Raises
        `StateError` for a movement of a later round than `now`, `BlockError` for one that does not
        fit the plan; nothing has changed then.
        """
        for contribution in contributions:
            self._check(contribution)
        if not len(self.total):
            reader = None
        change: Float64 | None = None
        with self._changing():
            for batches, last in self._passes(contributions):
                if reader is None or (last and change is None):
                    self._keep(batches, reader)
                    continue
                if change is None:
                    change = np.zeros(len(self.total))
                self._keep(batches, partial(_add_to, change))
        if reader is not None and change is not None:
            reader(0, change)

    def forget(self, device: str) -> int:
        """Let go of all entries of a device; the sums are those of the others. Returns its blocks.

        An unknown device has none. Nothing is durable before `commit`.
        """
        self._check_usable()
        blocks = int(np.count_nonzero(self._store.kept(device).rounds))
        if blocks:
            with self._changing():
                self._drop([device], self._now + 1)
        return blocks

    def _passes(
        self, contributions: Sequence[Contribution]
    ) -> Iterator[tuple[list[list[_Taken]], bool]]:
        """Cut what is to be taken into passes of batches, each with True if it is the last.

        A pass must be stored before the next is asked for. Nearly always there is one: only a
        device that comes twice, or very many old files, need another.
        """
        batches: list[list[_Taken]] = [[]]
        segments: set[int] = set()
        old = 0
        # Of two movements of one device the newer first: the older only fills its gaps.
        for contribution in sorted(contributions, key=lambda one: (one.device, -one.made)):
            batch = batches[-1]
            again = bool(batch) and batch[-1].device == contribution.device
            if again or len(batch) == MOST_DEVICES or old >= MOST_OLD:
                if again or len(segments) > MOST_SEGMENTS:
                    yield batches, False
                    batches, segments = [], set()
                batches.append([])
                old = 0
            taken = self._take(contribution)
            if taken is not None:
                batches[-1].append(taken)
                segments |= {stored.segment for stored, _, _ in taken.lost}
                old += len(taken.leaving)
        yield batches, True

    def recount(self, devices: Iterable[str]) -> None:
        """Compute the sums anew from the entries of these devices, which are all that are held.

        The last bits may differ from those of sums that were kept up to date.
        """
        total, weight, entries = (np.zeros_like(array) for array in self._sums.arrays)
        for device in devices:
            for piece in self.recall(device):
                ids, values = piece.blocks.ids, piece.blocks.values
                entries[ids] += 1
                if len(total):
                    weight[ids] += piece.made.weight
                    sizes = self.plan.block_sizes[ids]
                    starts = np.repeat(self.plan.block_offsets[ids], sizes)
                    within = np.arange(len(values)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
                    total[starts + within] += self._factor(piece.made) * values.astype(np.float64)
        with self._changing():
            for array, found in zip(self._sums.arrays, (total, weight, entries), strict=True):
                array[...] = found

    def prepare(self) -> None:
        """Bring to disk what a commit needs, which then takes no time; a crash leaves no change.

        Nothing may change between this and `commit`.
        """
        if self._changed and not self._prepared:
            with self._changing():
                self._store.prepare(self._sums.arrays)
            self._prepared = True

    def commit(self, *, tidy: bool = True) -> None:
        """Make all changes since the last commit durable at once; a crash before leaves none.

        Not `tidy`: what is of no use any more stays until `tidy` is called.
        """
        if self._changed:
            self.prepare()
            with self._changing():
                self._store.commit(self._now)
            self._changed = self._prepared = False
        if tidy:
            self.tidy()

    def tidy(self) -> None:
        """Remove what no commit needs any more."""
        self._store.tidy()

    def close(self) -> None:
        """Close files and threads. On disk, changes that were not committed are lost.

        Closing again does nothing.
        """
        self._broken = True
        self._sums.close()
        self._store.close()

    def _take(self, contribution: Contribution) -> _Taken | None:
        """Find the blocks of a contribution that are newer than held ones, and those that leave."""
        made, ids = contribution.made, contribution.blocks.ids
        if self._now - made > self.config.max_staleness:
            return None
        kept = self._store.kept(contribution.device)
        newer = kept.rounds[ids] < made
        if not newer.any():
            return None
        taken = np.zeros(self.plan.block_count, dtype=bool)
        taken[ids[newer]] = True
        leaving, lost = self._leave(kept, taken)
        kept.rounds[taken] = made
        return _Taken(
            contribution.device,
            Made(
                made,
                float(contribution.learning_rate),
                float(contribution.level),
                contribution.weight(self.config.weighting),
            ),
            ids[newer],
            np.ascontiguousarray(
                pick(contribution.blocks.values, self.plan.block_sizes[ids], newer)
            ),
            kept.rounds,
            leaving,
            lost,
        )

    def _leave(
        self, kept: DeviceMemory, going: NDArray[np.bool_]
    ) -> tuple[list[Leaving], list[tuple[Stored, int, int]]]:
        """Find what leaves where the blocks in `going` (one flag for every block) are given up."""
        leaving, lost = [], []
        for stored in kept.movements:
            live = stored.live(kept.rounds)
            gone = live & going[stored.ids]
            if not gone.any():
                continue
            sizes = self.plan.block_sizes[stored.ids]
            died = int(sizes[gone].sum())
            runs = find_runs(
                stored.ids[gone],
                (np.cumsum(sizes) - sizes)[gone],
                stored.scales[gone] if self._kind.scaled else None,
                self.plan.block_offsets,
            )
            factor, weight = self._factor(stored.made), stored.made.weight
            leaving.append(Leaving(stored.ids[gone], stored.values, runs, factor, weight, died))
            lost.append((stored, died, int(sizes[live].sum()) - died))
        return leaving, lost

    def _keep(self, batches: Sequence[Sequence[_Taken]], reader: Reader | None) -> None:
        """Store what was taken, of different devices, and move the sums."""
        every = [one for batch in batches for one in batch]
        starts = [self.plan.block_sizes[one.ids] for one in every]
        starts = [np.cumsum(sizes) - sizes for sizes in starts]
        scales: list[Float64] = [np.empty(0)] * len(every)

        def find_scales(number: int) -> None:
            scales[number] = self._kind.scales(every[number].values, starts[number])

        self._sums.each(find_scales, range(len(every)))
        coming = []
        for one, start, scale in zip(every, starts, scales, strict=True):
            runs = find_runs(
                one.ids, start, scale if self._kind.scaled else None, self.plan.block_offsets
            )
            slot = self._store.add(one.device, one.made, one.ids, scale, len(one.values))
            factor, weight = self._factor(one.made), one.made.weight
            coming.append(Coming(one.ids, one.values, runs, factor, weight, slot))
        following = iter(coming)
        self._sums.replace(
            [
                MemoryBatch(
                    list(islice(following, len(batch))),
                    [old for one in batch for old in one.leaving],
                )
                for batch in batches
            ],
            reader,
        )
        for one in every:
            self._store.update(one.device, one.rounds, one.lost)

    def _drop(self, devices: Sequence[str], limit: int) -> None:
        """Let go of movements that devices made before a round."""
        leaving: list[Leaving] = []
        updates = []
        for device in devices:
            kept = self._store.kept(device)
            going = (kept.rounds > 0) & (kept.rounds < limit)
            gone, lost = self._leave(kept, going)
            leaving += gone
            kept.rounds[going] = 0
            if lost:
                updates.append((device, kept.rounds, lost))
        self._sums.replace([MemoryBatch((), leaving)])
        for update in updates:
            self._store.update(*update)

    def _factor(self, made: Made) -> float:
        """Compute the present factor in `total` of a value made so."""
        faded: float = self.config.damping ** (self._now - made.round)
        return made.weight * faded / made.learning_rate

    def _check(self, contribution: Contribution) -> None:
        who = f"movement of {contribution.device!r}"
        if not 1 <= contribution.made <= self._now:
            raise StateError(f"{who}: made in round {contribution.made}; memory is at {self._now}")
        if not (math.isfinite(contribution.learning_rate) and contribution.learning_rate > 0):
            raise StateError(f"{who}: a learning rate of {contribution.learning_rate!r} is not one")
        blocks = contribution.blocks
        ids = blocks.ids
        if len(ids) and not (ids[0] >= 0 and ids[-1] < self.plan.block_count):
            raise BlockError(f"{who}: the plan has blocks 0 to {self.plan.block_count - 1} only")
        if (np.diff(ids) <= 0).any():
            raise BlockError(f"{who}: block ids are not ascending and unique")
        blocks.check(ids, self.plan.block_sizes)

    def _check_usable(self) -> None:
        if self._broken:
            raise StateError("this memory is closed, or a change to it failed: open it again")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Make the memory unusable if a change fails half-way; the last commit stands."""
        self._check_usable()
        self._broken = True
        yield
        self._broken = self._prepared = False
        self._changed = True


def _add_to(total: Float64, start: int, change: Float64) -> None:
    total[start : start + len(change)] += change


def pick(values: Held, sizes: Indices, chosen: NDArray[np.bool_]) -> Held:
    """Return the values of the chosen blocks; a view when they lie one behind the other."""
    picked = np.flatnonzero(chosen)
    if not len(picked):
        return values[:0]
    ends = np.cumsum(sizes)
    breaks = np.flatnonzero(np.diff(picked) != 1)
    first = picked[np.concatenate(([0], breaks + 1))]
    last = picked[np.concatenate((breaks, [len(picked) - 1]))]
    stretches = [
        values[start:end]
        for start, end in zip((ends - sizes)[first].tolist(), ends[last].tolist(), strict=True)
    ]
    return stretches[0] if len(stretches) == 1 else np.concatenate(stretches)
