"""A set of blocks: their ids, and their values one after the other.

Outside tensors, a movement or a piece of the model is `Blocks`: ascending block ids and one flat
float32 vector. The plan knows every block's size, so no offsets travel with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import BlockError
from edge_sdk.protocol.plan.layout import Indices, Raw

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Ascending block ids, and the blocks' values in that order."""

    ids: Indices
    values: Float32
    room: Raw | None = None
    """Memory of the values, and some more, that may be overwritten; None: it may not."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the values, uncompressed."""
        return int(self.values.nbytes)

    def check(self, expected: Indices, sizes: Indices) -> None:
        """Raise `BlockError` unless these are exactly the expected blocks, sized by the plan."""
        _check_vector("ids", self.ids, np.int64)
        _check_vector("values", self.values, np.float32)
        if not np.array_equal(self.ids, expected):
            extra = np.setdiff1d(self.ids, expected)
            lacking = np.setdiff1d(expected, self.ids)
            what = (
                f"block {extra[0]} was not asked for"
                if len(extra)
                else f"block {lacking[0]} is missing"
                if len(lacking)
                else "block ids are not ascending and unique"
            )
            raise BlockError(f"{what} ({len(self.ids)} blocks, {len(expected)} expected)")
        wanted = int(sizes[expected].sum())
        if len(self.values) != wanted:
            raise BlockError(f"{len(self.values)} values for blocks that hold {wanted}")


def _check_vector(what: str, array: Any, dtype: type[np.generic]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
        kind = getattr(array, "dtype", type(array).__name__)
        raise BlockError(
            f"block {what} are {kind} of {np.ndim(array)} dimensions, "
            f"not a vector of {dtype.__name__}"
        )


def block_runs(ids: Indices, offsets: Indices) -> list[tuple[slice, slice]]:
    """Locate runs of adjacent blocks: (in the whole model's vector, in `Blocks.values`)."""
    if not len(ids):
        return []
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    first = ids[np.concatenate(([0], breaks))]
    last = ids[np.concatenate((breaks - 1, [len(ids) - 1]))]
    starts, ends = offsets[first], offsets[last + 1]
    filled = np.concatenate(([0], np.cumsum(ends - starts)))
    return [
        (slice(int(a), int(b)), slice(int(c), int(d)))
        for a, b, c, d in zip(starts, ends, filled[:-1], filled[1:], strict=True)
    ]


def select_blocks(flat: Float32, ids: Indices, offsets: Indices) -> Blocks:
    """Copy blocks out of the whole model's vector."""
    runs = block_runs(ids, offsets)
    values = np.concatenate([flat[whole] for whole, _ in runs]) if runs else flat[:0].copy()
    return Blocks(ids, values)
