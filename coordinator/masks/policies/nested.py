"""`nested` and `core`: beginnings of an order of groups, so that levels lie within one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.errors import ConfigError
from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each, holds_all, spread
from coordinator.masks.groups.cells import cells_of
from coordinator.masks.groups.wheels import gap_of, laps_of, paces_of
from coordinator.masks.situation import Situation
from edge_sdk.program.settings import NOT_A_KEY, Natural, Share, check_fields
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream

GroupOrder = Literal["leading", "random", "importance"]
GroupOrders = tuple[tuple[int, ...], ...]
"""For every bundle, all its groups in the order in which levels take them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedMasks:
    """The first groups of one order, the same all run long (FjORD: `tied`; FIARSE: `importance`).

    Every bundle has an order, and a level means the longest beginning of it that fits (at least one
    group). So the groups of a level lie within those of every larger level. `order`: `leading`, by
    group number; `random`, drawn from `seed`; `importance`, by the weight norm in the model the run
    starts with, largest first, ties to the lower number. Where groups differ in size, the smallest
    one comes first, for devices that can train no other.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False
    order: GroupOrder = "leading"
    seed: Natural = 0
    ranked: GroupOrders | None = field(default=None, metadata=NOT_A_KEY)
    """The order of importance, once the model is known (`rank`)."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        plan = situation.plan
        bundles = bundles_of(plan, self.tied)
        orders = self._turned(plan, bundles, situation.round)

        def choose(_device: str, level: float, number: int, bundle: Bundle) -> tuple[int, ...]:
            return bundle.prefix(level, orders[number])

        return choose_each(plan, bundles, situation.levels, choose)

    def groups_at(
        self, plan: ModelPlan, level: float, round: int = 1
    ) -> dict[str, tuple[int, ...]]:
        """See `OrderedMasks`."""
        bundles = bundles_of(plan, self.tied)
        orders = zip(bundles, self._turned(plan, bundles, round), strict=True)
        chosen = [bundle.prefix(level, order) for bundle, order in orders]
        return spread(plan, bundles, chosen, level)

    def nests(self, plan: ModelPlan) -> bool:
        """See `OrderedMasks`; here only alternatives are not within one another."""
        return not plan.has_alternatives

    def rank(self, plan: ModelPlan, norms: NDArray[np.float64]) -> NestedMasks:
        """Return the policy with its order of importance, given the first model's block norms."""
        bundles = bundles_of(plan, self.tied)
        cells = cells_of(plan, bundles)
        sums = cells.group_sums(cells.sums(norms), bundles)
        ranked = tuple(tuple(np.argsort(-norm, kind="stable").tolist()) for norm in sums)
        return replace(self, ranked=ranked)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if the largest level is the whole model, else None.

        Proof. Levels lie within one another and all rounds are alike, so the largest level covers
        what is ever covered. Unless every group fits, the last one of some order is never trained.
        """
        bundles = bundles_of(plan, self.tied)
        self._turned(plan, bundles, 1)  # raises what a call would
        return 0 if levels and holds_all(bundles, max(levels)) else None

    def _turned(self, plan: ModelPlan, bundles: Sequence[Bundle], round: int) -> GroupOrders:  # noqa: ARG002  `core` turns them
        """Return the orders of a round."""
        return self._orders(bundles)

    def _orders(self, bundles: Sequence[Bundle]) -> GroupOrders:
        orders: Sequence[Sequence[int]]
        if self.order == "leading":
            orders = [range(bundle.count) for bundle in bundles]
        elif self.order == "random":
            orders = [
                stream(self.seed, "nested", bundle.axes[0].name).permutation(bundle.count).tolist()
                for bundle in bundles
            ]
        elif self.ranked is None:
            raise ConfigError(
                "the order of importance is that of the model the run starts with, which is not "
                "known here: call settle_masks first, or use another order"
            )
        else:
            orders = self.ranked
        return tuple(
            (bundle.smallest, *(group for group in order if group != bundle.smallest))
            if bundle.uneven
            else tuple(order)
            for bundle, order in zip(bundles, orders, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreMasks(NestedMasks):
    """The first groups of an order always, the rest in turn.

    The order is that of `nested`. Its beginning that fits the share `core` stays; the groups behind
    it move up by one every round, and the first of them goes to the end. So within a round levels
    lie within one another, and over rounds small levels train the outer groups too. Axes that meet
    in a tensor turn at different paces (`coordinator/masks/groups/wheels.py`).
    """

    core: Share = 0.25

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """Bound of the largest level; None if that leaves out a block for ever.

        Proof. Within a round smaller levels add nothing to the largest one. On each bundle its
        choice goes through a cycle of as many positions as there are outer groups (at least one),
        one position at a time: a wheel, to which the proof of `gap_of` applies. A pace is held
        until the faster wheels have been all around, so `H_c+1 ≥ H_c · L_b`.
        """
        bundles = bundles_of(plan, self.tied)
        orders = self._orders(bundles)
        if not levels:
            return None
        cells = cells_of(plan, bundles)
        paces = paces_of(cells, len(bundles))
        kept = self._kept(bundles, orders)
        return gap_of(
            cells,
            paces,
            _holds(bundles, kept, paces),
            lambda number, need: _laps(
                bundles[number], max(levels), orders[number], kept[number], need
            ),
        )

    def _turned(self, plan: ModelPlan, bundles: Sequence[Bundle], round: int) -> GroupOrders:
        orders = self._orders(bundles)
        paces = paces_of(cells_of(plan, bundles), len(bundles))
        kept = self._kept(bundles, orders)
        holds = _holds(bundles, kept, paces)
        return tuple(
            _turn(order, core, (round - 1) // holds[pace])
            for order, core, pace in zip(orders, kept, paces, strict=True)
        )

    def _kept(self, bundles: Sequence[Bundle], orders: GroupOrders) -> list[int]:
        """Number of groups of the core, for every bundle."""
        return [
            len(bundle.prefix(self.core, order))
            for bundle, order in zip(bundles, orders, strict=True)
        ]


def _holds(bundles: Sequence[Bundle], kept: Sequence[int], paces: Sequence[int]) -> list[int]:
    """Return, for every pace, the rounds for which a position is held."""
    holds = [1]
    for pace in range(max(paces, default=0)):
        outer = [b.count - n for b, n, own in zip(bundles, kept, paces, strict=True) if own == pace]
        holds.append(holds[-1] * max([1, *outer]))
    return holds


def _turn(order: tuple[int, ...], kept: int, position: int) -> tuple[int, ...]:
    """Return the order with all but its first `kept` groups moved up by `position` places."""
    core, outer = order[:kept], order[kept:]
    start = position % len(outer) if outer else 0
    return (*core, *outer[start:], *outer[:start])


@lru_cache(maxsize=1024)
def _laps(
    bundle: Bundle, level: float, order: tuple[int, ...], kept: int, need: int
) -> tuple[int, bool]:
    """See `laps_of`."""
    positions = max(1, bundle.count - kept)
    shown = np.zeros((positions, bundle.count), dtype=bool)
    for position in range(positions):
        shown[position, list(bundle.prefix(level, _turn(order, kept, position)))] = True
    return laps_of(shown, need)
