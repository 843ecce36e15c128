"""`rolling`: windows that advance round by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar
from zlib import crc32

import numpy as np

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each, holds_all
from coordinator.masks.groups.cells import Cells, cells_of
from coordinator.masks.groups.wheels import gap_of, laps_of, paces_of
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingMasks:
    """A window of neighbouring groups that advances each round (SubDisMO; FedRolex: tied, shared).

    Every device has its own window on every axis. The device's name decides where it starts. Each
    round it advances by its own width less `overlap`, the share of groups kept from one position to
    the next, but by at least one group. It wraps around. With `shared`, all devices have the same
    window start, which advances by one group (FedRolex); `overlap` then has no meaning.

    Axes that meet in a tensor move at different paces (`coordinator/masks/groups/wheels.py`): a
    slower window holds still until every group of all faster ones has had its turn.

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
        paces = paces_of(cells, len(bundles))
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

        Proof: that of `gap_of`. The window's start makes no difference: equal groups look alike
        from anywhere, and with unequal ones every group is a start. Devices only add coverage.
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
        return _laps(bundle, level, self._step(bundle, level), need)

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
        paces = paces_of(cells, len(bundles))
        holds = self._holds(cells, bundles, paces, level)
        return gap_of(
            cells, paces, holds, lambda number, need: self._laps(bundles[number], level, need)
        )


def _own_start(device: str, bundle: Bundle) -> int:
    """Start of a device's window: the same in every run and round."""
    return crc32(f"{device}\n{bundle.axes[0].name}".encode()) % bundle.count


def _from(start: int, count: int) -> list[int]:
    """Return all groups, beginning at `start` and wrapping around."""
    return [(start + number) % count for number in range(count)]


@lru_cache(maxsize=1024)
def _laps(bundle: Bundle, level: float, step: int, need: int) -> tuple[int, bool]:
    """See `laps_of`."""
    positions = bundle.count // math.gcd(bundle.count, step)
    shown = np.zeros((positions, bundle.count), dtype=bool)
    for position in range(positions):
        groups = bundle.take(level, _from(position * step, bundle.count))
        shown[position, list(groups)] = True
    return laps_of(shown, need)
