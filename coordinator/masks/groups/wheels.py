"""Choices that turn round by round, like the wheels of an odometer.

A wheel is a bundle whose choice goes through a cycle of positions. Bundles that meet in a tensor
have different paces: otherwise their choices would stay side by side, and most blocks between them
would never be trained. A slower wheel holds still until every faster one has been all around.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.groups.cells import Cells

Laps = Callable[[int, int], tuple[int, bool]]
"""(bundle's number, groups that a block needs of it) → the result of `laps_of`."""


def paces_of(cells: Cells, count: int) -> list[int]:
    """Choose a pace for every bundle, different for any two that meet in a tensor; few in all."""
    meets: list[set[int]] = [set() for _ in range(count)]
    for table in cells.tables:
        for number in table.bundles:
            meets[number] |= set(table.bundles) - {number}
    paces = [-1] * count
    for number in sorted(range(count), key=lambda number: (-len(meets[number]), number)):
        taken = {paces[other] for other in meets[number]}
        paces[number] = next(pace for pace in range(count) if pace not in taken)
    return paces


def laps_of(shown: NDArray[np.bool_], need: int) -> tuple[int, bool]:
    """Return (n, complete) for sets of `need` groups, given a wheel as `shown[position, group]`.

    Any `n` positions in a row show every set that is ever shown; `complete`: every set is shown.
    Sets of more than two groups count as shown only if everything is.
    """
    positions, count = shown.shape
    longest, complete = 1, need <= 2 or bool(shown.all())
    for wanted in combinations_with_replacement(range(count), min(max(need, 1), 2)):
        turns = np.flatnonzero(shown[:, list(wanted)].all(axis=1))
        if not len(turns):
            complete = False
            continue
        apart = np.diff(np.append(turns, turns[0] + positions))
        longest = max(longest, int(apart.max()))
    return longest, complete


def gap_of(cells: Cells, paces: Sequence[int], holds: Sequence[int], laps: Laps) -> int | None:
    """The most rounds in a row that any block stays uncovered; None if one does for ever.

    `holds[c]` is the number of rounds for which a wheel of pace `c` keeps a position.

    Proof. Let `L_b` be a number of positions such that any `L_b` in a row on bundle `b` show
    everything one block needs of it; it is found by going around once. Let `H_0 = 1`, and `H_c+1`
    at least `H_c` times the `L_b` of every wheel of pace `c`. By induction, all combinations of the
    faster wheels occur while one holds still. A block on one bundle of pace `c` is thus missed for
    at most `(L_b − 1) · H_c` rounds. For a block on several bundles, with the slowest `b` of pace
    `c`, at most `L_b · H_c` rounds lie between two of its turns from hold to hold, and less than
    `H_c` more within the hold; it is missed for at most `(L_b + 1) · H_c − 2`.
    """
    longest = 0
    for table in cells.tables:
        if not all(laps(number, table.bundles.count(number))[1] for number in set(table.bundles)):
            return None
        if table.bundles:
            slowest = max(table.bundles, key=lambda number: paces[number])
            turns, _ = laps(slowest, table.bundles.count(slowest))
            hold = holds[paces[slowest]]
            alone = len(set(table.bundles)) == 1
            longest = max(longest, (turns - 1) * hold if alone else (turns + 1) * hold - 2)
    return longest
