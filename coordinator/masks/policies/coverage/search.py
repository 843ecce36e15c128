"""`coverage` for fleets of any size: a few good starts, improved by small changes.

Nothing here depends on time: the effort follows from the number of devices and cells alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.groups.bundles import Bundle
from coordinator.masks.groups.cells import Cells, Floats, Table
from coordinator.masks.policies.coverage.exact import Choice
from coordinator.masks.policies.coverage.goal import Counts, Goal, better

EFFORT = 3_000_000
"""Budget for changes tried × the cost of one, in cells."""

TRIAL_COST = 2_000
"""Fixed cost of trying a change, in cells."""

SHAKES = 20
"""Most random restarts of a search that is stuck, if effort is left."""

URGENCY = 16.0
"""Blocks of the next urgency that weigh as much as one of this urgency: see `_weights`."""

Selection = list[NDArray[np.bool_]]
"""For every bundle, flags of the groups a device has."""


@dataclass(slots=True, eq=False)
class FleetChoice:
    """A choice for every device, and the resulting coverage."""

    goal: Goal
    bundles: Sequence[Bundle]
    levels: Sequence[float]
    members: list[Selection]
    held: list[NDArray[np.bool_]]
    counts: Counts

    def give(self, device: int, member: Selection, held: NDArray[np.bool_]) -> None:
        """Assign other groups to a device."""
        self.counts = self.counts - self.held[device] + held
        self.members[device], self.held[device] = member, held

    def choices(self) -> list[Choice]:
        """Return the groups of every device and bundle."""
        return [tuple(_groups(flags) for flags in member) for member in self.members]


def fleet_of(
    goal: Goal, bundles: Sequence[Bundle], levels: Sequence[float], choices: Sequence[Choice]
) -> FleetChoice:
    """Make a fleet with these choices."""
    members = [
        [_flags(bundle, groups) for bundle, groups in zip(bundles, choice, strict=True)]
        for choice in choices
    ]
    held = [goal.cells.held(member) for member in members]
    counts: Counts = np.stack(held).sum(axis=0, dtype=np.int32)
    return FleetChoice(goal, bundles, levels, members, held, counts)


def search_choices(
    goal: Goal,
    bundles: Sequence[Bundle],
    levels: Sequence[float],
    start: Sequence[Choice],
    stream: np.random.Generator,
) -> list[Choice]:
    """Return choices that are never worse than `start` or than dealing out cells."""
    fleets = [
        fleet_of(goal, bundles, levels, start),
        fleet_of(goal, bundles, levels, deal_cells(goal, bundles, levels, stream)),
        _respond_in_turn(goal, bundles, levels, stream),
    ]
    best = fleets[0]
    for fleet in fleets[1:]:
        if better(goal.spread(fleet.counts), goal.spread(best.counts)):
            best = fleet
    return _improve(best, stream).choices()


# -- starts --------------------------------------------------------------------------------------


def deal_cells(
    goal: Goal, bundles: Sequence[Bundle], levels: Sequence[float], stream: np.random.Generator
) -> list[Choice]:
    """Deal each device in turn as many cells as it can surely hold: `sure_cells`.

    The cells that have waited longest go first, and among those the ones with the most blocks.
    Cells already covered are skipped. Remaining room is filled at random. The bound on gaps rests
    on this start.
    """
    cells = goal.cells
    waits = goal.waits()
    first = np.zeros(cells.count)
    longest = goal.wait == waits[goal.cell]
    np.add.at(first, goal.cell[longest], goal.blocks[longest])
    order = np.lexsort((-first, waits))
    queue = [int(cell) for cell in order[: len(goal.real)]]
    covered = np.zeros(cells.count, dtype=bool)
    place = 0
    choices = []
    for level in levels:
        groups: list[list[int]] = [[] for _ in bundles]
        for _ in range(sure_cells(cells, bundles, level)):
            while place < len(queue) and (
                covered[queue[place]] or _has(cells, queue[place], groups)
            ):
                place += 1
            if place == len(queue):
                break
            for bundle, group in cells.groups(queue[place]):
                if group not in groups[bundle]:
                    groups[bundle].append(group)
        choice = tuple(
            bundle.fill(level, _others(bundle, held, stream), held) or (bundle.smallest,)
            for bundle, held in zip(bundles, groups, strict=True)
        )
        covered |= cells.held([_flags(b, g) for b, g in zip(bundles, choice, strict=True)])
        choices.append(choice)
    return choices


def sure_cells(cells: Cells, bundles: Sequence[Bundle], level: float) -> int:
    """Number of arbitrary cells a device can hold at once: one group of each bundle for each."""
    return min(
        (
            bundle.surely(level) // cells.need(number)
            for number, bundle in enumerate(bundles)
            if cells.need(number)
        ),
        default=1,
    )


def _respond_in_turn(
    goal: Goal, bundles: Sequence[Bundle], levels: Sequence[float], stream: np.random.Generator
) -> FleetChoice:
    """Let each device take the most urgent groups given the others; largest devices first."""
    nothing = [[np.zeros(bundle.count, dtype=bool) for bundle in bundles] for _ in levels]
    empty = np.zeros(goal.cells.count, dtype=bool)
    counts = np.zeros(goal.cells.count, dtype=np.int32)
    fleet = FleetChoice(goal, bundles, levels, nothing, [empty] * len(levels), counts)
    waits = goal.waits()
    shuffled = stream.permutation(len(levels))
    for device in sorted(shuffled.tolist(), key=lambda device: -levels[device]):
        member = _response(fleet, levels[device], fleet.counts, waits, stream)
        fleet.give(device, member, goal.cells.held(member))
    return fleet


# -- one device's answer to all others -----------------------------------------------------------


def _weights(goal: Goal, counts: Counts, waits: NDArray[np.int64]) -> Floats:
    """Value of covering each cell once more.

    Cells are ranked by urgency: uncovered ones by how long they have waited, then covered ones by
    how little they are covered. Each rank weighs `URGENCY` times less than the one before.
    """
    code = np.where(counts == 0, waits, int(waits.max()) + counts)
    code[goal.cells.blocks == 0] = int(waits.max())
    rank = np.cumsum(np.bincount(code) > 0) - 1
    worth: Floats = goal.cells.blocks * URGENCY ** -np.minimum(rank, 40)[code]
    return worth


def _response(
    fleet: FleetChoice,
    level: float,
    others: Counts,
    waits: NDArray[np.int64],
    stream: np.random.Generator,
) -> Selection:
    """Choose valuable groups for a device, given the coverage by all others.

    Takes the most valuable groups bundle by bundle; an undecided bundle counts with the share of it
    that the device can have. Then each bundle is decided again, knowing the rest.
    """
    weights = _weights(fleet.goal, others, waits)
    bundles, tables = fleet.bundles, fleet.goal.cells.tables
    behind: list[list[tuple[Table, Floats, int]]] = [[] for _ in bundles]
    for table in tables:
        part = weights[table.cells].reshape(table.shape)
        for dim, bundle in enumerate(table.bundles):
            behind[bundle].append((table, part, dim))
    share: list[Floats] = [
        np.full(bundle.count, bundle.most(level) / bundle.count) for bundle in bundles
    ]
    for _ in range(2):
        changed = False
        for number in stream.permutation(len(bundles)).tolist():
            worth = np.zeros(bundles[number].count)
            for table, part, dim in behind[number]:
                worth += _along(part, table.bundles, dim, share)
            order = np.lexsort((stream.random(len(worth)), -worth / _sizes(bundles[number])))
            taken = _flags(bundles[number], bundles[number].take(level, order.tolist()))
            changed = changed or not np.array_equal(share[number], taken)
            share[number] = taken.astype(np.float64)
        if not changed:
            break
    return [each > 0 for each in share]


def _along(part: Floats, behind: tuple[int, ...], dim: int, share: Sequence[Floats]) -> Floats:
    """Value of each group of one dimension of a table, given the shares of the others."""
    worth = part
    for other in reversed(range(dim + 1, len(behind))):
        worth = worth @ share[behind[other]]  # sums over the last dimension
    for other in reversed(range(dim)):
        worth = share[behind[other]] @ worth  # sums over the last but one
    return worth


# -- small changes -------------------------------------------------------------------------------


def _improve(fleet: FleetChoice, stream: np.random.Generator) -> FleetChoice:
    """Change one device at a time while that helps and effort is left.

    The first two thirds of the effort go to the spread of coverage: where no change helps any more,
    a few devices draw again at random, and the best result so far is kept. The rest goes to the
    norm of the kept weights, without undoing the first three steps of the goal.
    """
    goal = fleet.goal
    effort = EFFORT // (TRIAL_COST + goal.cells.count)
    trials = _climb(fleet, goal.spread, _responses_and_swaps, effort - effort // 3, stream)
    for _ in range(SHAKES):
        if trials <= 0:
            break
        shaken = _shaken(fleet, stream)
        trials = _climb(shaken, goal.spread, _responses_and_swaps, trials, stream)
        if not better(goal.spread(fleet.counts), goal.spread(shaken.counts)):
            fleet = shaken
    _climb(fleet, goal.key, _swaps, effort // 3, stream)
    return fleet


def _shaken(fleet: FleetChoice, stream: np.random.Generator) -> FleetChoice:
    """Return the fleet with the groups of one to three devices redrawn at random."""
    choices = fleet.choices()
    some = stream.permutation(len(choices))[: int(stream.integers(1, 4))]
    for device in some.tolist():
        level = fleet.levels[device]
        choices[device] = tuple(
            bundle.take(level, _others(bundle, (), stream)) for bundle in fleet.bundles
        )
    return fleet_of(fleet.goal, fleet.bundles, fleet.levels, choices)


def _climb(
    fleet: FleetChoice,
    measure: Callable[[Counts], Floats],
    moves: Callable[[FleetChoice, int, np.random.Generator], Iterator[Selection]],
    trials: int,
    stream: np.random.Generator,
) -> int:
    """Apply every change that reduces the measure, until none does or trials run out.

    Returns the number of trials left.
    """
    now, moved = measure(fleet.counts), True
    while moved:
        moved = False
        for device in stream.permutation(len(fleet.levels)).tolist():
            for member in moves(fleet, device, stream):
                if trials <= 0:
                    return 0
                trials -= 1
                held = fleet.goal.cells.held(member)
                then = measure(fleet.counts - fleet.held[device] + held)
                if better(then, now):
                    fleet.give(device, member, held)
                    now, moved = then, True
                    break
    return trials


def _responses_and_swaps(
    fleet: FleetChoice, device: int, stream: np.random.Generator
) -> Iterator[Selection]:
    """Yield the device's best response to all others, then every swap."""
    if not all(flags.all() for flags in fleet.members[device]):
        others = fleet.counts - fleet.held[device]
        yield _response(fleet, fleet.levels[device], others, fleet.goal.waits(), stream)
        yield from _swaps(fleet, device, stream)


