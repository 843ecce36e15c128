"""Random plans, choices of groups and weights; and the naive definitions that laws compare with.

The definitions below look at one element at a time. They share nothing with `edge_sdk.protocol`
but the specs they read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.plan.specs import (
    Axis,
    Buffer,
    Dim,
    MacTerm,
    Segment,
    Tensor,
    split_atoms,
)

law = settings(max_examples=150)
"""Applied to every property test: the same examples in every run, and no limit on their time."""

Signature = tuple[tuple[str, int], ...]
Choice = dict[str, tuple[int, ...]]

MAX_ELEMENTS = 4500
"""Of one tensor: keeps the loops short, and lets an axis of 65 atoms occur twice."""


# -- strategies --------------------------------------------------------------------------------


@st.composite
def axis_groups(draw: st.DrawFn) -> tuple[int, ...]:
    """Atoms of each group: equal groups or ratios, mostly few, at times up to 64 groups."""
    most_atoms, most_groups = draw(st.sampled_from([(7, 4), (7, 4), (16, 16), (67, 64)]))
    atoms = draw(st.one_of(st.integers(1, most_atoms), st.just(most_atoms)))
    equal = st.one_of(st.integers(1, most_groups), st.just(most_groups))
    ratios = st.lists(st.integers(1, 40), min_size=1, max_size=min(most_groups, 8))
    parts = draw(st.one_of(equal, ratios, st.just([5, 10, 20, 30, 35])))
    return split_atoms(atoms, parts)


@st.composite
def segment_lists(draw: st.DrawFn, axes: list[Axis], room: int) -> tuple[Segment, ...]:
    """Segments that make a dimension, or none: an axis may occur twice, whole ones are apart."""
    found: list[Segment] = []
    for _ in range(draw(st.integers(2, 4))):
        fitting = [number for number, axis in enumerate(axes) if axis.atoms <= room]
        whole = [] if room < 1 or (found and found[-1].axis is None) else [None]
        if not fitting and not whole:
            break
        number = draw(st.sampled_from([*fitting, *fitting, *whole]))
        if number is None:
            found.append(Segment(draw(st.integers(1, min(3, room)))))
        else:
            inner = draw(st.integers(1, min(3, room // axes[number].atoms)))
            found.append(Segment(axes[number].atoms * inner, number, inner))
        room -= found[-1].size
    cut = any(segment.axis is not None for segment in found)
    return tuple(found) if len(found) > 1 and cut else ()


@st.composite
def tensor_dims(draw: st.DrawFn, axes: list[Axis], most: int) -> tuple[Dim, ...]:
    """Up to `most` dimensions; the same axis may occur twice."""
    dims: list[Dim] = []
    room = MAX_ELEMENTS
    for _ in range(draw(st.sampled_from([n for n in (2, 1, 2, 3, 3, 0) if n <= most]))):
        fitting = [number for number, axis in enumerate(axes) if axis.atoms <= room]
        number = draw(st.sampled_from([*fitting, *fitting, None]))
        segments = draw(segment_lists(axes, room)) if draw(st.integers(0, 3)) == 3 else ()
        if segments:
            dim = Dim(sum(segment.size for segment in segments), segments=segments)
        elif number is None:
            dim = Dim(draw(st.integers(1, min(3, room))))
        else:
            atoms = axes[number].atoms
            outer = draw(st.integers(1, min(3, room // atoms)))
            inner = draw(st.integers(1, min(3, room // (atoms * outer))))
            dim = Dim(outer * atoms * inner, number, outer, inner)
        dims.append(dim)
        room //= dim.size
    return tuple(dims)


@st.composite
def plans(draw: st.DrawFn, min_axes: int = 0) -> ModelPlan:
    """A plan of up to 4 axes, 1–4 tensors, 0–3 buffers and 0–3 cost terms."""
    count = max(min_axes, draw(st.sampled_from([2, 1, 2, 3, 4, 0])))
    axes = [Axis(f"axis{number}", draw(axis_groups())) for number in range(count)]
    tensors = [draw(tensor_dims(axes, most=3)) for _ in range(draw(st.integers(1, 4)))]
    buffers = draw(
        st.lists(
            st.tuples(
                st.sampled_from([("float32", True), ("float64", True), ("int64", False)]),
                tensor_dims(axes, most=2),
            ),
            max_size=3,
        )
    )
    numbers = st.lists(st.integers(0, len(axes) - 1), max_size=2) if axes else st.just([])
    terms = draw(st.lists(st.tuples(st.integers(0, 2**40), numbers), max_size=3))
    return ModelPlan(
        axes=tuple(axes),
        tensors=tuple(Tensor(f"w{n}", "float32", dims) for n, dims in enumerate(tensors)),
        buffers=tuple(
            Buffer(f"b{n}", dtype, dims, statistic)
            for n, ((dtype, statistic), dims) in enumerate(buffers)
        ),
        macs=tuple(MacTerm(macs, tuple(term_axes)) for macs, term_axes in terms),
    )


@st.composite
def choices(draw: st.DrawFn, plan: ModelPlan) -> Choice:
    """Some groups of every axis, in any order."""
    return {
        axis.name: tuple(
            draw(st.lists(st.integers(0, len(axis.groups) - 1), min_size=1, unique=True))
        )
        for axis in plan.axes
    }


levels = st.one_of(
    st.floats(0, 1, exclude_min=True),
    st.builds(lambda a, b: min(a, b) / max(a, b), st.integers(1, 64), st.integers(1, 64)),
)
"""Shares in (0, 1], often simple fractions, at which rounding decides about a group."""

seeds = st.integers(0, 2**32 - 1)


def random_bits(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
    """Float32 arrays of arbitrary bits (NaNs too), every other one in column-major order."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for number, (name, shape) in enumerate(shapes.items()):
        bits = rng.integers(0, 2**32, size=shape, dtype=np.uint32)
        arrays[name] = np.asarray(bits, order="CF"[number % 2]).view(np.float32)  # type: ignore[call-overload]
    return arrays


