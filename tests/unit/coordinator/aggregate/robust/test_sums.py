"""Sums of blocks against loops, at the edges of pieces and of threads' parts."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregate.robust.sums import (
    PIECE,
    Term,
    block_sums,
    divide,
    over_shards,
    sum_terms,
)
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan(
    (Axis("a", (PIECE - 1, 1, 1, PIECE, 7)),),
    (Tensor("w", "float32", (Dim(2 * PIECE + 8, 0),)), Tensor("bias", "float32", (Dim(3),))),
)


def terms() -> list[tuple[tuple[int, ...], Term]]:
    rng = np.random.default_rng(0)
    made: list[tuple[tuple[int, ...], Term]] = []
    given: list[tuple[tuple[int, ...], float]] = [
        ((0, 3), 1.0),
        ((1,), 0.25),
        ((2, 3, 4), -3.0),
        ((0, 4), 1.0),
    ]
    for groups, factor in given:
        flat = rng.integers(-9, 9, PLAN.parameters).astype(np.float32)
        made.append((groups, Term(PLAN.select(flat, {"a": groups}), factor)))
    return made


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_sum_terms_across_pieces_and_threads(threads: int) -> None:
    """Whole numbers and quarters: float32 sums of them are exact."""
    expected = np.zeros(PLAN.parameters)
    for _, term in terms():
        start = 0
        for block in term.blocks.ids.tolist():
            low, high = PLAN.block_offsets[block : block + 2].tolist()
            values = term.blocks.values[start : start + high - low]
            expected[low:high] += term.factor * values.astype(np.float64)
            start += high - low
    got = sum_terms(PLAN, [term for _, term in terms()], threads=threads)
    assert got.dtype == np.float32
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_sum_terms_of_values_at_any_address(shift: int) -> None:
    odd = []
    for _, term in terms():
        data = memoryview(bytearray(shift) + term.blocks.values.tobytes())[shift:]
        values = np.frombuffer(data, np.float32)
        assert not values.flags.aligned
        odd.append(Term(Blocks(term.blocks.ids, values), term.factor))
    expected = sum_terms(PLAN, [term for _, term in terms()])
    assert sum_terms(PLAN, odd, threads=2).tobytes() == expected.tobytes()


def test_divide_by_a_number_per_block_keeps_zeros_where_there_is_none() -> None:
    total = np.ones(PLAN.parameters, dtype=np.float32)
    by = np.arange(PLAN.block_count, dtype=np.float64)
    share = np.divide(1.0, by, out=np.zeros_like(by), where=by > 0).astype(np.float32)
    expected = np.repeat(share, PLAN.block_sizes)
    assert divide(PLAN, total, by) is total
    assert total.tobytes() == expected.tobytes()


def test_sum_terms_of_nothing_is_zero() -> None:
    assert not sum_terms(PLAN, [], threads=2).any()


def test_sum_terms_leaves_what_it_is_given() -> None:
    made = [term for _, term in terms()]
    before = [term.blocks.values.tobytes() for term in made]
    sum_terms(PLAN, made)
    assert [term.blocks.values.tobytes() for term in made] == before


def test_block_sums_adds_numbers_where_terms_hold_a_block() -> None:
    given = [(term.blocks, float(number)) for number, (_, term) in enumerate(terms(), 1)]
    expected = [0.0] * PLAN.block_count
    for number, (groups, _) in enumerate(terms(), 1):
        for block in (*groups, 5):  # the bias has no width axis: it is in every submodel
            expected[block] += number
    assert block_sums(PLAN, given).tolist() == expected


@pytest.mark.parametrize(("size", "threads"), [(10, 3), (1, 3), (0, 2), (7, 1)])
def test_over_shards_covers_the_range_once(size: int, threads: int) -> None:
    times = np.zeros(size, dtype=int)

    def work(start: int, end: int) -> None:
        times[start:end] += 1

    over_shards(size, threads, work)
    assert (times == 1).all()


def test_over_shards_passes_on_what_a_thread_raises() -> None:
    def work(start: int, end: int) -> None:
        raise OSError(f"{start}")

    with pytest.raises(OSError, match="0"):
        over_shards(4, 2, work)
