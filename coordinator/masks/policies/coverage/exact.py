"""`coverage` for small fleets: try every choice.

Devices that may choose the same sets are interchangeable, so the enumeration covers how often each
set is chosen, not by whom.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement, product
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.groups.bundles import Bundle
from coordinator.masks.policies.coverage.goal import Counts, Goal
from edge_sdk.protocol.plan.layout import Indices

MAX_CASES = 20_000
"""Largest number of possible choices for which a fleet counts as small."""

MAX_NUMBERS = 4_000_000
"""Choices × cells: the most numbers held in memory at once."""

MAX_UNEVEN = 10
"""Most groups of different sizes on an axis; all their sets are tried one by one."""

Choice = tuple[tuple[int, ...], ...]
"""Groups for every bundle."""

Kind = tuple[tuple[tuple[int, ...], ...], ...]
"""For every bundle, the sets a device may choose from."""


def best_choices(
    goal: Goal, bundles: Sequence[Bundle], levels: Sequence[float], stream: np.random.Generator
) -> list[Choice] | None:
    """Return a random one of the best choices for all devices; None if there are too many."""
    kinds: dict[Kind, list[int]] = {}
    for level in sorted(set(levels)):
        kind = _kind(bundles, level)
        if kind is None:
            return None
        devices = [device for device, offered in enumerate(levels) if offered == level]
        kinds.setdefault(kind, []).extend(devices)
    options = [prod(len(sets) for sets in kind) for kind in kinds]
    cases = prod(
        comb(count + len(devices) - 1, len(devices))
        for count, devices in zip(options, kinds.values(), strict=True)
    )
    if cases > MAX_CASES or cases * goal.cells.count > MAX_NUMBERS or sum(options) > MAX_CASES:
        return None
    totals = np.zeros((1, goal.cells.count), dtype=np.int32)
    picks: list[list[tuple[int, ...]]] = []
    for kind, devices in zip(kinds, kinds.values(), strict=True):
        held = np.stack([_held(goal, bundles, choice) for choice in product(*kind)])
        picks.append(list(combinations_with_replacement(range(len(held)), len(devices))))
        index = np.array(picks[-1])
        counts = sum(held[index[:, place]].astype(np.int32) for place in range(len(devices)))
        totals = (totals[:, None, :] + counts).reshape(-1, goal.cells.count)
    best = _best_rows(goal, totals)
    case = int(best[int(stream.integers(len(best)))])
    numbers = np.unravel_index(case, [len(each) for each in picks]) if picks else ()
    chosen: dict[int, Choice] = {}
    for kind, devices, ways, number in zip(kinds, kinds.values(), picks, numbers, strict=True):
        choices = list(product(*kind))
        for place, device in zip(ways[int(number)], stream.permutation(devices), strict=True):
            chosen[int(device)] = choices[place]
    return [chosen[device] for device in range(len(levels))]


def _kind(bundles: Sequence[Bundle], level: float) -> Kind | None:
    """Return the sets to choose from for every bundle; None if there are too many choices."""
    kind: list[tuple[tuple[int, ...], ...]] = []
    for bundle in bundles:
        sets = fullest_sets(bundle, level)
        if sets is None or prod(map(len, kind)) * len(sets) > MAX_CASES:
            return None
        kind.append(sets)
    return tuple(kind)


def fullest_sets(bundle: Bundle, level: float) -> tuple[tuple[int, ...], ...] | None:
    """Return all sets of groups within a level that no further group fits into.

    More groups are never worse. None if there are too many to list.
    """
    most = bundle.most(level)
    if not bundle.uneven:
        if comb(bundle.count, most) > MAX_CASES:
            return None
        return tuple(combinations(range(bundle.count), most))
    if bundle.count > MAX_UNEVEN:
        return None
    return tuple(_unequal_sets(bundle, level)) or ((bundle.smallest,),)


def _unequal_sets(bundle: Bundle, level: float) -> Iterator[tuple[int, ...]]:
    everything = range(bundle.count)
    for size in range(1, bundle.count + 1):
        for groups in combinations(everything, size):
            rest = [group for group in everything if group not in groups]
            if bundle.fill(level, groups) == groups == bundle.fill(level, rest, groups):
                yield groups


def _held(goal: Goal, bundles: Sequence[Bundle], choice: Choice) -> NDArray[np.bool_]:
    member = []
    for bundle, groups in zip(bundles, choice, strict=True):
        flags = np.zeros(bundle.count, dtype=bool)
        flags[list(groups)] = True
        member.append(flags)
    return goal.cells.held(member)


def _best_rows(goal: Goal, totals: Counts) -> Indices:
    """Return the rows of coverage that rank best by the goal."""
    rows = np.arange(len(totals))
    for wait in range(int(goal.wait.max()) + 1):
        entries = goal.wait == wait
        uncovered = totals[np.ix_(rows, goal.cell[entries])] == 0
        left = uncovered @ goal.blocks[entries]
        rows = rows[left == left.min()]
    least = totals[np.ix_(rows, goal.real)].min(axis=1)
    rows = rows[least == least.max()]
    kept = totals[rows] @ goal.norms
    # Sums of norms in a different order differ in their last bits.
    best: Indices = rows[kept >= kept.max() - 1e-12 * abs(kept.max())]
    return best
