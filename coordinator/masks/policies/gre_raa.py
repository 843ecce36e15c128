"""`gre-raa`: one fragment per device, the least updated one it can train in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import bundles_of
from coordinator.masks.groups.fragments import fragments_of
from coordinator.masks.situation import Situation
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import Groups, ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GreRaaMasks:
    """One fragment: of those within the offered level and `delay_limit_s` the one updated least.

    The delay is `parameters · samples / compute + 2 · 4 · parameters / bytes_per_s`: training, and
    fp32 weights down and up. Facts a device does not report cost nothing. Ties between equally
    updated fragments are broken at random. If no fragment is within the limit, the device gets the
    smallest one; among equally small ones, again the one updated least.

    The update count of a fragment is the coverage of the blocks that no other fragment holds; where
    they differ, the least covered block counts. Devices assigned together are counted one after the
    other, as if each had already updated its fragment: in the paper they come one by one.
    """

    uses_norms: ClassVar[bool] = False

    delay_limit_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.delay_limit_s > 0:
            raise ConfigError(f"delay_limit_s must be above 0 seconds, not {self.delay_limit_s!r}")

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        plan = situation.plan
        fragments = fragments_of(plan)
        sizes = [plan.submodel_parameters(fragment) for fragment in fragments]
        updates = _updates(plan, fragments, situation.times_covered)
        masks = {}
        for bid, level in zip(situation.offers, situation.levels.values(), strict=True):
            allowed = _within(plan, level, len(fragments))
            timely = [j for j in allowed if _delay_s(bid, sizes[j]) <= self.delay_limit_s]
            if not timely:
                smallest = min(sizes[j] for j in allowed)
                timely = [j for j in allowed if sizes[j] == smallest]
            fewest = min(updates[j] for j in timely)
            ties = [j for j in timely if updates[j] == fewest]
            chosen = ties[int(situation.stream.integers(len(ties)))]
            updates[chosen] += 1
            masks[bid.device] = fragments[chosen]
        return masks

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """Bound for fragments that hold all blocks and devices that may train any fragment.

        Proof. Taking the least updated of `K` fragments keeps their counts within one of each
        other, so between two turns of a fragment every other one has at most two: `2 (K − 1)`
        assignments, or with `N` devices at most `2 (K − 1) / N` whole rounds. This holds only
        without a limit on delay; blocks between different groups are in no fragment and never
        trained.
        """
        fragments = fragments_of(plan)
        if not levels or plan.coverage(fragments).min() == 0:
            return None
        if len(fragments) == 1:
            return 0
        free = all(
            bundle.surely(level) >= 1 for bundle in bundles_of(plan, tied=True) for level in levels
        )
        counted = _own_blocks(plan, fragments).any(axis=1).all()
        if not (free and counted and self.delay_limit_s == math.inf):
            return None
        return 2 * (len(fragments) - 1) // len(levels)


def _within(plan: ModelPlan, level: float, count: int) -> list[int]:
    """Return the fragments no larger than a level; the smallest one if there is none."""
    bundles = [bundle for bundle in bundles_of(plan, tied=True) if bundle.count == count]
    fitting = [j for j in range(count) if all(bundle.fill(level, [j]) for bundle in bundles)]
    return fitting or [bundle.smallest for bundle in bundles]


def _delay_s(bid: Bid, parameters: int) -> float:
    """Seconds a device takes for a fragment, as far as known."""
    training = 0.0 if bid.compute is None else parameters * bid.samples / bid.compute
    transfer = 0.0 if bid.bytes_per_s is None else 2 * 4 * parameters / bid.bytes_per_s
    return training + transfer


def _updates(plan: ModelPlan, fragments: Sequence[Groups], times_covered: Indices) -> list[int]:
    """Return the update count of every fragment; 0 for one that shares all its blocks."""
    return [
        int(times_covered[own].min()) if own.any() else 0 for own in _own_blocks(plan, fragments)
    ]


def _own_blocks(plan: ModelPlan, fragments: Sequence[Groups]) -> NDArray[np.bool_]:
    """Flag, for every fragment and block, the blocks that only this fragment holds."""
    held = np.stack([plan.covers(plan.choose(fragment)) for fragment in fragments])
    own: NDArray[np.bool_] = held & (held.sum(axis=0) == 1)
    return own
