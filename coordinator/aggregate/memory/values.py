"""Types of held values: float32 as they came, or rounded, with a scale for every block.

| type | a held value `x̂` of a given `x`, `m` being the largest magnitude in its block |
|---|---|
| fp32 | `x̂ = x` |
| fp16 | `abs(x̂ − x) ≤ max(2⁻¹¹ · abs(x), 2⁻³¹ · m)`; the scale is a power of two |
| int8 | `abs(x̂ − x) ≤ m/254 · (1 + 2⁻¹⁴)`; the scale is about `m/127` |

each plus 2⁻¹⁵⁰, half the least float32, where `x̂` is too small for a normal float32. Values are
finite; blocks of any magnitude keep these bounds, from the least to the largest float32. Zero stays
zero.

Sixteen-bit floats are the usual ones (1 sign, 5 exponent, 10 fraction bits), ties rounded away from
zero. They are made and read with integer operations on the bits of float32, which numpy does
several times faster than its own conversion: a float32 multiplied by 2⁻¹¹² has its exponent in the
lower five bits of the field, fifteen bits from where the short number wants it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Float64, MemoryType
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices

Held = NDArray[Any]
"""Values as they are held: float32, uint16 bits of a short float, or int8."""

PIECE = 1 << 16
"""Values that are shortened at a time: what is needed for them stays in a core's cache."""

FLOAT32_MAX = float(np.finfo(np.float32).max)


class ValueType(Protocol):
    """A way to hold values.

    Held values can be added up as *terms*: an array of a type that numpy adds to float64, to be
    multiplied by `unit` and the scale.
    """

    dtype: np.dtype[Any]
    scaled: bool
    unit: float

    def scales(self, values: Float32, starts: Indices) -> Float64:
        """Compute the scale of every block; blocks begin at `starts`. Empty for a type without."""

    def shorten(self, values: Float32, scale: float, out: Held, terms: Float32) -> Held:
        """Round values of one scale to `out`. Returns their terms, perhaps in `terms`.

        `values` and `terms` may be the same memory.
        """

    def terms(self, held: Held, terms: Float32) -> Held:
        """Return the terms of held values, perhaps in `terms`."""


class Fp32:
    """Values as they came."""

    dtype = np.dtype(np.float32)
    scaled = False
    unit = 1.0

    def scales(self, values: Float32, starts: Indices) -> Float64:  # noqa: ARG002
        """See `ValueType`."""
        return np.empty(0)

    def shorten(self, values: Float32, scale: float, out: Held, terms: Float32) -> Held:  # noqa: ARG002
        """See `ValueType`."""
        out[...] = values
        return out

    def terms(self, held: Held, terms: Float32) -> Held:  # noqa: ARG002
        """See `ValueType`."""
        return held


