"""`rolling`: windows that advance round by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import ClassVar
from zlib import crc32

import numpy as np

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each, holds_all
from coordinator.masks.groups.cells import Cells, cells_of
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingMasks:
    """A window of neighbouring groups that advances each round (SubDisMO; FedRolex: tied, shared).

    Every device has its own window on every axis. The device's name decides where it starts. Each
    round it advances by its own width less `overlap`, the share of groups kept from one position to
    the next, but by at least one group. It wraps around. With `shared`, all devices have the same
    window start, which advances by one group (FedRolex); `overlap` then has no meaning.

    Axes that meet in a tensor move at different paces, like the wheels of an odometer: otherwise
    their windows would stay side by side, and most blocks between them would never be trained. A
    greedy colouring keeps the number of paces small; a slower wheel holds still until every group
    of all faster ones has had its turn.

    Where groups differ in size, the window starts with its first group, takes each further one that
    fits, and advances by one group. A device that changes its level jumps to where its window would
    be if it had always offered that level.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False
    overlap: float = 0.0
    shared: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise ConfigError(f"overlap must be a share in [0, 1), not {self.overlap!r}")
        if self.shared and self.overlap:
            raise ConfigError(
                "overlap has no effect with shared: a shared window start advances by one group"
            )

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        bundles = bundles_of(situation.plan, self.tied)
        cells = cells_of(situation.plan, bundles)
        paces = _paces(cells, len(bundles))
        levels = situation.levels
        holds = {level: self._holds(cells, bundles, paces, level) for level in levels.values()}

        def choose(device: str, level: float, number: int, bundle: Bundle) -> tuple[int, ...]:
            position = (situation.round - 1) // holds[level][paces[number]]
            first = 0 if self.shared else _own_start(device, bundle)
            start = first + position * self._step(bundle, level)
            return bundle.take(level, _from(start, bundle.count))

        return choose_each(situation.plan, bundles, levels, choose)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """Bound of the best single device; None if every device leaves out a block for ever.

        Proof. Let `L_b` be a number of positions such that any `L_b` in a row on bundle `b` show
        everything one block needs of it; it is found by going around once. A wheel of pace `c`
        holds each position for `H_c` rounds, with `H_0 = 1` and `H_c+1 = H_c · max L_b` over the
        wheels of pace `c`. By induction, all combinations of the faster wheels occur while one
        holds still. A block on one bundle of pace `c` is thus missed for at most `(L_b − 1) · H_c`
        rounds. For a block on several bundles, with the slowest `b` of pace `c`, at most
        `L_b · H_c` rounds lie between two of its turns from hold to hold, and less than `H_c` more
        within the hold; it is missed for at most `(L_b + 1) · H_c − 2`. The window's start makes no
        difference: equal groups look alike from anywhere, and with unequal ones every group is a
        start. Devices only add coverage.
        """
        bundles = bundles_of(plan, self.tied)
        if any(holds_all(bundles, level) for level in levels):
            return 0
        cells = cells_of(plan, bundles)
        gaps = [self._gap(cells, bundles, level) for level in set(levels)]
        return min((gap for gap in gaps if gap is not None), default=None)

    def _step(self, bundle: Bundle, level: float) -> int:
        """Groups by which the window advances."""
        if self.shared or bundle.uneven:
            return 1
        return max(1, int(bundle.most(level) * (1 - self.overlap) + 1e-9))

    def _laps(self, bundle: Bundle, level: float, need: int) -> tuple[int, bool]:
        return _laps(bundle, level, self._step(bundle, level), min(need, 2))

    def _holds(
        self, cells: Cells, bundles: Sequence[Bundle], paces: Sequence[int], level: float
    ) -> list[int]:
        """Return, for every pace, the rounds for which a position is held."""
        holds = [1]
        for pace in range(max(paces, default=0)):
            # A shared start must not depend on the level: use as many positions as groups.
            laps = [
                bundle.count if self.shared else self._laps(bundle, level, cells.need(number))[0]
                for number, bundle in enumerate(bundles)
                if paces[number] == pace
            ]
            holds.append(holds[-1] * max(laps))
        return holds

    def _gap(self, cells: Cells, bundles: Sequence[Bundle], level: float) -> int | None:
        """Return the bound that a device at this level guarantees by itself."""
        paces = _paces(cells, len(bundles))
        holds = self._holds(cells, bundles, paces, level)
        longest = 0
        for table in cells.tables:
            for number in set(table.bundles):
                need = table.bundles.count(number)
                complete = self._laps(bundles[number], level, need)[1]
                if not complete or (need > 2 and not holds_all([bundles[number]], level)):
                    return None
            if table.bundles:
                slowest = max(table.bundles, key=lambda number: paces[number])
                laps, _ = self._laps(bundles[slowest], level, table.bundles.count(slowest))
                hold = holds[paces[slowest]]
                alone = len(set(table.bundles)) == 1
                gap = (laps - 1) * hold if alone else (laps + 1) * hold - 2
                longest = max(longest, gap)
        return longest


def _own_start(device: str, bundle: Bundle) -> int:
    """Start of a device's window: the same in every run and round."""
    return crc32(f"{device}\n{bundle.axes[0].name}".encode()) % bundle.count


def _from(start: int, count: int) -> list[int]:
    """Return all groups, beginning at `start` and wrapping around."""
    return [(start + number) % count for number in range(count)]


def _paces(cells: Cells, count: int) -> list[int]:
    """Choose a pace for every bundle, different for any two that meet in a tensor; few in all."""
    meets: list[set[int]] = [set() for _ in range(count)]
    for table in cells.tables:
        for number in table.bundles:
            meets[number] |= set(table.bundles) - {number}
    paces = [-1] * count
    for number in sorted(range(count), key=lambda number: (-len(meets[number]), number)):
        taken = {paces[other] for other in meets[number]}
        paces[number] = next(pace for pace in range(count) if pace not in taken)
    return paces


@lru_cache(maxsize=1024)
def _laps(bundle: Bundle, level: float, step: int, need: int) -> tuple[int, bool]:
    """Return (n, complete) for sets of `need` groups.

    Any `n` positions in a row show every set that is ever shown; `complete`: every set is shown.
    """
    positions = bundle.count // math.gcd(bundle.count, step)
    shown = np.zeros((positions, bundle.count), dtype=bool)
    for position in range(positions):
        groups = bundle.take(level, _from(position * step, bundle.count))
        shown[position, list(groups)] = True
    longest, complete = 1, True
    for wanted in combinations_with_replacement(range(bundle.count), max(need, 1)):
        turns = np.flatnonzero(shown[:, list(wanted)].all(axis=1))
        if not len(turns):
            complete = False
            continue
        apart = np.diff(np.append(turns, turns[0] + positions))
        longest = max(longest, int(apart.max()))
    return longest, complete
