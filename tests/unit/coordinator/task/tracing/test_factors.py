"""Factors when there are very many of them, and sums of them."""

from __future__ import annotations

from coordinator.task.tracing.factors import (
    concatenation,
    freeze,
    fresh,
    leaves,
    reshape,
    segments_of,
    tie,
    widths,
)


def test_leaves_of_a_very_long_chain_of_ties() -> None:
    """A deep residual model ties its stream once a layer; recursion would end at a thousand."""
    dims = [fresh(12) for _ in range(5000)]
    for one, other in zip(dims[1:], dims, strict=False):
        tie(one, other, "is regrouped")
    first, second = reshape([dims[0]], [3, 4], "is regrouped")
    for dim in dims:
        assert leaves(dim) == [*leaves(first), *leaves(second)]


def test_weight_that_meets_a_concatenation_has_its_segments() -> None:
    left, right = fresh(4), fresh(6)
    both = concatenation([left, right], 10)
    every = concatenation([both, left], 14)
    weight, flat = fresh(14), fresh(28)
    tie(weight, every, "is regrouped")
    assert segments_of(leaves(weight)[0]) == [leaves(left), leaves(right), leaves(left)]
    pixels = fresh(2)
    tie(flat, [*every, *pixels], "is regrouped")
    assert widths(flat) == [*widths(weight), *leaves(pixels)]
    freeze(right, "is an output")
    assert [leaf.frozen for leaf in widths(weight)] == [None, "is an output", None]


def test_equal_segments_are_tied_and_others_frozen() -> None:
    one, other = [fresh(4), fresh(6)], [fresh(4), fresh(6)]
    tie(concatenation(one, 10), concatenation(other, 10), "is added")
    assert [leaves(dim) for dim in one] == [leaves(dim) for dim in other]
    assert all(leaf.frozen is None for dim in one for leaf in leaves(dim))
    turned = concatenation([fresh(6), fresh(4)], 10)
    whole = concatenation(one, 10)
    tie(whole, turned, "is added")
    assert {leaf.frozen for dim in (*one, whole, turned) for leaf in widths(dim)} == {"is added"}


def test_concatenation_that_is_split_or_tied_to_something_frozen_stays_whole() -> None:
    left, right = fresh(4), fresh(4)
    reshape([concatenation([left, right], 8)], [2, 4], "is regrouped")
    assert None not in {leaf.frozen for leaf in (*leaves(left), *leaves(right))}
    left, right = fresh(4), fresh(4)
    tie(fresh(8, frozen="is an input"), concatenation([left, right], 8), "is added")
    assert {leaf.frozen for leaf in (*leaves(left), *leaves(right))} == {"is an input"}
