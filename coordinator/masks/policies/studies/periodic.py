"""`periodic`: random groups, and now and then the same ones on all devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import bundles_of, choose_each
from coordinator.masks.policies.random import RandomMasks
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicMasks:
    """As `random`, but every n-th round all devices take the last groups, and no device the others.

    A study of blocks that nobody trains in some rounds, as the code of RAM-Fed forces it with
    `every = 10`.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False
    every: int = 10

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every must be at least 1 round, not {self.every}")

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        if situation.round % self.every:
            return RandomMasks(tied=self.tied)(situation)
        return choose_each(
            situation.plan,
            bundles_of(situation.plan, self.tied),
            situation.levels,
            lambda _device, level, _number, bundle: bundle.take(
                level, range(bundle.count - 1, -1, -1)
            ),
        )

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if a device trains everything, else None, as for `random`."""
        return RandomMasks(tied=self.tied).longest_gap(plan, levels)
