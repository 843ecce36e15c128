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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Indices = NDArray[np.int64]
Raw = NDArray[np.uint8]
"""Memory for something that may be made there."""
Place = tuple[Any, ...]
"""An index of a part of an array; taking it from an array without dimensions gives an array too."""

ALIGNED_BYTES = 64
"""Arrays in one piece of memory begin at multiples of this."""

ROOM_BYTES = 2**16
"""Room behind a submodel's arrays or values: what is made of them next has a header."""

REMEMBERED = 64
"""Groups of a tensor's dimensions, in all, up to which the places of its blocks are remembered."""


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
    array = np.ascontiguousarray(array, dtype=out.dtype)
    for shape, in_array, in_flat in _rectangles(tuple(spans), out.itemsize):
        _view(out, shape, in_flat)[...] = _view(array, shape, in_array)


def unpack(flat: Array, spans: Sequence[Span], out: Array | None = None) -> Array:
    """Return the array whose blocks lie in `flat`; inverse of `pack`.

    `out`: the array to write to, contiguous and of the same type; None: a new one.
    """
    flat = np.ascontiguousarray(flat)  # blocks are located by their distance in memory
    array = np.empty([span.size for span in spans], dtype=flat.dtype) if out is None else out
    for shape, in_array, in_flat in _rectangles(tuple(spans), flat.itemsize):
        _view(array, shape, in_array)[...] = _view(flat, shape, in_flat)
    return array


def subtract(flat: Array, spans: Sequence[Span], out: Array) -> None:
    """Subtract the array whose blocks lie in `flat` from `out`, which is contiguous."""
    for shape, in_array, in_flat in _rectangles(tuple(spans), flat.itemsize):
        part = _view(out, shape, in_array)
        part -= _view(flat, shape, in_flat)


def arrays_in_one(
    wanted: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    more_bytes: int = 0,
    room: Raw | None = None,
) -> tuple[dict[str, Array], Raw]:
    """Make arrays of these shapes and types in one piece of memory, with room for more.

    Returns that piece, too: `room`, if it is large enough for the arrays. In one piece, memory
    returns to the system when it is not needed any more; in many, the allocator keeps it.
    """
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in wanted.values()]
    padded = [-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in sizes]
    whole = room_for(sum(padded), room, more_bytes)
    arrays, start = {}, 0
    for (name, (shape, dtype)), size, step in zip(wanted.items(), sizes, padded, strict=True):
        arrays[name] = whole[start : start + size].view(dtype).reshape(shape)
        start += step
    return arrays, whole


def room_for(size_bytes: int, room: Raw | None = None, more_bytes: int = 0) -> Raw:
    """Return `room` if it has these bytes, else new memory with room for more."""
    if room is not None and len(room) >= size_bytes:
        return room
    return np.empty(size_bytes + more_bytes, dtype=np.uint8)


def _view(array: Array, shape: tuple[int, ...], where: _Where) -> Array:
    """Return the part of a contiguous array that begins and steps as told."""
    view: Array = np.ndarray(shape, array.dtype, array, where.offset, where.strides)
    return view


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


class _Where(NamedTuple):
    """A rectangle's place in memory, in bytes."""

    offset: int
    strides: tuple[int, ...]


Rectangles = tuple[tuple[tuple[int, ...], _Where, _Where], ...]
"""Per rectangle of equal blocks: its shape, its place in the array, and that in the flat one."""


def _rectangles(spans: tuple[Span, ...], itemsize: int) -> Rectangles:
    """Return the rectangles of equal blocks, from memory where they are few."""
    groups = sum(len(span.groups or ()) for span in spans)
    return (_known if groups <= REMEMBERED else _found)(spans, itemsize)


def _found(spans: tuple[Span, ...], itemsize: int) -> Rectangles:
    """Find the rectangles of equal blocks.

    Within a rectangle, the position of a block is affine in its group numbers: dimension `j`
    advances by (elements of one block in the dimensions before `j`) × (its own group's elements) ×
    (all elements of the dimensions after `j`).
    """
    # Whole dimensions are part of every block; their elements count as "before" for simplicity.
    whole = prod(span.size for span in spans if span.groups is None)
    width = [span for span in spans if span.groups is not None]
    behind = [prod(later.size for later in width[j + 1 :]) for j in range(len(width))]
    return tuple(
        _rectangle(spans, runs, behind, whole, itemsize)
        for runs in product(*(_runs(span.groups or ()) for span in width))
    )


_known = lru_cache(maxsize=256)(_found)


def _rectangle(
    spans: Sequence[Span], runs: Sequence[_Run], behind: Sequence[int], before: int, itemsize: int
) -> tuple[tuple[int, ...], _Where, _Where]:
    """Locate one rectangle: a run of groups along every width dimension, then their elements."""
    at = in_flat = 0
    shape: list[int] = []
    strides: list[int] = []
    blocks: list[tuple[int, int, int]] = []  # per width dimension: count, steps in both arrays
    remaining = iter(zip(runs, behind, strict=True))
    step = prod(span.size for span in spans)
    for span in spans:
        step //= span.size  # elements of the array from one index to the next
        if span.groups is None:
            shape.append(span.size)
            strides.append(step)
            continue
        run, rest = next(remaining)
        own = span.outer * span.inner
        at += run.first_atom * span.inner * step
        in_flat += before * run.first_atom * own * rest
        blocks.append((run.groups, run.atoms * span.inner * step, before * run.atoms * own * rest))
        before *= run.atoms * own
        shape += [span.outer, run.atoms, span.inner]
        strides += [sum(span.groups) * span.inner * step, span.inner * step, step]
    inside = [prod(shape[place + 1 :]) for place in range(len(shape))]
    counts, far, near = zip(*blocks, strict=True) if blocks else ((), (), ())
    return (
        (*counts, *shape),
        _Where(at * itemsize, tuple(each * itemsize for each in (*far, *strides))),
        _Where(in_flat * itemsize, tuple(each * itemsize for each in (*near, *inside))),
    )
