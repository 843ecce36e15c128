"""`prunefl`: one set of groups for all devices, by squared gradient per unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each, spread
from coordinator.masks.groups.cells import Cells, Floats, cells_of
from coordinator.masks.situation import Situation
from edge_sdk.program.settings import Count, Share, Within, check_fields
from edge_sdk.protocol.plan.plan import ModelPlan

GroupSets = tuple[tuple[int, ...], ...]
"""For every bundle, the groups of the set, the most important first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneFlMasks:
    """One set for all devices: the most squared gradient per unit of time (PruneFL).

    The first round and every `period`-th one after it measure: devices train the whole model, and
    the importance of a block is the mean of its squared movements. Groups are ranked by the
    importance of their blocks over the cost that they add. The set is the beginning of that order
    with the most importance per cost, or with `level` the best groups of that share of every axis.
    It stays until the next measurement. Every device gets as much of it, in order, as it offered.

    Cost is that of the forward pass in multiply-accumulates (parameters, where a plan has none),
    plus `overhead`, the share of the whole model's that a round costs whatever the set. Before the
    first measurement, groups are ranked by the norm of their weights, and none is left out.
    """

    uses_norms: ClassVar[bool] = True

    tied: bool = False
    period: Count = 50
    level: Share | None = None
    overhead: Annotated[float, Within(least=0)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self)

    def measures(self, round: int) -> bool:
        """See `MeasuringMasks`."""
        return (round - 1) % self.period == 0

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        plan, known = situation.plan, situation.importance
        if situation.norms is None:
            raise ValueError("prunefl masks need the norms of the blocks")
        bundles = bundles_of(plan, self.tied)
        worth = situation.norms if known is None else known
        sets = _ranked(self, plan, worth.tobytes(), whole=known is None)
        full = self.measures(situation.round)

        def choose(_device: str, level: float, number: int, bundle: Bundle) -> tuple[int, ...]:
            if full and level == 1:
                return tuple(range(bundle.count))
            return bundle.take(level, sets[number])

        return choose_each(plan, bundles, situation.levels, choose)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """`period − 1` if a device trains everything, else None: the set may leave out a block.

        Proof. Every `period`-th round, from the first on, such a device covers all blocks.
        """
        bundles_of(plan, self.tied)  # raises what a call would
        return self.period - 1 if any(level == 1 for level in levels) else None


@lru_cache(maxsize=8)
def _ranked(policy: PruneFlMasks, plan: ModelPlan, worth: bytes, *, whole: bool) -> GroupSets:
    """Choose the set, given the worth of every block; `whole` leaves out no group."""
    bundles = bundles_of(plan, policy.tied)
    cells = cells_of(plan, bundles)
    values = cells.sums(np.frombuffer(worth, np.float64))
    rates = [
        _rates(plan, bundles, number, sums)
        for number, sums in enumerate(cells.group_sums(values, bundles))
    ]
    orders = [np.argsort(-rate, kind="stable").tolist() for rate in rates]
    if whole:
        return tuple(map(tuple, orders))
    if policy.level is not None:
        chosen = [b.take(policy.level, o) for b, o in zip(bundles, orders, strict=True)]
    else:
        chosen = _best_beginning(plan, bundles, cells, values, rates, policy.overhead)
    return tuple(
        tuple(group for group in order if group in held)
        for order, held in zip(orders, chosen, strict=True)
    )


def _rates(plan: ModelPlan, bundles: Sequence[Bundle], number: int, sums: Floats) -> Floats:
    """Divide the worth of each of a bundle's groups by the cost that it adds to all others."""
    everything = _everything(bundles)
    if (count := bundles[number].count) == 1:
        return np.full(1, np.inf)
    added = []
    for group in range(count):
        rest = [each for each in range(count) if each != group]
        without = [*everything[:number], tuple(rest), *everything[number + 1 :]]
        added.append(_cost(plan, bundles, everything) - _cost(plan, bundles, without))
    costs = np.array(added, dtype=np.float64)
    rates: Floats = np.divide(sums, costs, out=np.full(count, np.inf), where=costs > 0)
    return rates


def _best_beginning(
    plan: ModelPlan,
    bundles: Sequence[Bundle],
    cells: Cells,
    values: Floats,
    rates: Sequence[Floats],
    overhead: float,
) -> list[tuple[int, ...]]:
    """Return the groups, best rate first over all bundles, whose worth per cost is largest.

    Every bundle has its best group from the start.
    """
    member: list[NDArray[np.bool_]] = [np.arange(len(rate)) == np.argmax(rate) for rate in rates]
    rest = [
        (-float(rate), number, group)
        for number, each in enumerate(rates)
        for group, rate in enumerate(each)
        if not member[number][group]
    ]
    fixed = overhead * _cost(plan, bundles, _everything(bundles))

    def current() -> tuple[float, list[tuple[int, ...]]]:
        groups = [tuple(np.flatnonzero(each).tolist()) for each in member]
        worth = float(values[cells.held(member)].sum())
        return worth / (fixed + _cost(plan, bundles, groups)), groups

    best, found = current()
    for _, number, group in sorted(rest):
        member[number][group] = True
        rate, groups = current()
        if rate >= best:
            best, found = rate, groups
    return found


def _everything(bundles: Sequence[Bundle]) -> list[tuple[int, ...]]:
    return [tuple(range(bundle.count)) for bundle in bundles]


def _cost(plan: ModelPlan, bundles: Sequence[Bundle], chosen: Sequence[tuple[int, ...]]) -> int:
    groups = spread(plan, bundles, chosen, 1.0)
    return plan.submodel_macs(groups) if plan.macs else plan.submodel_parameters(groups)
