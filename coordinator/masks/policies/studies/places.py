"""`places`: levels that belong to places in the round, not to devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import ClassVar, Literal

from coordinator.errors import ConfigError
from coordinator.masks.contract import MaskPolicy, Masks
from coordinator.masks.policies.coverage import CoverageMasks
from coordinator.masks.policies.disjoint import DisjointMasks
from coordinator.masks.policies.greedy import GreedyMasks
from coordinator.masks.policies.random import RandomMasks
from coordinator.masks.policies.static import StaticMasks
from coordinator.masks.situation import Situation
from edge_sdk.program.settings import Share
from edge_sdk.protocol.plan.plan import ModelPlan

InnerMasks = Literal["coverage", "disjoint", "greedy", "random", "static"]

_WITHIN: Mapping[str, Callable[..., MaskPolicy]] = {
    "coverage": CoverageMasks,
    "disjoint": DisjointMasks,
    "greedy": GreedyMasks,
    "random": RandomMasks,
    "static": StaticMasks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacesMasks:
    """Levels dealt out anew among the devices of each round; another policy picks the groups.

    The devices of a round, in an order drawn for it, get the `levels` in turn, or what they offer
    if that is less; then `masks` picks the groups. A study in which 4 of the 10 devices of every
    round train the whole model and 6 of them 3/4 of it (Every Parameter Matters), whoever they are.
    Reports show the level that a device offered, beside the parameters that it trained.
    """

    uses_norms: ClassVar[bool] = True

    levels: tuple[Share, ...] = (1.0,)
    masks: InnerMasks = "coverage"
    tied: bool = False

    def __post_init__(self) -> None:
        if not self.levels or not all(0 < level <= 1 for level in self.levels):
            raise ConfigError(f"levels = {self.levels!r}: must be shares above 0 and at most 1")
        if self.masks not in _WITHIN:
            raise ConfigError(f"masks = {self.masks!r}: must be one of {', '.join(_WITHIN)}")

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        offers = list(situation.offers)
        levels = list(situation.levels.values())
        for turn, place in enumerate(situation.stream.permutation(len(offers)).tolist()):
            level = min(levels[place], self.levels[turn % len(self.levels)])
            offers[place] = changed(offers[place], level=level)
        return self._inner(changed(situation, offers=offers))

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """That of `masks` if all get what they offer; else 0 if each round covers all, or None.

        Devices that offer enough for any place get the same levels in every round, but each another
        one; so of the bounds of `masks`, only that on a single round holds.
        """
        if min(self.levels) >= max(levels, default=0.0):
            return self._inner.longest_gap(plan, levels)
        dealt = [self.levels[turn % len(self.levels)] for turn in range(len(levels))]
        gap = self._inner.longest_gap(plan, dealt)
        return 0 if gap == 0 and min(levels) >= max(self.levels) else None

    @property
    def _inner(self) -> MaskPolicy:
        return _WITHIN[self.masks](tied=self.tied)
