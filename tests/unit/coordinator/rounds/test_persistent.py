"""Versions of sets, maps and heaps: each stays as it is, and the next costs what changed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds.persistent import Heap, PersistentMap, PersistentSet, merged

STEPS = st.lists(
    st.tuples(
        st.integers(0, 30),  # the version it is made from, counted back
        st.integers(0, 5),  # the key
        st.none() | st.integers(0, 9),  # the value; None: the key is dropped
    ),
    max_size=40,
)


@given(STEPS)
def test_every_version_of_a_map_stays_as_it_was(steps: list[tuple[int, int, int | None]]) -> None:
    versions: list[tuple[PersistentMap[int, int], dict[int, int]]] = [(PersistentMap(), {})]
    for back, key, value in steps:
        made, model = versions[-1 - back % len(versions)]
        if value is None:
            after = made.dropping(key), {k: v for k, v in model.items() if k != key}
        else:
            after = made.putting(key, value), {**model, key: value}
        versions.append(after)
        for each, expected in versions:  # by key first: that copies nothing
            assert [each.get(k) for k in range(6)] == [expected.get(k) for k in range(6)]
    for each, expected in versions:
        assert each == expected
        assert len(each) == len(expected)


@given(STEPS)
def test_every_version_of_a_set_stays_as_it_was(steps: list[tuple[int, int, int | None]]) -> None:
    versions: list[tuple[PersistentSet[int], frozenset[int]]] = [(PersistentSet(), frozenset())]
    for back, key, value in steps:
        made, model = versions[-1 - back % len(versions)]
        if value is None:
            versions.append((made.dropping(key), model - {key}))
        else:
            versions.append((made.adding(key), model | {key}))
    for each, expected in versions:
        assert [key in each for key in range(6)] == [key in expected for key in range(6)]
    for each, expected in versions:
        assert each == expected


@settings(max_examples=50)
@given(STEPS, st.integers(0, 40))
def test_ranks_are_those_of_each_version(
    steps: list[tuple[int, int, int | None]], first: int
) -> None:
    """Ranks are in use from the step `first` on: some versions are made before, some after."""
    versions: list[tuple[PersistentSet[int], frozenset[int]]] = [(PersistentSet(), frozenset())]
    for number, (back, key, value) in enumerate(steps):
        made, model = versions[-1 - back % len(versions)]
        after = made.dropping(key) if value is None else made.adding(key)
        versions.append((after, model - {key} if value is None else model | {key}))
        if number >= first:
            assert versions[-1][0].at(range(len(versions[-1][1]))) == sorted(versions[-1][1])
    for each, expected in versions:
        assert each.at(range(len(expected))) == sorted(expected)


def test_change_that_changes_nothing_gives_the_same_version() -> None:
    names, ages = PersistentSet("ab"), PersistentMap({"a": 1})
    assert names.adding("a") is names
    assert names.dropping("z") is names
    assert ages.dropping("z") is ages
    assert ages.merging({}) is ages


@given(st.lists(st.integers(0, 20)))
def test_heap_gives_the_least_first_and_stays_as_it_was(numbers: list[int]) -> None:
    heap: Heap[int] | None = None
    for number in numbers:
        heap = merged(heap, Heap(number))
    for _ in range(2):
        found, left = [], heap
        while left is not None:
            found.append(left.first)
            left = left.rest()
        assert found == sorted(numbers)


def test_copy_stays_as_it_is_while_it_is_read_and_versions_are_made() -> None:
    older = PersistentMap({number: number for number in range(100)})
    newer = older.putting(100, 100)
    for version, keys in ((older, 100), (newer, 101)):
        reading = iter(version.apart())
        first = next(reading)
        version.dropping(50).putting(200, 200)
        assert [first, *reading] == list(range(keys))
