"""Factors when there are very many of them, and sums of them."""

from __future__ import annotations

from coordinator.task.tracing.factors import (
    concatenation,
    cut,
    freeze,
    fresh,
    leaves,
    reshape,
    segments_of,
    size_of,
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


def test_tied_concatenations_get_the_boundaries_of_both() -> None:
    one, other = [fresh(4), fresh(6)], [fresh(4), fresh(6)]
    tie(concatenation(one, 10), concatenation(other, 10), "is added")
    assert [leaves(dim) for dim in one] == [leaves(dim) for dim in other]
    turned = concatenation([fresh(6), fresh(4)], 10)
    whole = concatenation(one, 10)
    tie(whole, turned, "is added")
    assert [leaf.size for leaf in widths(whole)] == [4, 2, 4]
    assert widths(whole) == widths(turned)
    assert [leaf.size for leaf in widths(other[1])] == [2, 4]
    assert all(leaf.frozen is None for leaf in widths(whole))


def test_cut_gives_every_piece_a_width_of_its_own() -> None:
    whole = fresh(12)
    first, second = cut(whole, [4, 8], "is split")
    assert widths(whole) == [*leaves(first), *leaves(second)]
    assert [size_of(piece) for piece in cut(whole, [6, 6], "is split")] == [6, 6]
    assert [leaf.size for leaf in widths(whole)] == [4, 2, 6]
    flat = [*fresh(3), *fresh(4)]
    few, more = cut(flat, [4, 8], "is split")
    assert [size_of(few), size_of(more)] == [4, 8]
    assert None not in {leaf.frozen for piece in cut(flat, [6, 6], "is split") for leaf in piece}


def test_concatenation_that_is_split_evenly_has_parts_alike() -> None:
    left, right = fresh(4), fresh(4)
    front, rest = reshape([concatenation([left, right], 8)], [2, 4], "is regrouped")
    assert leaves(left) == leaves(right) == leaves(rest)
    assert [leaf.frozen for leaf in leaves(front)] == ["counts the parts of a concatenation"]
    assert {leaf.frozen for leaf in leaves(left)} == {None}


def test_concatenation_tied_to_something_frozen_stays_whole() -> None:
    left, right = fresh(4), fresh(4)
    tie(fresh(8, frozen="is an input"), concatenation([left, right], 8), "is added")
    assert {leaf.frozen for leaf in (*leaves(left), *leaves(right))} == {"is an input"}
