"""Block values in fewer bits, and back: fp16 and int8, each with one scale per block.

Blocks follow one another in a flat vector; `sizes` has their lengths, all at least 1. Every scale
belongs to one block, so blocks can be cut out of an encoded model: they decode to the same values
as in the whole.

Bounds, with `peak` the largest magnitude of the value's block:

- fp16: `|x̂ − x| ≤ max(2⁻¹¹·|x|, 2⁻³⁹·peak)`. The scale is the power of two that brings the peak
  into [2¹⁴, 2¹⁵), below fp16's largest value. It is at least 2⁻¹²⁶, where fp16 is finer than
  float32 itself. NaN and ±Inf are preserved.
- int8: `|x̂ − x| ≤ step`, `step = max(peak/127, 2⁻¹²⁶)`, up to float32's rounding. Rounding is up
  or down at random, so that the mean over draws is `x` to within 2⁻¹⁶ of a step. If a block holds a
  NaN or ±Inf, all its values arrive as NaN.

Nothing here raises for any bits: hostile scales give hostile numbers, which screening rejects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices

PIECE = 2**16
"""Values processed at a time: intermediate results stay in a core's own cache and need no memory
whatever the model's size. A multiple of four, see `quantise_int8`."""

MAX_EXPONENT = 113
MIN_EXPONENT = -126
MAX_SCALED = 2.0**15 - 2.0**4
"""Largest fp16 number that 2^MAX_EXPONENT does not take beyond float32's largest."""
STEPS = 127
MIN_STEP = np.float32(2.0**-126)
MAX_STEP = np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0))
"""Largest step: 127 times it is still finite."""


def quantise_fp16(values: Float32, sizes: Indices) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Round values to fp16, with an exponent for every block: `x ≈ value · 2^exponent`."""
    peaks = _peaks(values, sizes)
    exponents = np.full(len(sizes), MAX_EXPONENT, dtype=np.int8)
    finite = np.isfinite(peaks)
    powers = np.frexp(peaks[finite])[1] - 15
    exponents[finite] = np.clip(np.where(peaks[finite] > 0, powers, 0), MIN_EXPONENT, MAX_EXPONENT)
    factors = np.ldexp(np.float32(1), -exponents.astype(np.int32))
    halves = np.empty(len(values), dtype=np.float16)
    with np.errstate(all="ignore"):
        for piece in _pieces(sizes):
            scaled = values[piece.values] * piece.spread(factors)
            if (exponents[piece.blocks] == MAX_EXPONENT).any():
                huge = (piece.spread(exponents) == MAX_EXPONENT) & np.isfinite(scaled)
                np.clip(scaled, -MAX_SCALED, MAX_SCALED, out=scaled, where=huge)
            halves[piece.values] = scaled
    return halves, exponents


def restore_fp16(
    halves: NDArray[np.float16], exponents: NDArray[np.int8], sizes: Indices
) -> Float32:
    """Invert `quantise_fp16`, to its bound."""
    factors = np.ldexp(np.float32(1), exponents.astype(np.int32))
    values = np.empty(len(halves), dtype=np.float32)
    with np.errstate(all="ignore"):
        for piece in _pieces(sizes):
            part = values[piece.values]
            part[...] = halves[piece.values]
            part *= piece.spread(factors)
    return values


def quantise_int8(
    values: Float32, sizes: Indices, stream: np.random.Generator
) -> tuple[Float32, NDArray[np.int8]]:
    """Round values at random to steps, with a step for every block: `x ≈ step · value`.

    Takes 16 bits of the stream for each value, in the values' order, whatever they are.
    """
    peaks = _peaks(values, sizes)
    steps = np.clip(peaks / np.float32(STEPS), MIN_STEP, MAX_STEP)
    finite = np.isfinite(peaks)
    counts = np.empty(len(values), dtype=np.int8)
    with np.errstate(all="ignore"):
        for piece in _pieces(sizes):
            in_steps = values[piece.values] / piece.spread(steps)
            in_steps += _uniform(len(in_steps), stream)
            np.floor(in_steps, out=in_steps)
            np.clip(in_steps, -STEPS, STEPS, out=in_steps)
            if not finite[piece.blocks].all():
                in_steps[np.isnan(in_steps)] = 0  # casting NaN is undefined
            counts[piece.values] = in_steps
    steps[~finite] = np.nan
    return steps, counts


def restore_int8(steps: Float32, counts: NDArray[np.int8], sizes: Indices) -> Float32:
    """Invert `quantise_int8`, to its bound."""
    values = np.empty(len(counts), dtype=np.float32)
    with np.errstate(all="ignore"):
        for piece in _pieces(sizes):
            np.multiply(counts[piece.values], piece.spread(steps), out=values[piece.values])
    return values


class _Piece(NamedTuple):
    """Some consecutive values, and the blocks they belong to."""

    values: slice
    blocks: slice
    lengths: Indices
    """Number of the values in each block."""

    def spread(self, per_block: NDArray[Any]) -> NDArray[Any]:
        """Repeat one number per block as one per value."""
        mine = per_block[self.blocks]
        return mine if len(mine) == 1 else np.repeat(mine, self.lengths)


def _pieces(sizes: Indices) -> Iterator[_Piece]:
    offsets = np.concatenate(([0], np.cumsum(sizes)))
    total = int(offsets[-1])
    starts = np.arange(0, total, PIECE)
    stops = np.minimum(starts + PIECE, total)
    firsts = np.searchsorted(offsets, starts, side="right") - 1
    lasts = np.searchsorted(offsets, stops, side="left")
    for start, stop, first, last in zip(
        starts.tolist(), stops.tolist(), firsts.tolist(), lasts.tolist(), strict=True
    ):
        bounds = np.clip(offsets[first : last + 1], start, stop)
        yield _Piece(slice(start, stop), slice(first, last), np.diff(bounds))


def _peaks(values: Float32, sizes: Indices) -> Float32:
    """Find the largest magnitude of every block; Inf or NaN where it has one."""
    peaks = np.zeros(len(sizes), dtype=np.uint32)
    bits = np.ascontiguousarray(values).view(np.uint32)
    for piece in _pieces(sizes):
        # Without the sign, floats sort like their bits, with NaN above everything.
        magnitudes = bits[piece.values] & np.uint32(0x7FFFFFFF)
        starts = np.cumsum(piece.lengths) - piece.lengths
        mine = peaks[piece.blocks]
        np.maximum(mine, np.maximum.reduceat(magnitudes, starts), out=mine)
    return peaks.view(np.float32)


def _uniform(count: int, stream: np.random.Generator) -> Float32:
    """Draw numbers in (0, 1) from 16 bits each: the middles of 65536 equal parts."""
    words = stream.integers(0, 2**64 - 1, size=-(-count // 4), dtype=np.uint64, endpoint=True)
    drawn = words.astype("<u8", copy=False).view("<u2")[:count].astype(np.float32)
    drawn *= np.float32(2.0**-16)
    drawn += np.float32(2.0**-17)
    return drawn
