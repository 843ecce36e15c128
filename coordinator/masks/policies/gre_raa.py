"""`gre-raa`: one fragment per device, the least updated one it can train in time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import bundles_of, holds_all
from coordinator.masks.groups.fragments import (
    Fragment,
    FragmentKind,
    fragments_of,
    fragments_within,
    never_trained,
    own_blocks,
)
from coordinator.masks.groups.splitting import split_axes
from coordinator.masks.situation import Situation
from edge_sdk.program.settings import check_fields
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GreRaaMasks:
    """One fragment: of those within the offered level and `delay_limit_s` the one updated least.

    `fragments` says how the model is cut: `alternate` (every parameter is in exactly one fragment
    or in all), `rotating` (drawn anew for every assignment) or `tied` (group `j` of every axis).

    `assign` is `gre`, as above, or one of the paper's ablations, for which delays do not matter:
    `random` (any fragment within the level) or `least-trained` (the one updated least, MP-RAA).
    Ties between equally updated fragments are broken at random.

    The delay is `parameters · samples / compute + 2 · 4 · parameters / bytes_per_s`: training, and
    fp32 weights down and up. Facts a device does not report cost nothing. If no fragment is within
    the limit, the device gets the smallest one; among equally small ones, again the one updated
    least.

    The update count of a fragment is the number of movements of the blocks that no other fragment
    holds: the largest, which counts every assignment of it, or of rotating fragments the smallest,
    so that blocks that were left out come next. `count` is `assigned`, so that devices at work and
    those that are assigned together count as if they had already updated their fragments; or
    `completed`, as in the paper, where only movements count that have arrived.
    """

    uses_norms: ClassVar[bool] = False

    fragments: FragmentKind = "alternate"
    assign: Literal["gre", "random", "least-trained"] = "gre"
    count: Literal["assigned", "completed"] = "assigned"
    delay_limit_s: float = math.inf

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.delay_limit_s > 0:
            raise ConfigError(f"delay_limit_s must be above 0 seconds, not {self.delay_limit_s!r}")
        if self.assign != "gre" and self.delay_limit_s < math.inf:
            raise ConfigError(
                f"delay_limit_s = {self.delay_limit_s}: assign = {self.assign!r} does not look at "
                'delays; remove it, or set assign = "gre"'
            )

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        plan, stream = situation.plan, situation.stream
        covered = situation.times_covered
        if self.count == "assigned" and situation.under_way is not None:
            covered = covered + situation.under_way
        masks = {}
        for bid, level in zip(situation.offers, situation.levels.values(), strict=True):
            offered = fragments_within(plan, self.fragments, level, stream)
            found = self._timely(plan, bid, offered)
            if self.assign != "random":
                updates = self._updates(plan, offered, covered)
                fewest = min(updates[each] for each in found)
                found = [each for each in found if updates[each] == fewest]
            chosen = offered[found[int(stream.integers(len(found)))]]
            if self.count == "assigned":
                covered = covered + plan.covers(plan.choose(chosen))
            masks[bid.device] = chosen
        return masks

    def _timely(self, plan: ModelPlan, bid: Bid, offered: Mapping[int, Fragment]) -> list[int]:
        """Return the numbers of the fragments within the delay limit; else of the smallest."""
        if self.delay_limit_s == math.inf:
            return list(offered)
        sizes = {each: plan.submodel_parameters(groups) for each, groups in offered.items()}
        found = [each for each, size in sizes.items() if _delay_s(bid, size) <= self.delay_limit_s]
        return found or [each for each, size in sizes.items() if size == min(sizes.values())]

    def _updates(
        self, plan: ModelPlan, offered: Mapping[int, Fragment], covered: Indices
    ) -> dict[int, int]:
        """Return the update count of every fragment; 0 for one that shares all its blocks."""
        if self.fragments != "rotating":
            owned = own_blocks(plan, self.fragments)
            return {each: int(covered[owned[each]].max(initial=0)) for each in offered}
        held = np.stack([plan.covers(plan.choose(groups)) for groups in offered.values()])
        alone = held & (held.sum(axis=0) == 1)
        return {
            each: int(covered[own].min()) if own.any() else 0
            for each, own in zip(offered, alone, strict=True)
        }

    def untrained_share(self, plan: ModelPlan) -> float:
        """Return the share of the parameters that no device will ever train."""
        left_out = plan.block_sizes[never_trained(plan, self.fragments)]
        return float(left_out.sum()) / plan.parameters

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """Bound for fragments that hold all blocks and devices that may train any fragment.

        Proof. Taking the least updated of `K` fragments keeps their counts within one of each
        other, so between two turns of a fragment every other one has at most two: `2 (K − 1)`
        assignments, or with `N` devices at most `2 (K − 1) / N` whole rounds. This holds only
        where assignments count, without a limit on delay, and if every level allows every fragment
        whole. Chance decides which groups rotating fragments hold, so there is no bound for them.
        """
        if self.fragments == "rotating" and any(len(axis.groups) > 1 for axis in plan.axes):
            return None
        fragments = fragments_of(plan, self.fragments)
        if not levels or self.untrained_share(plan):
            return None
        tied = self.fragments == "tied"
        split = set(range(len(plan.axes)) if tied else split_axes(plan))
        bundles = bundles_of(plan, tied=tied)
        cut = [bundle for bundle in bundles if bundle.numbers[0] in split]
        whole = [bundle for bundle in bundles if bundle.numbers[0] not in split]
        free = all(
            holds_all(whole, level) and all(bundle.surely(level) >= 1 for bundle in cut)
            for level in levels
        )
        if len(fragments) == 1:
            return 0 if free else None
        counted = all(own.size for own in own_blocks(plan, self.fragments))
        balanced = self.assign != "random" and self.count == "assigned"
        if not (free and counted and balanced and self.delay_limit_s == math.inf):
            return None
        return 2 * (len(fragments) - 1) // len(levels)


def _delay_s(bid: Bid, parameters: int) -> float:
    """Seconds a device takes for a fragment, as far as known."""
    training = 0.0 if bid.compute is None else parameters * bid.samples / bid.compute
    transfer = 0.0 if bid.bytes_per_s is None else 2 * 4 * parameters / bid.bytes_per_s
    return training + transfer
