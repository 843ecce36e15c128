"""`random`: a uniform subset of the allowed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each, holds_all
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomMasks:
    """A uniform random subset of the groups a level allows, for each device and axis separately.

    Groups of different sizes are tried in random order; each one that still fits is taken.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""

        def choose(_device: str, level: float, _number: int, bundle: Bundle) -> tuple[int, ...]:
            return bundle.take(level, situation.stream.permutation(bundle.count).tolist())

        bundles = bundles_of(situation.plan, self.tied)
        return choose_each(situation.plan, bundles, situation.levels, choose)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if a device trains everything, else None: chance may miss a block indefinitely."""
        bundles = bundles_of(plan, self.tied)
        return 0 if any(holds_all(bundles, level) for level in levels) else None
