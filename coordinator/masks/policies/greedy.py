"""`greedy`: largest weight norm first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each, holds_all
from coordinator.masks.groups.cells import cells_of
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyMasks:
    """Largest weight norm first, the same order for all devices (OAP, PruneFL).

    A group's norm is the sum of the squared norms of all blocks it owns. Ties go to the lower group
    number.
    """

    uses_norms: ClassVar[bool] = True

    tied: bool = False

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        if situation.norms is None:
            raise ValueError("greedy masks need the norms of the blocks")
        bundles = bundles_of(situation.plan, self.tied)
        cells = cells_of(situation.plan, bundles)
        norms = cells.group_sums(cells.sums(situation.norms), bundles)
        orders = [np.argsort(-norm, kind="stable").tolist() for norm in norms]

        def choose(_device: str, level: float, number: int, bundle: Bundle) -> tuple[int, ...]:
            return bundle.take(level, orders[number])

        return choose_each(situation.plan, bundles, situation.levels, choose)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if a device trains everything, else None: a small weight may stay small for ever."""
        bundles = bundles_of(plan, self.tied)
        return 0 if any(holds_all(bundles, level) for level in levels) else None