class Fp16:
    """Sixteen-bit floats, moved into their range by a power of two for every block.

    Scales are powers of 2⁸, so that neighbouring blocks mostly share one and are worked on
    together. The largest value of a block lies in [2⁷, 2¹⁵), and what is 2²¹ times smaller is still
    a normal number.
    """

    dtype = np.dtype(np.uint16)
    scaled = True
    unit = 2.0**112

    _LEAST_NORMAL = 2.0**-126

    def __init__(self) -> None:
        self._local = threading.local()

    def _room(self) -> NDArray[np.int32]:
        """Return two pieces of working space of this thread: fresh memory would cost more."""
        if not hasattr(self._local, "room"):
            self._local.room = np.empty((2, PIECE), dtype=np.int32)
        room: NDArray[np.int32] = self._local.room
        return room

    def scales(self, values: Float32, starts: Indices) -> Float64:
        """See `ValueType`."""
        magnitudes = _magnitudes(values, starts)
        _, exponents = np.frexp(magnitudes)
        steps = 8 * ((15 - exponents.astype(np.int64)) // 8)
        return np.where(magnitudes > 0, np.ldexp(1.0, -steps), 1.0)

    def shorten(self, values: Float32, scale: float, out: Held, terms: Float32) -> Held:
        """See `ValueType`."""
        for low in range(0, len(values), PIECE):
            part = slice(low, low + PIECE)
            self._shorten(values[part], 1 / (self.unit * scale), out[part], terms[part])
        return terms

    def _shorten(self, values: Float32, factor: float, out: Held, terms: Float32) -> None:
        if factor < self._LEAST_NORMAL:
            # No float32: in two steps. What the first takes below its range is zero in the end.
            np.multiply(values, np.float32(2.0**-100), out=terms)
            np.multiply(terms, np.float32(factor * 2.0**100), out=terms)
        else:
            np.multiply(values, np.float32(factor), out=terms)
        bits = terms.view(np.int32)
        np.add(bits, 0x1000, out=bits)  # half of the least bit that is kept
        np.bitwise_and(bits, -0x2000, out=bits)
        sign, rest = (room[: len(bits)] for room in self._room())
        np.right_shift(bits, 16, out=sign)
        np.bitwise_and(sign, 0x8000, out=sign)
        np.right_shift(bits, 13, out=rest)
        np.bitwise_or(sign, rest, out=sign)
        np.copyto(out, sign, casting="unsafe")  # drops the copies of the sign above bit 15

    def terms(self, held: Held, terms: Float32) -> Held:
        """See `ValueType`."""
        for low in range(0, len(held), PIECE):
            bits = terms[low : low + PIECE].view(np.int32)
            np.copyto(bits, held[low : low + PIECE].view(np.int16))
            np.left_shift(bits, 13, out=bits)
            np.bitwise_and(bits, -0x70002000, out=bits)  # the sign, and 15 bits in their place
        return terms


class Int8:
    """Whole numbers from −127 to 127 times the block's scale.

    Scales have 16 significant bits, so a held value is a float32 and recall does not round again.
    """

    dtype = np.dtype(np.int8)
    scaled = True
    unit = 1.0

    def scales(self, values: Float32, starts: Indices) -> Float64:
        """See `ValueType`."""
        magnitudes = _magnitudes(values, starts)
        fractions, exponents = np.frexp(magnitudes / 127)
        scales = np.ldexp(np.ceil(np.ldexp(fractions, 16)), exponents - 16)
        return np.where(magnitudes > 0, scales, 1.0)

    def shorten(self, values: Float32, scale: float, out: Held, terms: Float32) -> Held:
        """See `ValueType`."""
        for low in range(0, len(values), PIECE):
            part = slice(low, low + PIECE)
            # In float64: the inverse of a small scale is no float32.
            np.multiply(values[part], np.float64(1 / scale), out=terms[part], casting="same_kind")
            np.rint(terms[part], out=terms[part])
            np.copyto(out[part], terms[part], casting="unsafe")
        return terms

    def terms(self, held: Held, terms: Float32) -> Held:
        """See `ValueType`."""
        np.copyto(terms, held)
        return terms


VALUE_TYPES: Mapping[MemoryType, ValueType] = {"fp32": Fp32(), "fp16": Fp16(), "int8": Int8()}


def expand(kind: ValueType, held: Held, scales: Float64, sizes: Indices) -> Float32:
    """Return the values of held blocks. For a type without scales this is no copy."""
    if not kind.scaled:
        return held
    values = kind.terms(held, np.empty(len(held), dtype=np.float32))
    ends = np.concatenate(([0], np.cumsum(sizes)))
    for low in range(0, len(held), PIECE):
        high = min(low + PIECE, len(held))
        first = int(np.searchsorted(ends, low, side="right")) - 1
        last = int(np.searchsorted(ends, high, side="left"))
        factors = np.repeat(scales[first:last], np.diff(np.clip(ends[first : last + 1], low, high)))
        factors *= kind.unit
        factors *= values[low:high]
        # Rounding up at the very end of float32's range must not become infinity.
        np.clip(factors, -FLOAT32_MAX, FLOAT32_MAX, out=factors)
        values[low:high] = factors
    return values


def _magnitudes(values: Float32, starts: Indices) -> Float64:
    """Find the largest magnitude of every block."""
    if not len(starts):
        return np.empty(0)
    largest = np.empty(len(starts))
    low = 0
    while low < len(starts):
        # A piece at a time (or one block, if that is larger): read twice, fetched once.
        high = max(low + 1, int(np.searchsorted(starts, starts[low] + PIECE)))
        end = int(starts[high]) if high < len(starts) else len(values)
        part, inside = values[starts[low] : end], starts[low:high] - starts[low]
        if not part.flags.aligned:  # as in an upload; see `Sums`
            part = part.copy()
        np.maximum(
            np.maximum.reduceat(part, inside),
            -np.minimum.reduceat(part, inside),
            out=largest[low:high],
        )
        low = high
    return largest
