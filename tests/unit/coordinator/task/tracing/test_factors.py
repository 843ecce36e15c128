"""Factors when there are very many of them."""

from __future__ import annotations

from coordinator.task.tracing.factors import fresh, leaves, reshape, tie


def test_leaves_of_a_very_long_chain_of_ties() -> None:
    """A deep residual model ties its stream once a layer; recursion would end at a thousand."""
    dims = [fresh(12) for _ in range(5000)]
    for one, other in zip(dims[1:], dims, strict=False):
        tie(one, other, "is regrouped")
    first, second = reshape([dims[0]], [3, 4], "is regrouped")
    for dim in dims:
        assert leaves(dim) == [*leaves(first), *leaves(second)]
