"""Named random streams."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from edge_sdk.protocol.streams import stream

words = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=5)
names = st.lists(st.one_of(words, st.integers(0, 1000)), max_size=4)
seeds = st.integers(-5, 2**64)


@given(seed=seeds, path=names)
def test_stream_repeats_for_the_same_names(seed: int, path: list[str | int]) -> None:
    first, second = stream(seed, *path), stream(seed, *path)
    assert first is not second
    assert first.integers(2**63, size=4).tolist() == second.integers(2**63, size=4).tolist()


@given(seed=seeds, other_seed=seeds, path=names, other=names)
def test_stream_differs_for_different_names(
    seed: int, other_seed: int, path: list[str | int], other: list[str | int]
) -> None:
    assume((seed, path) != (other_seed, other))
    ours = stream(seed, *path).integers(2**63, size=2)
    theirs = stream(other_seed, *other).integers(2**63, size=2)
    assert ours.tolist() != theirs.tolist()


def test_stream_keeps_names_apart() -> None:
    paths: list[tuple[str | int, ...]] = [
        ("pi", 1, "batches"),
        ("pi", 1, "dropout"),
        ("pi", 2, "batches"),
        ("pi", 11, "batches"),
        ("pi1", 1, "batches"),
        ("pi", "1batches"),
        ("pi1batches",),
        ("pi", "1", "batches"),
        (),
    ]
    drawn = {stream(1, *path).random() for path in paths} | {stream(11, *paths[0]).random()}
    assert len(drawn) == len(paths) + 1


def test_stream_is_the_same_on_every_machine() -> None:
    drawn = stream(7, "pi-4", 12, "batches").integers(0, 2**32, size=4)
    assert drawn.tolist() == [3001257746, 2714156886, 1194084727, 3926933186]
    assert drawn.dtype == np.int64


def test_streams_of_neighbouring_rounds_are_uncorrelated() -> None:
    draws = np.array([stream(3, "pi", round, "skip").random(4) for round in range(2000)])
    correlations = np.corrcoef(np.concatenate([draws[:-1], draws[1:]], axis=1).T)
    off_diagonal = correlations[~np.eye(8, dtype=bool)]
    assert np.abs(off_diagonal).max() < 0.1
    assert np.abs(draws.mean(axis=0) - 0.5).max() < 0.03
