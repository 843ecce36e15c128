"""The goal of `coverage`, as numbers that can be compared.

`counts` gives, for every cell, the number of devices that hold it. One choice is better than
another if, comparing in this order:

1. fewer of the blocks uncovered longest are left uncovered. Precisely: count the uncovered blocks
   by the round that last covered them, longest ago first; the lexicographically smaller list is
   better;
2. fewer blocks are left uncovered in total. The list of step 1 fixes its sum, so this step decides
   nothing more; where all blocks have waited equally long, it is step 1;
3. the least covered block is covered by more devices;
4. the weights that devices keep have a larger squared norm, summed over devices: less reduction
   noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.groups.cells import Cells, Floats
from edge_sdk.protocol.plan.layout import Indices

Counts = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Goal:
    """The goal for one situation. Blocks of one cell and one age form one entry of the lists."""

    cells: Cells
    wait: Indices
    """For every entry, the rank of its age in step 1; 0 has waited longest."""
    cell: Indices
    blocks: Floats
    """For every entry, its number of blocks."""
    norms: Floats
    """For every cell, the squared norm of its weights; all 0 if norms are unknown."""
    real: Indices
    """The cells that have blocks."""

    def left(self, counts: Counts) -> Floats:
        """Count uncovered blocks by age, longest wait first."""
        uncovered = np.where(counts[self.cell] == 0, self.blocks, 0.0)
        return np.bincount(self.wait, weights=uncovered).astype(np.float64)

    def least(self, counts: Counts) -> int:
        """Return the coverage of the least covered block."""
        return int(counts[self.real].min())

    def kept(self, counts: Counts) -> float:
        """Sum over devices the squared norm of the weights they keep."""
        return float(counts @ self.norms)

    def key(self, counts: Counts) -> Floats:
        """Return steps 1 to 4 as a list; lexicographically smaller is better."""
        return np.append(self.left(counts), [-self.least(counts), -self.kept(counts)])

    def spread(self, counts: Counts) -> Floats:
        """Refine steps 1 to 3: after step 1, count blocks by coverage. Smaller is better.

        Fewer blocks of the least coverage, then of the next: the best in this order is the best in
        steps 1 to 3, and a small step towards it nearly always exists.
        """
        by_coverage = np.bincount(counts, weights=self.cells.blocks)
        return np.append(self.left(counts), by_coverage)

    def waits(self) -> Indices:
        """Return every cell's earliest rank in step 1; a cell without blocks comes last."""
        waits = np.full(self.cells.count, int(self.wait.max()) + 1, dtype=np.int64)
        np.minimum.at(waits, self.cell, self.wait)
        return waits


def make_goal(cells: Cells, last_covered: Indices, norms: Floats | None) -> Goal:
    """Make the goal from every block's last covering round and squared norm."""
    _, wait = np.unique(last_covered, return_inverse=True)
    ages = int(wait.max()) + 1
    entries, blocks = np.unique(cells.of_block * ages + wait, return_counts=True)
    return Goal(
        cells=cells,
        wait=entries % ages,
        cell=entries // ages,
        blocks=blocks.astype(np.float64),
        norms=np.zeros(cells.count) if norms is None else cells.sums(norms),
        real=np.flatnonzero(cells.blocks),
    )


def better(one: Floats, other: Floats) -> bool:
    """True if `one` is lexicographically smaller than `other`; missing entries count as 0."""
    if len(one) != len(other):
        size = max(len(one), len(other))
        one, other = (np.append(each, np.zeros(size - len(each))) for each in (one, other))
    differ = np.flatnonzero(one != other)
    return len(differ) > 0 and bool(one[differ[0]] < other[differ[0]])
