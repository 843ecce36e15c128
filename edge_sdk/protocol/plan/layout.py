"""Arrays cut into groups, and the order of blocks in memory. Knows arrays, not plans.

A dimension is seen as `outer × atoms × inner` (`Span`): a group owns a run of consecutive atoms, in
each of the `outer` repeats, `inner` elements per atom. A bias is 1 × units × 1; the columns of a
linear layer after a flattened H×W image are 1 × channels × H·W; fused q, k, v rows are
3 × heads × head width.

A **block** takes one group of every width dimension. Blocks of one tensor are stored one after the
other, in row-major order of their group numbers, each block in row-major order of its own
elements. `pack` and `unpack` convert between an array and that order; both copy whole rectangles of
equally sized groups at a time, so their cost does not depend on how finely a tensor is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Indices = NDArray[np.int64]
Place = tuple[Any, ...]
"""An index of a part of an array; taking it from an array without dimensions gives an array too."""


@dataclass(frozen=True, slots=True)
class Span:
    """One dimension as `outer × atoms × inner`, with the atoms of each group in turn.

    A dimension without a width axis is `Span(outer=size, groups=None, inner=1)`.
    """

    outer: int
    groups: tuple[int, ...] | None
    inner: int

    @property
    def size(self) -> int:
        """Number of elements along the dimension."""
        return self.outer * (1 if self.groups is None else sum(self.groups)) * self.inner

    def keep(self, chosen: Sequence[int]) -> Span:
        """Return the dimension with only these groups, in this order."""
        if self.groups is None:
            return self
        return Span(self.outer, tuple(self.groups[g] for g in chosen), self.inner)

    def indices(self, chosen: Sequence[int]) -> slice | Indices:
        """Return the indices of the chosen groups; a slice where they are one run."""
        if self.groups is None or len(chosen) == len(self.groups):
            return slice(None)
        starts = np.concatenate(([0], np.cumsum(self.groups)))
        if self.outer == 1 and chosen[-1] - chosen[0] + 1 == len(chosen):
            return slice(
                int(starts[chosen[0]]) * self.inner, int(starts[chosen[-1] + 1]) * self.inner
            )
        atoms = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in chosen])
        repeats = np.arange(self.outer)[:, None, None] * int(starts[-1])
        inside = (repeats + atoms[:, None]) * self.inner + np.arange(self.inner)
        where: Indices = inside.ravel().astype(np.int64)
        return where


def cut_array(array: Array, spans: Sequence[Span], chosen: Sequence[Sequence[int]]) -> Array:
    """Copy what the chosen groups own, contiguously; `chosen[d]` is ignored for whole dims."""
    for position, (span, groups) in enumerate(zip(spans, chosen, strict=True)):
        where = span.indices(groups)
        if isinstance(where, slice):
            array = array[(slice(None),) * position + (where,)]
        else:
            array = np.take(array, where, axis=position)
    return np.array(array, order="C", copy=True)


def places(spans: Sequence[Span], chosen: Sequence[Sequence[int]]) -> tuple[Array, ...]:
    """Return an index of what `cut_array` takes from a full array; usable for assignment."""
    return np.ix_(
        *(
            np.arange(span.size)[span.indices(groups)]
            for span, groups in zip(spans, chosen, strict=True)
        )
    )


def place(spans: Sequence[Span], chosen: Sequence[Sequence[int]]) -> Place:
    """Return an index of what `cut_array` takes, for numpy arrays and torch tensors alike.

    Slices, which make a view, where the chosen groups are one run along every dimension. Else the
    dimensions from the first to the last that are not become one open mesh of indices.
    """
    index: list[Any] = [span.indices(groups) for span, groups in zip(spans, chosen, strict=True)]
    meshed = [at for at, where in enumerate(index) if not isinstance(where, slice)]
    if meshed:
        inside = slice(meshed[0], meshed[-1] + 1)
        index[inside] = np.ix_(
            *(
                np.arange(span.size)[where]
                for span, where in zip(spans[inside], index[inside], strict=True)
            )
        )
    return (*index, ...)


def block_sizes(spans: Sequence[Span]) -> Indices:
    """Elements of every block of the tensor, in block order."""
    sizes = np.ones((), dtype=np.int64)
    for span in spans:
        if span.groups is None:
            sizes = sizes * span.size
        else:
            elements = np.asarray(span.groups, dtype=np.int64) * (span.outer * span.inner)
            sizes = np.multiply.outer(sizes, elements)
    return sizes.reshape(-1)


def pack(array: Array, spans: Sequence[Span], out: Array) -> None:
    """Write `array`, whose dimensions are `spans`, to the flat `out` in block order."""
    for in_array, in_flat in _rectangles(np.ascontiguousarray(array), out, spans):
        in_flat[...] = in_array


def unpack(flat: Array, spans: Sequence[Span]) -> Array:
    """Return the array whose blocks lie in `flat`; inverse of `pack`."""
    flat = np.ascontiguousarray(flat)  # blocks are located by their distance in memory
    array = np.empty([span.size for span in spans], dtype=flat.dtype)
    for in_array, in_flat in _rectangles(array, flat, spans):
        in_array[...] = in_flat
    return array


class _Run(NamedTuple):
    """Adjacent groups of equal size along one dimension."""

    first_atom: int
    groups: int
    atoms: int


def _runs(groups: Sequence[int]) -> list[_Run]:
    runs: list[_Run] = []
    start = 0
    for atoms in groups:
        if runs and runs[-1].atoms == atoms:
            runs[-1] = runs[-1]._replace(groups=runs[-1].groups + 1)
        else:
            runs.append(_Run(start, 1, atoms))
        start += atoms
    return runs


def _rectangles(array: Array, flat: Array, spans: Sequence[Span]) -> Iterator[tuple[Array, Array]]:
    """Yield pairs of views of equal shape: a rectangle of equal blocks in the array and in `flat`.

    Within a rectangle, the position of a block is affine in its group numbers: dimension `j`
    advances by (elements of one block in the dimensions before `j`) × (its own group's elements) ×
    (all elements of the dimensions after `j`).
    """
    pieces: list[int] = []
    for span in spans:
        if span.groups is None:
            pieces.append(span.size)
        else:
            pieces += [span.outer, sum(span.groups), span.inner]
    expanded = array.reshape(pieces)  # a view: both callers pass contiguous arrays
    # Whole dimensions are part of every block; their elements count as "before" for simplicity.
    whole = prod(span.size for span in spans if span.groups is None)
    width = [span for span in spans if span.groups is not None]
    behind = [prod(later.size for later in width[j + 1 :]) for j in range(len(width))]
    for runs in product(*(_runs(span.groups or ()) for span in width)):
        view, offset, steps, before = expanded, 0, [], whole
        position = block_axis = 0
        remaining = iter(zip(width, runs, behind, strict=True))
        shape: list[int] = []
        for span in spans:
            if span.groups is None:
                shape.append(span.size)
                position += 1
                continue
            _, run, rest = next(remaining)
            offset += before * run.first_atom * span.outer * span.inner * rest
            steps.append(before * run.atoms * span.outer * span.inner * rest)
            before *= run.atoms * span.outer * span.inner
            # (outer, atoms, inner) → (outer, run, atoms of a group, inner), run to the front
            at = position + 1 + block_axis
            where = slice(run.first_atom, run.first_atom + run.groups * run.atoms)
            view = view[(slice(None),) * at + (where,)]
            view = _split(view, at, run.groups)
            view = np.moveaxis(view, at, block_axis)
            shape += [span.outer, run.atoms, span.inner]
            position += 3
            block_axis += 1
        itemsize = flat.itemsize
        inside = [itemsize * prod(shape[i + 1 :]) for i in range(len(shape))]
        yield (
            view,
            np.lib.stride_tricks.as_strided(
                flat[offset:],
                shape=[run.groups for run in runs] + shape,
                strides=[step * itemsize for step in steps] + inside,
            ),
        )


def _split(view: Array, at: int, count: int) -> Array:
    """Split dimension `at` into (count, rest) without copying."""
    size, stride = view.shape[at], view.strides[at]
    each = size // count
    return np.lib.stride_tricks.as_strided(
        view,
        shape=(*view.shape[:at], count, each, *view.shape[at + 1 :]),
        strides=(*view.strides[:at], each * stride, stride, *view.strides[at + 1 :]),
    )
