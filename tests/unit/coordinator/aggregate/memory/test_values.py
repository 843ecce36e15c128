"""Each type's stated bound, over all magnitudes that float32 has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Dtype
from coordinator.aggregate.memory.values import PIECE, VALUE_TYPES, expand
from tests.contract.memory.oracle import bound

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
blocks = st.lists(
    st.one_of(
        st.lists(finite, min_size=1, max_size=6),
        st.tuples(st.integers(-149, 127), st.lists(st.floats(-1, 1), min_size=1, max_size=6)).map(
            lambda drawn: [x * 2.0 ** drawn[0] for x in drawn[1]]
        ),
    ),
    min_size=1,
    max_size=5,
)
"""Anything; and blocks of one magnitude, from the least float32 to the largest."""


def held(dtype: Dtype, parts: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """Blocks as they come back from being held."""
    kind = VALUE_TYPES[dtype]
    values = np.concatenate(parts)
    sizes = np.array([len(part) for part in parts])
    starts = np.cumsum(sizes) - sizes
    scales = kind.scales(values, starts)
    short = np.empty(len(values), dtype=kind.dtype)
    for number, start in enumerate(starts.tolist()):
        part = slice(start, start + sizes[number])
        scale = float(scales[number]) if kind.scaled else 1.0
        kind.shorten(values[part], scale, short[part], np.empty(sizes[number], np.float32))
    back = expand(kind, short, scales, sizes)
    assert back.dtype == np.float32
    return np.split(back, starts[1:])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@settings(max_examples=300)
@given(drawn=blocks)
def test_held_values_keep_the_bound(dtype: Dtype, drawn: list[list[float]]) -> None:
    parts = [np.array(block, dtype=np.float32) for block in drawn]
    for part, back in zip(parts, held(dtype, parts), strict=True):
        off = abs(back.astype(np.float64) - part)
        assert (off <= bound(dtype, part)).all()
        assert (back[part == 0] == 0).all()


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1.0, 1e30, 3.4028235e38])
def test_block_of_any_magnitude_keeps_its_values(dtype: Dtype, magnitude: float) -> None:
    part = (np.array([1, -0.5, 0.25, 0]) * magnitude).astype(np.float32)
    (back,) = held(dtype, [part])
    assert np.isfinite(back).all()
    assert (abs(back.astype(np.float64) - part) <= bound(dtype, part)).all()
    assert back[0] > 0


def test_short_floats_are_the_usual_ones() -> None:
    """What is held is what numpy's own float16 is, but for ties."""
    kind = VALUE_TYPES["fp16"]
    values = np.random.default_rng(1).standard_normal(3 * PIECE // 2).astype(np.float32)
    values[0] = 100.0  # in [2⁷, 2¹⁵) after multiplication by 2⁸
    short = np.empty(len(values), dtype=np.uint16)
    scale = float(kind.scales(values, np.array([0]))[0])
    assert scale == 2.0**-8
    terms = kind.shorten(values, scale, short, np.empty_like(values))
    expected = (values * np.float32(2**8)).astype(np.float16)
    tie = (values * np.float32(2**8)).view(np.uint32) & 0x1FFF == 0x1000
    assert (short.view(np.float16)[~tie] == expected[~tie]).all()
    again = kind.terms(short, np.empty_like(values))
    assert terms.tobytes() == again.tobytes()
    assert (terms.astype(np.float64) * 2.0**112 == short.view(np.float16)).all()


def test_int8_is_held_as_a_float32_without_rounding() -> None:
    """So that what is summed, in float64, is what is recalled."""
    kind = VALUE_TYPES["int8"]
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    scales = kind.scales(values, np.array([0, 500]))
    exact = np.outer(scales, np.arange(-127, 128))
    assert (exact.astype(np.float32) == exact).all()
