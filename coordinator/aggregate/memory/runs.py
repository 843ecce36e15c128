"""Runs of neighbouring blocks, cut at the edges of equal tiles of the model.

The model's vector is worked on tile by tile, so that a tile's sums stay in a core's cache while
the values of every device stream past them once, and so that tiles can go to different threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coordinator.aggregate.memory.contract import Float64
from edge_sdk.protocol.plan.layout import Indices

TILE = 1 << 16
"""Parameters of a tile: 512 KiB of float64 sums."""

EntryRun = tuple[int, int, int, float]
"""Start in the tile, end in the tile, start among the blocks' own values, scale."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of values that lie one behind the other here and there, and have one scale.

    `tiles[t] : tiles[t + 1]` are the runs in tile `t`, ascending.
    """

    tiles: list[int]
    runs: list[EntryRun]

    def within(self, tile: int) -> list[EntryRun]:
        """Return the runs in a tile."""
        return self.runs[self.tiles[tile] : self.tiles[tile + 1]]


def tile_count(parameters: int) -> int:
    """Return the number of tiles of the model's vector."""
    return -(-parameters // TILE)


def find_runs(ids: Indices, sources: Indices, scales: Float64 | None, offsets: Indices) -> Runs:
    """Find the runs of ascending blocks, whose own values start at `sources`.

    Blocks with neighbouring ids must lie one behind the other among their own values too. `scales`
    None: all 1. `offsets` is the plan's `block_offsets`.
    """
    if scales is None:
        scales = np.ones(len(ids))
    breaks = np.flatnonzero((np.diff(ids) != 1) | (np.diff(scales) != 0)) + 1
    first = np.concatenate((np.zeros(min(len(ids), 1), dtype=np.int64), breaks))
    last = np.concatenate((first[1:] - 1, [len(ids) - 1])) if len(ids) else first
    starts, ends = offsets[ids[first]], offsets[ids[last] + 1]
    low, high = starts // TILE, (ends - 1) // TILE
    counts = high - low + 1
    run = np.repeat(np.arange(len(first)), counts)
    tile = low[run] + np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum(starts[run], tile * TILE)
    end = np.minimum(ends[run], (tile + 1) * TILE)
    edges = np.searchsorted(tile, np.arange(tile_count(int(offsets[-1])) + 1))
    columns = (
        begin - tile * TILE,
        end - tile * TILE,
        sources[first[run]] + begin - starts[run],
        scales[first[run]],
    )
    return Runs(edges.tolist(), list(zip(*(column.tolist() for column in columns), strict=True)))
