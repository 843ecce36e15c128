"""Random plans, choices of groups and weights; and the naive definitions that laws compare with.

The definitions below look at one element at a time. They share nothing with `edge_sdk.protocol`
but the specs they read.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import TypeVar

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
AnyTensor = TypeVar("AnyTensor", bound=Tensor)

MAX_ELEMENTS = 4500
"""Of one tensor: keeps the loops short, and lets an axis of 65 atoms occur twice."""


# -- strategies --------------------------------------------------------------------------------


seeds = st.integers(0, 2**32 - 1)


def plans(min_axes: int = 0) -> st.SearchStrategy[ModelPlan]:
    """A plan of up to 4 axes, 1–4 tensors, 0–3 buffers and 0–3 cost terms; some by depth too.

    Only the numbers of axes and tensors shrink. All else follows from a seed: drawing each number
    on its own takes longer than the laws do.
    """
    axes = st.sampled_from([2, 1, 2, 3, 4, 0]).map(lambda count: max(min_axes, count))
    return st.builds(random_plan, seeds, axes, st.integers(1, 4))


def choices(plan: ModelPlan) -> st.SearchStrategy[Choice]:
    """Some groups of every axis, in any order."""
    return seeds.map(lambda seed: random_choice(random.Random(seed), plan))


def random_plan(seed: int, axis_count: int, tensor_count: int) -> ModelPlan:
    """See `plans`."""
    rng = random.Random(seed)
    axes = [Axis(f"axis{number}", random_axis_groups(rng)) for number in range(axis_count)]
    tensors = [random_dims(rng, axes, most=3) for _ in range(tensor_count)]
    buffers = [
        (
            rng.choice([("float32", True), ("float64", True), ("int64", False)]),
            random_dims(rng, axes, most=2),
        )
        for _ in range(rng.randint(0, 3))
    ]
    terms = [
        MacTerm(
            rng.randint(0, 2 ** rng.randint(0, 40)),
            tuple(rng.randrange(axis_count) for _ in range(rng.randint(0, 2) if axes else 0)),
        )
        for _ in range(rng.randint(0, 3))
    ]
    plan = ModelPlan(
        axes=tuple(axes),
        tensors=tuple(Tensor(f"w{n}", "float32", dims) for n, dims in enumerate(tensors)),
        buffers=tuple(
            Buffer(f"b{n}", dtype, dims, statistic=statistic)
            for n, ((dtype, statistic), dims) in enumerate(buffers)
        ),
        macs=tuple(terms),
    )
    return with_chain(rng, plan) if axes and rng.random() < 1 / 3 else plan


def with_chain(rng: random.Random, plan: ModelPlan) -> ModelPlan:
    """The plan with one more axis, of depth: some of its arrays, the first in any case, stacked."""
    number, count = len(plan.axes), rng.randint(1, 4)

    def stacked(tensor: AnyTensor, *, always: bool) -> AnyTensor:
        if not always and rng.random() < 0.5:
            return tensor
        members = tuple(f"{tensor.name}.{row}" for row in range(count))
        return replace(tensor, dims=(Dim(count, number), *tensor.dims), members=members)

    return replace(
        plan,
        axes=(*plan.axes, Axis("chain", (1,) * count, depth=True)),
        tensors=tuple(stacked(each, always=not at) for at, each in enumerate(plan.tensors)),
        buffers=tuple(stacked(each, always=False) for each in plan.buffers),
        macs=(*plan.macs, MacTerm(rng.randint(1, 100), (number,))),
    )


def random_axis_groups(rng: random.Random) -> tuple[int, ...]:
    """Atoms of each group: equal groups or ratios, mostly few, at times up to 64 groups."""
    most_atoms, most_groups = rng.choice([(7, 4), (7, 4), (16, 16), (67, 64)])
    atoms = rng.choice([rng.randint(1, most_atoms), most_atoms])
    equal = rng.choice([rng.randint(1, most_groups), most_groups])
    ratios = [rng.randint(1, 40) for _ in range(rng.randint(1, min(most_groups, 8)))]
    parts: list[int | list[int]] = [equal, ratios, [5, 10, 20, 30, 35]]
    return split_atoms(atoms, rng.choice(parts))


def random_dims(rng: random.Random, axes: list[Axis], most: int) -> tuple[Dim, ...]:
    """Up to `most` dimensions; the same axis may occur twice."""
    dims: list[Dim] = []
    room = MAX_ELEMENTS
    for _ in range(rng.choice([n for n in (2, 1, 2, 3, 3, 0) if n <= most])):
        fitting = [number for number, axis in enumerate(axes) if axis.atoms <= room]
        number = rng.choice([*fitting, *fitting, None])
        segments = random_segments(rng, axes, room) if rng.random() < 0.25 else ()
        if segments:
            dim = Dim(sum(segment.size for segment in segments), segments=segments)
        elif number is None:
            dim = Dim(rng.randint(1, min(3, room)))
        else:
            atoms = axes[number].atoms
            outer = rng.randint(1, min(3, room // atoms))
            inner = rng.randint(1, min(3, room // (atoms * outer)))
            dim = Dim(outer * atoms * inner, number, outer, inner)
        dims.append(dim)
        room //= dim.size
    return tuple(dims)


def random_segments(rng: random.Random, axes: list[Axis], room: int) -> tuple[Segment, ...]:
    """Segments that make a dimension, or none: an axis may occur twice, whole ones are apart."""
    found: list[Segment] = []
    for _ in range(rng.randint(2, 4)):
        fitting: list[int | None] = [n for n, axis in enumerate(axes) if axis.atoms <= room]
        if room and not (found and found[-1].axis is None):
            fitting += [None]
        if not fitting:
            break
        number = rng.choice(fitting)
        if number is None:
            found.append(Segment(rng.randint(1, min(3, room))))
        else:
            inner = rng.randint(1, min(3, room // axes[number].atoms))
            found.append(Segment(axes[number].atoms * inner, number, inner))
        room -= found[-1].size
    cut = any(segment.axis is not None for segment in found)
    return tuple(found) if len(found) > 1 and cut else ()


def random_choice(rng: random.Random, plan: ModelPlan) -> Choice:
    """Some groups of every axis, in any order; of many groups, often few."""
    counts = {axis.name: len(axis.groups) for axis in plan.axes}
    most = {name: rng.choice([count, min(count, 8)]) for name, count in counts.items()}
    return {
        name: tuple(rng.sample(range(count), rng.randint(1, most[name])))
        for name, count in counts.items()
    }


levels = st.one_of(
    st.floats(0, 1, exclude_min=True),
    st.builds(lambda a, b: min(a, b) / max(a, b), st.integers(1, 64), st.integers(1, 64)),
)
"""Shares in (0, 1], often simple fractions, at which rounding decides about a group."""


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