def shapes_of(plan: ModelPlan) -> dict[str, tuple[int, ...]]:
    """Full shapes of the weights."""
    return {tensor.name: tensor.shape for tensor in plan.tensors}


def bits_of(arrays: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bits of every array; equal if and only if the arrays are, NaN or not."""
    return {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


# -- naive definitions -------------------------------------------------------------------------


Owner = tuple[int, str | None, int]
"""Number of a segment, name of its axis (None: whole) and group: who owns an index."""


def owner_along(axes: tuple[Axis, ...], dim: Dim, index: int) -> Owner:
    """The owner of an index of a dimension."""
    segment = 0
    axis, inner = dim.axis, dim.inner
    if dim.segments:
        while index >= dim.segments[segment].size:
            index -= dim.segments[segment].size
            segment += 1
        axis, inner = dim.segments[segment].axis, dim.segments[segment].inner
    if axis is None:
        return segment, None, 0
    atom = index // inner % axes[axis].atoms
    group = 0
    while atom >= axes[axis].groups[group]:
        atom -= axes[axis].groups[group]
        group += 1
    return segment, axes[axis].name, group


def kept_along(plan: ModelPlan, dim: Dim, groups: Groups) -> list[int]:
    """The indices of a dimension that a submodel keeps."""
    owners = [owner_along(plan.axes, dim, index) for index in range(dim.size)]
    return [
        index
        for index, (_, axis, group) in enumerate(owners)
        if axis is None or group in groups[axis]
    ]


def kept_elements(plan: ModelPlan, tensor: Tensor, groups: Groups) -> list[tuple[int, ...]]:
    """Where the elements of a submodel's tensor lie in the full one, in row-major order."""
    return list(product(*(kept_along(plan, dim, groups) for dim in tensor.dims)))


def naive_cut(plan: ModelPlan, tensor: Tensor, array: Array, groups: Groups) -> Array:
    """A submodel's tensor, element by element."""
    shape = [len(kept_along(plan, dim, groups)) for dim in tensor.dims]
    bits: NDArray[np.uint32] = array.view(np.uint32)
    kept = [bits[where] for where in kept_elements(plan, tensor, groups)]
    return np.array(kept, dtype=np.uint32).reshape(shape).view(array.dtype)


def elements_by_block(
    plan: ModelPlan, tensor: Tensor
) -> list[tuple[Signature, list[tuple[int, ...]]]]:
    """The signature and the elements of every block, in row-major order of segments and groups."""
    owners = [[owner_along(plan.axes, dim, i) for i in range(dim.size)] for dim in tensor.dims]
    owned: dict[tuple[Owner, ...], list[tuple[int, ...]]] = {}
    for where in product(*(range(size) for size in tensor.shape)):
        key = tuple(column[i] for column, i in zip(owners, where, strict=True))
        owned.setdefault(key, []).append(where)
    ordered = sorted(owned, key=lambda key: [(segment, group) for segment, _, group in key])
    return [
        (tuple((axis, group) for _, axis, group in key if axis is not None), owned[key])
        for key in ordered
    ]


def holds(groups: Mapping[str, Collection[int]], signature: Signature) -> bool:
    """Whether a submodel of these groups holds a block with this signature."""
    return all(group in groups[axis] for axis, group in signature)
