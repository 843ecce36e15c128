"""fp16, int8 and top-k against definitions that look at one block at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_sdk.protocol.encoding.quantisation import (
    PIECE,
    quantise_fp16,
    quantise_int8,
    restore_fp16,
    restore_int8,
)
from edge_sdk.protocol.encoding.top_k import TABLE, kept_counts, pick, place_bytes, put_back
from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Array, Indices

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149


def blocks_of(*blocks: list[float]) -> tuple[Float32, Indices]:
    return (
        np.array([value for block in blocks for value in block], dtype=np.float32),
        np.array([len(block) for block in blocks]),
    )


def many_blocks(seed: int) -> tuple[Float32, Indices]:
    """Blocks within one piece, across pieces and longer than one, of very different size."""
    rng = np.random.default_rng(seed)
    sizes = np.array([1, 2, 3, 5000, PIECE - 5006, 7, PIECE, 1, 2 * PIECE + 11, *([9] * 900)])
    scales = np.repeat(2.0 ** rng.integers(-60, 60, size=len(sizes)), sizes)
    return (rng.standard_normal(int(sizes.sum())) * scales).astype(np.float32), sizes


def split(values: Array, sizes: Indices) -> list[Array]:
    return np.split(values, np.cumsum(sizes)[:-1])


# -- fp16 --------------------------------------------------------------------------------------


def test_fp16_is_what_a_loop_over_blocks_gives() -> None:
    values, sizes = many_blocks(seed=1)
    halves, exponents = quantise_fp16(values, sizes)
    restored = restore_fp16(halves, exponents, sizes)
    parts = zip(split(values, sizes), exponents, split(restored, sizes), strict=True)
    for number, (block, exponent, back) in enumerate(parts):
        peak = float(np.abs(block).max())
        assert exponent == math.frexp(peak)[1] - 15, number
        expected = (block.astype(np.float64) * 2.0**-exponent).astype(np.float16)
        np.testing.assert_array_equal(back, expected.astype(np.float64) * 2.0**exponent)


@pytest.mark.parametrize("peak", [LARGEST, 1.0, 1e-30, 2.0**-126, 2.0**-130, SMALLEST])
def test_fp16_keeps_any_magnitude_within_its_bound(peak: float) -> None:
    rng = np.random.default_rng(2)
    shares = np.concatenate([[1.0, -1.0, 0.0], 2.0 ** rng.uniform(-60, 0, size=2000)])
    values = (shares * peak).astype(np.float32)
    sizes = np.array([len(values)])
    restored = restore_fp16(*quantise_fp16(values, sizes), sizes).astype(np.float64)
    exact = values.astype(np.float64)
    bound = np.maximum(2.0**-11 * np.abs(exact), 2.0**-39 * np.abs(exact).max())
    assert np.isfinite(restored).all()
    assert (np.abs(restored - exact) <= bound).all()


def test_fp16_of_zeros_is_zeros_without_a_scale() -> None:
    values, sizes = blocks_of([0.0, -0.0], [1.0])
    halves, exponents = quantise_fp16(values, sizes)
    assert exponents.tolist() == [0, -14]
    assert restore_fp16(halves, exponents, sizes).tobytes() == values.tobytes()


def test_fp16_lets_non_finite_values_through_and_spares_other_blocks() -> None:
    values, sizes = blocks_of([1.0, math.nan], [math.inf, -2.0], [-math.inf, LARGEST], [3.0])
    restored = restore_fp16(*quantise_fp16(values, sizes), sizes)
    assert np.isnan(restored[1])
    assert restored[[2, 4]].tolist() == [math.inf, -math.inf]
    assert np.isfinite(restored[[0, 3, 5, 6]]).all()
    assert restored[6] == 3.0


# -- int8 --------------------------------------------------------------------------------------


def test_int8_is_within_a_step_and_on_either_side() -> None:
    values, sizes = many_blocks(seed=3)
    steps, counts = quantise_int8(values, sizes, np.random.default_rng(4))
    restored = restore_int8(steps, counts, sizes)
    above = below = 0
    for block, step, count, back in zip(
        split(values, sizes), steps, split(counts, sizes), split(restored, sizes), strict=True
    ):
        exact = block.astype(np.float64)
        assert step == np.float32(np.abs(block).max() / np.float32(127))
        np.testing.assert_array_equal(back, count.astype(np.float32) * step)
        assert (np.abs(back - exact) <= float(step) * (1 + 2.0**-15)).all()
        assert np.abs(count.astype(int)).max() <= 127
        above += int((back > exact).sum())
        below += int((back < exact).sum())
    assert 0.48 < above / (above + below) < 0.52


def test_int8_is_right_on_average() -> None:
    block = [1.0, 0.9999, 0.503, 0.25, 0.0041, 1e-4, 0.0, -1e-4, -0.3337, -0.7777, -1.0]
    values, sizes = blocks_of(block)
    draws = 4000
    stream = np.random.default_rng(5)
    total = np.zeros(len(values))
    for _ in range(draws):
        steps, counts = quantise_int8(values, sizes, stream)
        total += restore_int8(steps, counts, sizes)
    step = 1 / 127
    # A draw is off by up to a step; the mean of so many by 0.5 · step / √draws (one deviation).
    assert (np.abs(total / draws - values) < 5 * 0.5 * step / math.sqrt(draws)).all()


def test_int8_of_whole_steps_is_exact() -> None:
    values, sizes = blocks_of([float(n) for n in range(-127, 128)], [0.0, 0.0])
    steps, counts = quantise_int8(values, sizes, np.random.default_rng(6))
    assert steps[0] == 1.0
    assert restore_int8(steps, counts, sizes).tolist() == values.tolist()


@pytest.mark.parametrize("peak", [LARGEST, 1e-36, 2.0**-126, SMALLEST])
def test_int8_keeps_any_magnitude_within_its_bound(peak: float) -> None:
    shares = np.random.default_rng(7).uniform(-1, 1, size=2000)
    values = (np.concatenate([[1.0, -1.0], shares]) * peak).astype(np.float32)
    sizes = np.array([len(values)])
    steps, counts = quantise_int8(values, sizes, np.random.default_rng(8))
    restored = restore_int8(steps, counts, sizes).astype(np.float64)
    step = max(peak / 127, 2.0**-126)
    assert np.isfinite(restored).all()
    assert (np.abs(restored - values) <= step * (1 + 2.0**-15)).all()


def test_int8_of_peaks_never_leaves_its_range() -> None:
    """Rounding may put a peak just beyond 127 steps, from where one draw in 65536 goes to 128."""
    peaks = np.array([LARGEST, 1.1, 3.3e-7], dtype=np.float32)
    sizes = np.full(6, 300_000)
    values = np.repeat(np.concatenate([peaks, -peaks]), 300_000)
    steps, counts = quantise_int8(values, sizes, np.random.default_rng(14))
    assert (steps[:3].astype(np.float64) * 127 < peaks).any()
    assert (counts == np.repeat([127, 127, 127, -127, -127, -127], 300_000)).mean() > 0.999
    assert (np.sign(counts) == np.sign(values)).all()
    assert counts.min() == -127
    assert np.isfinite(restore_int8(steps, counts, sizes)).all()


def test_int8_block_with_a_non_finite_value_arrives_as_nan_alone() -> None:
    values, sizes = blocks_of([1.0, math.nan], [2.0], [math.inf, 5.0], [-math.inf])
    steps, counts = quantise_int8(values, sizes, np.random.default_rng(9))
    restored = restore_int8(steps, counts, sizes)
    assert np.isnan(restored).tolist() == [True, True, False, True, True, True]
    assert restored[2] == 2.0
    assert counts[1] == 0  # and not whatever this machine's cast makes of NaN


def test_int8_takes_the_same_draws_whatever_the_values() -> None:
    values, sizes = many_blocks(seed=10)
    first, second = np.random.default_rng(11), np.random.default_rng(11)
    quantise_int8(values, sizes, first)
    quantise_int8(np.zeros_like(values), sizes, second)
    assert first.random() == second.random()


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800000, 0xFF800000, 0x80000001, 0x7F7FFFFF])
def test_hostile_scales_restore_to_some_numbers(bits: int) -> None:
    sizes = np.array([256])
    steps = np.array([bits], dtype=np.uint32).view(np.float32)
    counts = np.arange(-128, 128).astype(np.int8)
    assert restore_int8(steps, counts, sizes).shape == (256,)
    every_half = np.arange(2**16).astype(np.uint16).view(np.float16)
    for exponent in (-128, 127):
        exponents = np.array([exponent], dtype=np.int8)
        assert restore_fp16(every_half, exponents, np.array([2**16])).shape == (2**16,)


# -- top-k -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1e-6, 0.001, 0.03, 0.1, 0.5, 1.0])
def test_top_k_is_what_sorting_every_block_gives(keep: float) -> None:
    rng = np.random.default_rng(12)
    sizes = np.array([1, 7, 8, 9, 9, 9, 255, 256, 257, 257, 2**16, 2**16 + 1, 40, 40])
    values = rng.integers(-60, 60, size=int(sizes.sum())).astype(np.float32)  # many are equal
    kept, places = pick(values, sizes, keep)
    assert len(places) == place_bytes(sizes, keep).sum()
    expected_kept, expected = [], np.zeros_like(values)
    start = 0
    for size in sizes.tolist():
        block = values[start : start + size]
        count = max(1, int(keep * size + 1e-9))
        chosen = sorted(sorted(range(size), key=lambda i: (-abs(block[i]), i))[:count])
        expected_kept += [float(block[i]) for i in chosen]
        expected[[start + i for i in chosen]] = block[chosen]
        start += size
    assert kept.tolist() == expected_kept
    np.testing.assert_array_equal(put_back(kept, places, sizes, keep), expected)


def test_top_k_writes_positions_in_the_shorter_form() -> None:
    def written(size: int, keep: float) -> int:
        return int(place_bytes(np.array([size]), keep)[0])

    assert written(8, 0.9) == 1  # a bitmap of one byte, not seven positions
    assert written(160, 0.1) == 16  # sixteen positions of one byte, not a bitmap of twenty
    assert written(200, 0.01) == 2  # two positions of one byte
    assert written(2**16, 0.01) == 2 * 655
    assert written(2**16, 0.0625) == 2**13
    assert written(2**16 + 8, 0.001) == 4 * 65
    assert written(2**33, 1e-9) == 8 * 8


def test_top_k_counts_a_share_as_people_do() -> None:
    assert kept_counts(np.array([100, 10, 9, 1]), 0.29).tolist() == [29, 2, 2, 1]
    assert kept_counts(np.array([100, 10, 9, 1]), 1.0).tolist() == [100, 10, 9, 1]


def test_top_k_keeps_nan_first() -> None:
    values, sizes = blocks_of([1.0, math.inf, math.nan, 2.0], [5.0, 6.0])
    kept, places = pick(values, sizes, 0.25)
    assert np.isnan(kept[0])
    assert np.isnan(put_back(kept, places, sizes, 0.25)[2])
    assert pick(values, sizes, 0.5)[0][0] == math.inf


def test_top_k_of_a_table_longer_than_its_limit() -> None:
    rng = np.random.default_rng(13)
    sizes = np.array([*([1000] * 1100), TABLE + 1])
    values = rng.standard_normal(int(sizes.sum())).astype(np.float32)
    kept, places = pick(values, sizes, 0.01)
    restored = put_back(kept, places, sizes, 0.01)
    assert np.count_nonzero(restored) == kept_counts(sizes, 0.01).sum()
    for block, back in zip(split(values, sizes), split(restored, sizes), strict=True):
        least = np.abs(back[back != 0]).min()
        assert np.abs(block[back == 0]).max() < least
        assert (back[back != 0] == block[back != 0]).all()


@pytest.mark.parametrize(
    ("size", "keep", "places"),
    [
        (16, 0.25, [0x0F, 0x01]),
        (16, 0.25, [0x07, 0x00]),
        (12, 0.25, [0x03, 0x10]),
        (100, 0.03, [5, 5, 6]),
        (100, 0.03, [6, 5, 7]),
        (100, 0.03, [5, 6, 100]),
        (300, 0.01, [1, 0, 2, 0, 44, 1]),
    ],
    ids=["bit too many", "bit too few", "bit outside", "twice", "order", "outside", "two bytes"],
)
def test_wrong_positions_are_refused(size: int, keep: float, places: list[int]) -> None:
    sizes = np.array([size])
    kept = np.ones(int(kept_counts(sizes, keep)[0]), dtype=np.float32)
    with pytest.raises(BlockError, match=r"bitmap|positions"):
        put_back(kept, np.array(places, dtype=np.uint8), sizes, keep)