def _swaps(fleet: FleetChoice, device: int, stream: np.random.Generator) -> Iterator[Selection]:
    """Yield the device's groups with one exchanged for another, in random order."""
    member, level = fleet.members[device], fleet.levels[device]
    swaps = [
        (number, out, into)
        for number, flags in enumerate(member)
        for out in np.flatnonzero(flags).tolist()
        for into in np.flatnonzero(~flags).tolist()
    ]
    for place in stream.permutation(len(swaps)).tolist():
        number, out, into = swaps[place]
        bundle = fleet.bundles[number]
        stay = [group for group in _groups(member[number]) if group != out]
        rest = _others(bundle, [*stay, into, out], stream)
        taken = bundle.fill(level, [into, *rest], stay)
        if into in taken:
            yield [*member[:number], _flags(bundle, taken), *member[number + 1 :]]


# -- groups as numbers and as flags --------------------------------------------------------------


def _flags(bundle: Bundle, groups: Sequence[int]) -> NDArray[np.bool_]:
    flags = np.zeros(bundle.count, dtype=bool)
    flags[list(groups)] = True
    return flags


def _groups(flags: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(np.flatnonzero(flags).tolist())


def _others(bundle: Bundle, groups: Sequence[int], stream: np.random.Generator) -> list[int]:
    """Return all other groups, in random order."""
    return [group for group in stream.permutation(bundle.count).tolist() if group not in groups]


def _has(cells: Cells, cell: int, groups: Sequence[Sequence[int]]) -> bool:
    """True if a device with these groups of every bundle holds the cell."""
    return all(group in groups[bundle] for bundle, group in cells.groups(cell))


def _sizes(bundle: Bundle) -> Floats:
    """Return the room each group takes: its share of atoms; 1 where groups are equal."""
    uneven = [np.array(axis.groups) / axis.atoms for axis in bundle.uneven]
    return np.max(uneven, axis=0) if uneven else np.ones(bundle.count)
