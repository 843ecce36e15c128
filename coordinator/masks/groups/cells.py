"""Cells: blocks that are always covered together.

Blocks owned by the same groups are covered together and form one **cell**. Tensors whose width
dimensions have the same bundles, in any order, share a table of cells with one dimension for each,
in row-major order of group numbers. Where one bundle is behind two dimensions, blocks (g, h) and
(h, g) are both in cell (min, max), and cell (max, min) is empty. Blocks without a width axis are in
a cell of no dimensions, which every submodel holds. Alternatives belong to no bundle: blocks that
differ in nothing else are in one cell, as if every submodel held them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.groups.bundles import Bundle
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

Floats = NDArray[np.float64]

_TRUE = np.ones((), dtype=bool)


@dataclass(frozen=True, slots=True)
class Table:
    """The cells of all tensors with the same bundles behind their width dimensions."""

    bundles: tuple[int, ...]
    """Numbers of the bundles, ascending; one may occur twice."""
    shape: tuple[int, ...]
    cells: slice
    """Position of its cells among all cells."""


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """All cells of a plan whose axes are bundled."""

    tables: tuple[Table, ...]
    of_block: Indices
    """The cell of every block."""
    blocks: Indices
    """Number of blocks in every cell; 0 for an empty cell."""

    @property
    def count(self) -> int:
        """Number of cells."""
        return len(self.blocks)

    def sums(self, values: Floats) -> Floats:
        """Sum values over the blocks of every cell."""
        return np.bincount(self.of_block, weights=values, minlength=self.count).astype(np.float64)

    def held(self, member: Sequence[NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """Flag the cells a submodel holds, given its groups as `member[bundle][group]`."""
        held = np.empty(self.count, dtype=bool)
        for table in self.tables:
            part = _TRUE
            for bundle in table.bundles:
                part = np.logical_and.outer(part, member[bundle])
            held[table.cells] = part.reshape(-1)
        return held

    def groups(self, cell: int) -> list[tuple[int, int]]:
        """Return the (bundle, group) pairs that own a cell."""
        table = next(t for t in reversed(self.tables) if t.cells.start <= cell)
        numbers = np.unravel_index(cell - table.cells.start, table.shape) if table.shape else ()
        return [(b, int(g)) for b, g in zip(table.bundles, numbers, strict=True)]

    def group_sums(self, values: Floats, bundles: Sequence[Bundle]) -> list[Floats]:
        """Sum a value, for every bundle and group, over the cells that the group owns.

        A cell that a group owns in two dimensions counts once.
        """
        sums = [np.zeros(bundle.count) for bundle in bundles]
        for table in self.tables:
            part = values[table.cells].reshape(table.shape)
            for dim, bundle in enumerate(table.bundles):
                rest = part
                for earlier in range(dim):
                    if table.bundles[earlier] == bundle:  # equal groups were counted there
                        rest = np.where(_same(table.shape, earlier, dim), 0.0, rest)
                sums[bundle] += rest.sum(axis=tuple(d for d in range(rest.ndim) if d != dim))
        return sums

    def need(self, bundle: int) -> int:
        """Largest number of a bundle's groups that any one cell needs."""
        return max((table.bundles.count(bundle) for table in self.tables), default=0)


def cells_of(plan: ModelPlan, bundles: Sequence[Bundle]) -> Cells:
    """Return the cells of a plan."""
    bundle_of = {number: b for b, bundle in enumerate(bundles) for number in bundle.numbers}
    tables: dict[tuple[int, ...], Table] = {}
    of_block, start = [], 0
    for tensor in plan.tensors:
        axes = [dim.axis for dim in tensor.dims if dim.axis is not None]
        behind = [bundle_of.get(axis) for axis in axes]
        key = tuple(sorted(bundle for bundle in behind if bundle is not None))
        if key not in tables:
            shape = tuple(bundles[b].count for b in key)
            tables[key] = Table(key, shape, slice(start, start + prod(shape)))
            start += prod(shape)
        of_block.append(
            tables[key].cells.start + _places(behind, [len(plan.axes[n].groups) for n in axes])
        )
    cells = np.concatenate(of_block)
    blocks = np.bincount(cells, minlength=start).astype(np.int64)
    return Cells(tuple(tables.values()), cells, blocks)


def _places(behind: Sequence[int | None], counts: Sequence[int]) -> Indices:
    """Return, for every block of a tensor, its cell's position in the table.

    Dimensions behind which there is no bundle do not matter.
    """
    bundled = [dim for dim, bundle in enumerate(behind) if bundle is not None]
    if not bundled:
        return np.zeros(prod(counts), dtype=np.int64)
    numbers = np.indices(counts).reshape(len(counts), -1)[bundled]
    counts = [counts[dim] for dim in bundled]
    # Sort by bundle, and by group within a bundle: the cell's own coordinates.
    owners = np.array([behind[dim] for dim in bundled], dtype=np.int64)
    bundles = np.broadcast_to(owners[:, None], numbers.shape)
    order = np.lexsort((numbers, bundles), axis=0)
    shape = tuple(counts[dim] for dim in np.argsort(owners, kind="stable"))
    coordinates = tuple(np.take_along_axis(numbers, order, axis=0))
    places: Indices = np.ravel_multi_index(coordinates, shape).astype(np.int64)
    return places


def _same(shape: tuple[int, ...], one: int, other: int) -> NDArray[np.bool_]:
    """Flag the entries where the indices of two dimensions are equal."""
    grids = np.ogrid[tuple(slice(size) for size in shape)]
    equal: NDArray[np.bool_] = grids[one] == grids[other]
    return equal
