"""Splitting axes into groups, and how many atoms a level means."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_sdk.protocol.errors import GroupError
from edge_sdk.protocol.plan.specs import MAX_GROUPS, Axis, split_atoms

law = settings(max_examples=200)
levels = st.one_of(
    st.floats(0, 1, exclude_min=True),
    st.builds(lambda a, b: min(a, b) / max(a, b), st.integers(1, 20), st.integers(1, 20)),
)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write `total` as a sum of `parts` positive numbers, in order."""
    return [
        tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))
        for cuts in combinations(range(1, total), parts - 1)
    ]


@pytest.mark.parametrize("atoms", [1, 2, 10, 63, 64, 65, 100, 1024])
def test_split_into_equal_groups(atoms: int) -> None:
    for parts in range(1, MAX_GROUPS + 1):
        sizes = split_atoms(atoms, parts)
        assert len(sizes) == min(parts, atoms)
        assert sum(sizes) == atoms
        assert max(sizes) - min(sizes) <= 1
        assert Axis("a", sizes).equal


@pytest.mark.parametrize(
    ("atoms", "sizes"),
    [
        (100, (5, 10, 20, 30, 35)),
        (20, (1, 2, 4, 6, 7)),
        (64, (3, 7, 13, 19, 22)),
        (6, (1, 1, 1, 1, 2)),
        (5, (1, 1, 1, 1, 1)),
        (3, (1, 1, 1)),
    ],
)
def test_split_by_the_papers_ratios(atoms: int, sizes: tuple[int, ...]) -> None:
    assert split_atoms(atoms, (5, 10, 20, 30, 35)) == sizes


@law
@example(atoms=8, ratios=[6, 2, 30, 42])  # two groups of less than one atom: another gives way
@given(atoms=st.integers(1, 14), ratios=st.lists(st.integers(1, 50), min_size=1, max_size=5))
def test_split_is_as_close_to_the_ratios_as_whole_atoms_allow(
    atoms: int, ratios: list[int]
) -> None:
    sizes = split_atoms(atoms, ratios)
    if atoms <= len(ratios):
        assert sizes == (1,) * atoms
        return

    def distance(candidate: tuple[int, ...]) -> float:
        exact = [atoms * ratio / sum(ratios) for ratio in ratios]
        return sum((a - b) ** 2 for a, b in zip(candidate, exact, strict=True))

    assert sizes in compositions(atoms, len(ratios))
    best = min(map(distance, compositions(atoms, len(ratios))))
    assert distance(sizes) == pytest.approx(best, abs=1e-9)


@law
@given(
    atoms=st.integers(1, 5000),
    ratios=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=MAX_GROUPS),
)
def test_split_by_many_ratios_owns_every_atom(atoms: int, ratios: list[float]) -> None:
    sizes = split_atoms(atoms, ratios)
    assert len(sizes) == min(atoms, len(ratios))
    assert sum(sizes) == atoms
    assert min(sizes) >= 1


@pytest.mark.parametrize(
    ("atoms", "parts"),
    [
        (10, 0),
        (10, -1),
        (10, MAX_GROUPS + 1),
        (10, 10**12),
        (10, ()),
        (10, (1,) * (MAX_GROUPS + 1)),
        (10, (1, 0)),
        (10, (1, -1)),
        (10, (1, float("nan"))),
        (10, (1, float("inf"))),
        (0, 2),
        (-3, 2),
        (0, (1, 2)),
    ],
)
def test_split_that_makes_no_sense_is_refused(atoms: int, parts: Any) -> None:
    with pytest.raises(GroupError):
        split_atoms(atoms, parts)


@law
@given(count=st.integers(1, MAX_GROUPS), level=levels)
def test_wanted_is_the_most_groups_within_the_level(count: int, level: float) -> None:
    within = [n for n in range(count + 1) if n <= level * count + 1e-9]
    assert Axis("a", (3,) * count).wanted(level) == max(1, *within)


@pytest.mark.parametrize("count", range(1, MAX_GROUPS + 1))
def test_level_that_is_a_whole_number_of_groups_or_atoms_is_met(count: int) -> None:
    # k / n · n is often a little less than k in floating point.
    for kept in range(1, count + 1):
        assert Axis("a", (3,) * count).wanted(kept / count) == kept
        binary = Axis("a", (1, 2, 4, 8, 16, 32, count))  # every number of atoms can be reached
        assert binary.atoms_at(kept / binary.atoms) == kept


@law
@given(groups=st.lists(st.integers(1, 9), min_size=1, max_size=7), level=levels)
def test_atoms_at_is_the_fullest_set_within_the_level(groups: list[int], level: float) -> None:
    axis = Axis("a", tuple(groups))
    subsets = [chosen for n in range(1, len(groups) + 1) for chosen in combinations(groups, n)]
    if max(groups) - min(groups) <= 1:
        allowed = [chosen for chosen in subsets if len(chosen) <= level * len(groups) + 1e-9]
        fallback = max(groups)
    else:
        allowed = [chosen for chosen in subsets if sum(chosen) <= level * sum(groups) + 1e-9]
        fallback = min(groups)
    assert axis.equal == (max(groups) - min(groups) <= 1)
    assert axis.atoms_at(level) == max(map(sum, allowed), default=fallback)
    assert axis.atoms_at(1.0) == axis.atoms == sum(groups)


@pytest.mark.parametrize(
    ("level", "number"), [(1.0, 3), (0.99, 2), (0.75, 2), (0.5, 1), (0.49, 0), (0.25, 0), (0.01, 0)]
)
def test_level_takes_one_alternative(level: float, number: int) -> None:
    axis = Axis("copies", (1, 1, 1, 1), alternatives=True)
    assert axis.alternative(level) == number
    assert (axis.wanted(level), axis.atoms_at(level)) == (1, 1)
