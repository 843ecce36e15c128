"""The largest values of every block, and their positions.

A block of `n` values keeps the `k = max(1, ⌊keep·n⌋)` of largest magnitude; ties go to the first.
NaN counts as largest, so that the receiver sees it. Kept values are in the order of their
positions. A block's positions are written in the shorter of two forms, which follows from its size
and `keep`:

- a bitmap: `⌈n/8⌉` bytes, value `i` is bit `i mod 8` of byte `⌊i/8⌋`, unused bits are 0;
- `k` positions in ascending order, little-endian, in 1, 2, 4 or 8 bytes: the fewest that can hold
  `n − 1`.

(In blocks of 257 to 65536 values the bitmap is shorter from a share of 1/16 on.) Adjacent blocks of
equal size are processed as the rows of one table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.layout import Indices

Bytes = NDArray[np.uint8]

RESIDUAL_ROUNDS = 20
"""Rounds after which a device forgets the values of a block that top-k left out."""
TABLE = 2**20
"""Most values of one table, unless a single block has more: bounds the memory in use."""


def kept_counts(sizes: Indices, keep: float) -> Indices:
    """Return the number of values every block keeps."""
    whole = np.floor(keep * sizes + 1e-9).astype(np.int64)  # 0.29 · 100 keeps 29, not 28
    counts: Indices = np.clip(whole, 1, sizes)
    return counts


def place_bytes(sizes: Indices, keep: float) -> Indices:
    """Return the bytes that the positions of every block take."""
    listed: Indices = kept_counts(sizes, keep) * _widths(sizes)
    shorter: Indices = np.minimum(_bitmap_bytes(sizes), listed)
    return shorter


def pick(values: Float32, sizes: Indices, keep: float) -> tuple[Float32, Bytes]:
    """Pick the kept values of all blocks, and write their positions as bytes."""
    kept = np.empty(int(kept_counts(sizes, keep).sum()), dtype=np.float32)
    places = np.empty(int(place_bytes(sizes, keep).sum()), dtype=np.uint8)
    for table in _tables(sizes, keep):
        rows = values[table.values].reshape(table.rows, table.size)
        chosen = _largest(rows, table.kept)
        kept[table.picked] = rows[chosen]
        if table.bitmap:
            written = np.packbits(chosen, axis=1, bitorder="little").reshape(-1)
        else:
            written = np.nonzero(chosen)[1].astype(f"<u{table.width}").view(np.uint8)
        places[table.places] = written
    return kept, places


def put_back(kept: Float32, places: Bytes, sizes: Indices, keep: float) -> Float32:
    """Put the kept values back in their places, zeros elsewhere.

    Raises `BlockError` for bytes that name no place, a place twice, or the wrong number of places.
    """
    values = np.zeros(int(sizes.sum()), dtype=np.float32)
    for table in _tables(sizes, keep):
        rows = values[table.values].reshape(table.rows, table.size)
        written = places[table.places]
        if table.bitmap:
            rows[_read_bitmap(written, table)] = kept[table.picked]
        else:
            where = _read_positions(written, table)
            np.put_along_axis(rows, where, kept[table.picked].reshape(where.shape), axis=1)
    return values


class _Table(NamedTuple):
    """Neighbouring blocks of equal size, and the places of their values and positions."""

    rows: int
    size: int
    kept: int
    width: int
    bitmap: bool
    values: slice
    picked: slice
    places: slice


def _tables(sizes: Indices, keep: float) -> Iterator[_Table]:
    value_at = picked_at = place_at = 0
    starts = np.concatenate(([0], np.flatnonzero(np.diff(sizes)) + 1))
    each = sizes[starts]
    columns = (
        each,
        np.diff(starts, append=len(sizes)),
        kept_counts(each, keep),
        place_bytes(each, keep),
        _widths(each),
        _bitmap_bytes(each) <= kept_counts(each, keep) * _widths(each),
    )
    for size, blocks, kept, placed, width, bitmap in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        most = max(1, TABLE // size)
        for first in range(0, blocks, most):
            rows = min(most, blocks - first)
            ends = value_at + rows * size, picked_at + rows * kept, place_at + rows * placed
            yield _Table(
                rows,
                size,
                kept,
                width,
                bitmap,
                slice(value_at, ends[0]),
                slice(picked_at, ends[1]),
                slice(place_at, ends[2]),
            )
            value_at, picked_at, place_at = ends


def _largest(rows: Float32, kept: int) -> NDArray[np.bool_]:
    """Mark the `kept` largest values of every row."""
    if kept == rows.shape[1]:
        return np.ones(rows.shape, dtype=bool)
    # Without the sign, floats sort like their bits, with NaN above everything.
    magnitudes = rows.view(np.uint32) & np.uint32(0x7FFFFFFF)
    at = rows.shape[1] - kept
    least = np.partition(magnitudes, at, axis=1)[:, at : at + 1]
    chosen: NDArray[np.bool_] = magnitudes >= least
    # More values may equal the least kept one than there is room for: take the first.
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > kept).tolist():
        equal = np.flatnonzero(magnitudes[row] == least[row])
        surplus = int(np.count_nonzero(chosen[row])) - kept
        chosen[row, equal[len(equal) - surplus :]] = False
    return chosen


def _read_bitmap(written: Bytes, table: _Table) -> NDArray[np.bool_]:
    bits = np.unpackbits(written.reshape(table.rows, -1), axis=1, bitorder="little")
    if bits[:, table.size :].any() or (np.count_nonzero(bits, axis=1) != table.kept).any():
        raise BlockError(f"a bitmap does not name {table.kept} of a block's {table.size} values")
    return bits[:, : table.size].view(np.bool_)


def _read_positions(written: Bytes, table: _Table) -> Indices:
    where = written.view(f"<u{table.width}").reshape(table.rows, table.kept)
    if (where >= table.size).any() or (where[:, 1:] <= where[:, :-1]).any():
        raise BlockError(f"positions are not ascending, or outside a block of {table.size} values")
    return where.astype(np.int64)


def _bitmap_bytes(sizes: Indices) -> Indices:
    return (sizes + 7) // 8


def _widths(sizes: Indices) -> Indices:
    return np.where(sizes <= 2**8, 1, np.where(sizes <= 2**16, 2, np.where(sizes <= 2**32, 4, 8)))
