"""`scheduled`: regions dealt out so that coverage, trained regions and staleness are as told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, spread
from coordinator.masks.situation import Situation
from edge_sdk.program.settings import Count
from edge_sdk.program.settings.choices import RoundLimit, check_round_limit
from edge_sdk.protocol.plan.plan import ModelPlan

MOST_POSITIONS = 512
"""Rounds of a schedule that are gone through to bound the longest gap."""
FOR_EVER = 1_000_000
"""More rounds than any run has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledMasks:
    """Regions with a given Γ*, S* and τ, for studies of these terms (RAM-Fed, Figures 3 and 4).

    A region is a group, the same number on every axis. In each round, `regions` of them (S*; all
    unless told) are trained: one of these by exactly `coverage` devices (Γ*; unless told, all
    equally often), the others as evenly as there are devices for it. All devices move on to the
    next region together, so that each has trained every region after at most `staleness` rounds
    (τ): as soon as possible unless told, and `"none"` never moves. Larger levels come first where
    devices differ, then names decide.

    A device gets fewer groups than it offers where more would cover too much: at most `regions`,
    and the rare one only if that is its part. On tensors with two width axes, Γ* is that of the
    groups, and blocks between different groups may have less.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False
    coverage: Count | None = None
    regions: Count | None = None
    staleness: RoundLimit | None = None

    def __post_init__(self) -> None:
        for name in ("coverage", "regions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.staleness is not None:
            check_round_limit("staleness", self.staleness)

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        bundles = bundles_of(situation.plan, self.tied)
        levels = situation.levels
        order = sorted(levels, key=lambda name: (-levels[name], name))
        position = [(situation.round - 1) // self._hold(bundle) for bundle in bundles]
        chosen = self._choose(bundles, [levels[name] for name in order], position)
        masks = {
            name: spread(situation.plan, bundles, groups, levels[name])
            for name, groups in zip(order, chosen, strict=True)
        }
        return {name: masks[name] for name in levels}

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """Go through all positions of the schedule, which repeat; None if a block has no turn.

        The bound is exact: with the same offers in every round, all axes are back where they began
        after the least common multiple of their cycles, and everything repeats.
        """
        bundles = bundles_of(plan, self.tied)
        ordered = sorted(levels, reverse=True)
        holds = [self._hold(bundle) for bundle in bundles]
        cycles = [hold * bundle.count for hold, bundle in zip(holds, bundles, strict=True)]
        rounds = 1 if self.staleness == "none" else lcm(*cycles)
        if not levels or rounds > MOST_POSITIONS:
            return None
        covered = []
        for number in range(rounds):
            chosen = self._choose(bundles, ordered, [number // hold for hold in holds])
            parts = [
                spread(plan, bundles, groups, level)
                for groups, level in zip(chosen, ordered, strict=True)
            ]
            covered.append(plan.coverage(parts) > 0)
        return _longest(np.stack(covered))

    def _hold(self, bundle: Bundle) -> int:
        """Return the rounds for which all devices stay where they are."""
        if self.staleness is None or bundle.count == 1:
            return 1
        if self.staleness == "none":
            return FOR_EVER
        if self.staleness < bundle.count:
            raise ConfigError(
                f"staleness = {self.staleness}: a device that trains one of {bundle.count} regions "
                f"a round takes {bundle.count} rounds for all; set at least that"
            )
        # Between two stays of h rounds at a region lie K − 1 others: K·h − h + 1 rounds.
        return int((self.staleness - 1) // max(1, bundle.count - 1))

    def _choose(
        self, bundles: Sequence[Bundle], levels: Sequence[float], positions: Sequence[int]
    ) -> list[list[tuple[int, ...]]]:
        """Return the groups of each device, largest level first, for every bundle."""
        by_bundle = [
            self._deal(bundle, levels, position)
            for bundle, position in zip(bundles, positions, strict=True)
        ]
        return [[dealt[number] for dealt in by_bundle] for number in range(len(levels))]

    def _deal(
        self, bundle: Bundle, levels: Sequence[float], position: int
    ) -> list[tuple[int, ...]]:
        """Deal out the regions of one bundle."""
        count = min(self.regions or bundle.count, bundle.count)
        regions = [(slot + position) % bundle.count for slot in range(count)]
        rare: int | None = None
        if self.coverage is not None and count > 1:
            rare = regions.pop()
        found, place = [], 0
        for number, level in enumerate(levels):
            turn = [regions[(place + step) % len(regions)] for step in range(len(regions))]
            first = [] if rare is None or number >= (self.coverage or 0) else [rare]
            taken = bundle.take(level, [*first, *turn])
            found.append(taken)
            place += len(taken) - len(first)
        return found


def _longest(covered: NDArray[np.bool_]) -> int | None:
    """Return the longest run of rounds, going around, in which a block is not covered."""
    if not covered.any(axis=0).all():
        return None
    around = np.concatenate([covered, covered])
    longest, run = 0, np.zeros(covered.shape[1], dtype=np.int64)
    for row in around:
        run = np.where(row, 0, run + 1)
        longest = max(longest, int(run.max(initial=0)))
    return longest
