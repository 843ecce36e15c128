"""`disjoint`: groups dealt out like cards."""

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
class DisjointMasks:
    """Groups dealt out without overlap; reshuffled and dealt again when they run out (IST: `tied`).

    Every round starts with a shuffled deck for every axis. Devices take turns in device-name order.
    Where groups differ in size, a device takes from the deck what fits; if nothing left fits, it
    gets a random set of groups that do.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        bundles = bundles_of(situation.plan, self.tied)
        decks: list[list[int]] = [[] for _ in bundles]

        def choose(_device: str, level: float, number: int, bundle: Bundle) -> tuple[int, ...]:
            taken, decks[number] = _deal(bundle, level, decks[number], situation.stream)
            return taken

        return choose_each(situation.plan, bundles, situation.levels, choose)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if a device trains everything or every deck is dealt completely, else None.

        A deck of `K` equal groups runs out when the devices are dealt `K` groups or more; then
        every group has a device. That covers every block as long as no block is owned by two
        groups: chance decides which device gets which pair, and may miss a pair indefinitely.
        """
        bundles = bundles_of(plan, self.tied)
        if any(holds_all(bundles, level) for level in levels):
            return 0
        single = all(len(table.bundles) <= 1 for table in cells_of(plan, bundles).tables)
        dealt_out = all(
            not bundle.uneven and sum(bundle.most(level) for level in levels) >= bundle.count
            for bundle in bundles
        )
        return 0 if levels and single and dealt_out else None


def _deal(
    bundle: Bundle, level: float, deck: list[int], stream: np.random.Generator
) -> tuple[tuple[int, ...], list[int]]:
    """Return a device's groups and the rest of the deck."""
    taken = bundle.fill(level, deck)
    left = [group for group in deck if group not in taken]
    if left and taken:
        return taken, left
    if left:  # all remaining groups are too large: they wait for a larger device
        return bundle.take(level, stream.permutation(bundle.count).tolist()), left
    if len(taken) == bundle.most(level):
        return taken, left
    fresh: list[int] = stream.permutation(bundle.count).tolist()
    both = bundle.fill(level, [g for g in fresh if g not in taken], taken) or (bundle.smallest,)
    return both, [g for g in fresh if g not in both or g in taken]
