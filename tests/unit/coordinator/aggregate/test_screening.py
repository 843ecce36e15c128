"""What is out of the ordinary: per block, per level, per unit of learning rate."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregate.screening import MIN_SEEN, Scale, Usual, block_squares, scale_of
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan(
    axes=(Axis("a", (2, 3)),),
    tensors=(Tensor("w", "float32", (Dim(5, 0), Dim(4))), Tensor("bias", "float32", (Dim(3),))),
)


def scale(values: list[float], *, level: float = 0.5, learning_rate: float = 0.1) -> Scale:
    """Of a movement whose blocks 0, 1, 2 hold these values throughout."""
    flat = np.repeat(np.array(values, dtype=np.float32), PLAN.block_sizes)
    blocks = Blocks(np.arange(PLAN.block_count), flat)
    return scale_of(PLAN, blocks, level=level, learning_rate=learning_rate)


def taught(*scales: Scale) -> Usual:
    usual = Usual()
    for entry in scales:
        usual = usual.learn(entry)
    return usual


USUAL = taught(*[scale([0.1, 0.2, 0.3])] * MIN_SEEN)


def test_scale_is_the_mean_square_of_each_block_over_the_rate() -> None:
    random = np.random.default_rng(3)
    flat = random.normal(size=PLAN.parameters).astype(np.float32)
    got = scale_of(
        PLAN, Blocks(np.arange(PLAN.block_count), flat), level=1.0, learning_rate=0.5
    ).square
    parts = np.split(flat.astype(np.float64), PLAN.block_offsets[1:-1])
    assert got == pytest.approx([(part**2).mean() / 0.25 for part in parts])


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("sign", [-1, 1])
def test_one_block_far_above_the_usual_is_named(block: int, sign: int) -> None:
    values = [0.1, 0.2, 0.3]
    values[block] *= sign * 9
    assert USUAL.objection(PLAN, scale(values), limit=10) is None
    values[block] *= 1.3
    said = USUAL.objection(PLAN, scale(values), limit=10)
    assert said is not None
    assert f"block {block}" in said
    assert "11.7 times" in said


def test_small_movements_pass() -> None:
    assert USUAL.objection(PLAN, scale([0.0, 0.0, 0.0]), limit=2) is None


def test_level_never_seen_is_judged_by_the_nearest_that_was() -> None:
    usual = USUAL
    for _ in range(MIN_SEEN):
        usual = usual.learn(scale([0.2, 0.4, 0.6], level=1.0))
    assert usual.objection(PLAN, scale([0.1, 0.2, 0.3], level=0.4), limit=1.8) is None
    assert usual.objection(PLAN, scale([0.2, 0.4, 0.6], level=0.4), limit=1.8)
    assert usual.objection(PLAN, scale([0.2, 0.4, 0.6], level=0.9), limit=1.8) is None


def test_one_among_many_cannot_talk_the_usual_up() -> None:
    usual, size = USUAL, 1.0
    for _ in range(20):
        for _ in range(9):
            usual = usual.learn(scale([0.1, 0.2, 0.3]))
        while usual.objection(PLAN, scale([0.1 * size, 0.2, 0.3]), limit=100) is None:
            size *= 1.1
        usual = usual.learn(scale([0.1 * size / 1.1, 0.2, 0.3]))
    assert size < 150


def test_learning_rate_is_not_held_against_a_movement() -> None:
    assert USUAL.objection(PLAN, scale([10, 20, 30], learning_rate=10), limit=2) is None
    assert USUAL.objection(PLAN, scale([10, 20, 30], learning_rate=0.1), limit=2)


def test_nothing_is_judged_before_enough_was_seen() -> None:
    few = taught(*[scale([0.1, 0.2, 0.3])] * (MIN_SEEN - 1))
    assert few.objection(PLAN, scale([9e9, 9e9, 9e9]), limit=2) is None


def test_block_that_never_moved_is_measured_by_the_others() -> None:
    usual = taught(*[scale([0.0, 0.2, 0.2])] * MIN_SEEN)
    assert usual.objection(PLAN, scale([0.01, 0.2, 0.2]), limit=10) is None
    assert usual.objection(PLAN, scale([10.0, 0.2, 0.2]), limit=10)


def test_usual_follows_slow_change_and_is_a_value() -> None:
    usual = USUAL
    for step in range(60):
        usual = usual.learn(scale([0.1 * 1.02**step] * 3))
    assert usual.objection(PLAN, scale([0.1 * 1.02**60] * 3), limit=2) is None
    assert USUAL.objection(PLAN, scale([0.1 * 1.02**60] * 3), limit=2)


def test_overflowing_values_are_out_of_the_ordinary_not_an_error() -> None:
    assert USUAL.objection(PLAN, scale([3e38, 0.2, 0.3]), limit=1e9)
    assert block_squares(np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)).size == 0


@pytest.mark.parametrize("piece", [1, 7, 64, 10**6])
def test_squares_of_blocks_are_those_of_a_loop(piece: int) -> None:
    random = np.random.default_rng(3)
    sizes = random.integers(1, 20, size=50)
    values = random.normal(size=int(sizes.sum())).astype(np.float32)
    found = block_squares(values, sizes, piece=piece)
    start = 0
    for number, size in enumerate(sizes):
        block = values[start : start + size].astype(np.float64)
        assert found[number] == pytest.approx(float((block**2).sum()), rel=1e-12)
        start += int(size)
    assert len(block_squares(values[:0], sizes[:0])) == 0
