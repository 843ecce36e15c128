"""The elements of a plan: axes and their groups, tensors and buffers, and their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edge_sdk.protocol.errors import GroupError, PlanError

MAX_GROUPS = 64
"""Most groups per axis; with more, blocks would be too small to be worth naming."""

MAX_ATOMS = 2**24
"""Most atoms of one axis."""

BUFFER_DTYPES = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
)
"""Types a buffer may have; weights are float32."""

MAX_DIMS = 16
"""Most dimensions of one tensor. Packing uses four for each, and numpy arrays have at most 64."""

MAX_PARAMETERS = 2**48
"""Far beyond any model; keeps sizes in bytes within 64 bits."""

MAX_BLOCKS = 2**24
"""Most blocks of all tensors. A thousand tensors of two axes with 64 groups have 4 million."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A hidden width of the model: the number of atoms each of its groups owns.

    An atom cannot be cut: a unit, an attention head, a GroupNorm group.

    Groups of `alternatives` stand for one another, such as parameters that each level has of its
    own: a submodel keeps exactly one of them, chosen by its level.

    An axis of `depth` is not a width but a chain of residual blocks of one shape: an atom is a
    block, and a submodel leaves out the others, as if each were the identity.
    """

    name: str
    groups: tuple[int, ...]
    alternatives: bool = False
    depth: bool = False

    @property
    def atoms(self) -> int:
        """Atoms of all groups together."""
        return sum(self.groups)

    @property
    def equal(self) -> bool:
        """True if groups are as equal as the number of atoms allows."""
        return max(self.groups) - min(self.groups) <= 1

    def wanted(self, level: float) -> int:
        """Number of groups for a level on an axis of equal groups: at least one."""
        return 1 if self.alternatives else self._share(level)

    def alternative(self, level: float) -> int:
        """Return the group of a level on an axis of alternatives; the last one is the full level's.

        With n groups, the first serves levels below 2/n, the next those below 3/n, and so on.
        """
        return self._share(level) - 1

    def _share(self, level: float) -> int:
        return max(1, int(level * len(self.groups) + 1e-9))

    def atoms_at(self, level: float) -> int:
        """Most atoms that a device at this level is ever asked to train on this axis.

        Equal groups: the `wanted(level)` largest. Unequal groups: the fullest set of groups that
        stays within `level`. Never less than the smallest group. Alternatives: the largest group.
        """
        if self.alternatives:
            return max(self.groups)
        if self.equal:
            return sum(sorted(self.groups)[-self.wanted(level) :])
        reachable = 1  # bit n is set if some set of groups holds exactly n atoms
        for atoms in self.groups:
            reachable |= reachable << atoms
        limit = int(level * self.atoms + 1e-9)
        within = reachable & ((1 << (limit + 1)) - 1)
        return max(within.bit_length() - 1, min(self.groups))


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of a concatenated dimension: whole (`axis is None`), or `atoms × inner` of an axis."""

    size: int
    axis: int | None = None
    inner: int = 1

    def at(self, kept: Sequence[int]) -> int:
        """Return the size with these atoms kept on each axis."""
        return self.size if self.axis is None else kept[self.axis] * self.inner


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a tensor: whole (`axis is None`), or `outer × atoms × inner` of an axis.

    With `segments` it is a concatenation: one segment after the other, each cut by its own axis.
    """

    size: int
    axis: int | None = None
    outer: int = 1
    inner: int = 1
    segments: tuple[Segment, ...] = ()

    @property
    def whole(self) -> bool:
        """True if the dimension is never cut."""
        return self.axis is None and not self.segments

    def at(self, kept: Sequence[int]) -> int:
        """Return the size with these atoms kept on each axis."""
        if self.segments:
            return sum(segment.at(kept) for segment in self.segments)
        return self.size if self.axis is None else self.outer * kept[self.axis] * self.inner

    def runs(self, counts: Sequence[int]) -> list[tuple[int | None, int]]:
        """Return (axis, number of its groups) along the dimension; a whole segment is one group.

        `counts` are the groups of every axis. A whole dimension has no groups.
        """
        if self.axis is not None:
            return [(self.axis, counts[self.axis])]
        return [
            (segment.axis, 1 if segment.axis is None else counts[segment.axis])
            for segment in self.segments
        ]

    def groups(self, counts: Sequence[int]) -> int:
        """Return the number of groups along the dimension."""
        return sum(count for _, count in self.runs(counts))


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named weight.

    With `members` it is a stack: its first dimension is an axis of depth, and row `i` is the array
    that the torch module calls `members[i]`.
    """

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    members: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        return tuple(dim.size for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Buffer(Tensor):
    """A named array that is not trained: BatchNorm statistics (`statistic`), or a constant.

    Buffers are cut like weights but belong to no block and no server rule.
    """

    statistic: bool = False


@dataclass(frozen=True, slots=True)
class MacTerm:
    """Part of the forward pass: `macs` per sample for one atom of each axis in `axes`."""

    macs: int
    axes: tuple[int, ...]


def split_atoms(atoms: int, parts: int | Sequence[float]) -> tuple[int, ...]:
    """Partition an axis: into equal groups (an int), or by ratios such as (5, 10, 20, 30, 35).

    There are never more groups than atoms. Every group owns at least one atom; ratios are met as
    closely as whole atoms allow. Raises `GroupError` for impossible ratios or counts.
    """
    count = _count(parts)
    if not 1 <= count <= MAX_GROUPS:
        raise GroupError(f"1 to {MAX_GROUPS} groups are allowed, not {count}")
    if atoms < 1:
        raise GroupError(f"{atoms} atoms cannot be split")
    ratios = np.ones(count)
    if isinstance(parts, (Sequence, np.ndarray)):
        if not all(np.isscalar(each) and np.isreal(each) for each in parts):
            raise GroupError(f"ratios must be numbers, not {parts!r}")
        ratios = np.asarray(parts, dtype=np.float64)
    if not (np.isfinite(ratios).all() and (ratios > 0).all()):
        raise GroupError(f"ratios must be positive numbers, not {list(ratios)}")
    if atoms <= len(ratios):
        return (1,) * atoms
    exact = ratios / ratios.sum() * atoms
    sizes = np.maximum(np.floor(exact + 1e-9), 1).astype(np.int64)
    while sizes.sum() != atoms:
        short = exact - sizes
        if sizes.sum() < atoms:
            sizes[int(np.argmax(short))] += 1
        else:
            sizes[int(np.argmin(np.where(sizes > 1, short, np.inf)))] -= 1
    return tuple(int(size) for size in sizes)


def _count(parts: int | Sequence[float]) -> int:
    if isinstance(parts, (list, tuple, np.ndarray)):
        return len(parts)
    if isinstance(parts, (int, np.integer)) and not isinstance(parts, bool):
        return int(parts)
    raise GroupError(f"groups must be a whole number and ratios a list, not {parts!r}")


def check_dim(name: str, dim: Dim, axes: Sequence[Axis]) -> None:
    """Raise `PlanError` unless the dimension of tensor `name` fits the axes."""
    if dim.size < 1 or dim.outer < 1 or dim.inner < 1:
        raise PlanError(f"tensor {name!r} has an empty dimension: {dim}")
    if dim.segments:
        _check_segments(name, dim, axes)
        return
    if dim.axis is None:
        if dim.outer != 1 or dim.inner != 1:
            raise PlanError(f"tensor {name!r}: a whole dimension has no outer or inner: {dim}")
        return
    if not 0 <= dim.axis < len(axes):
        raise PlanError(f"tensor {name!r} names axis {dim.axis}; the plan has {len(axes)}")
    if dim.outer * axes[dim.axis].atoms * dim.inner != dim.size:
        raise PlanError(
            f"tensor {name!r}: {dim.outer} × {axes[dim.axis].atoms} atoms of axis "
            f"{axes[dim.axis].name!r} × {dim.inner} is not {dim.size}"
        )


def check_stack(tensor: Tensor, axes: Sequence[Axis]) -> None:
    """Raise `PlanError` unless a stack, and only a stack, has an axis of depth, in front."""
    first, *rest = [dim.axis is not None and axes[dim.axis].depth for dim in tensor.dims] or [False]
    inside = [each.axis for dim in tensor.dims for each in dim.segments if each.axis is not None]
    if any(rest) or first != bool(tensor.members) or any(axes[axis].depth for axis in inside):
        raise PlanError(
            f"tensor {tensor.name!r}: an axis of depth is the first dimension of a stack, and "
            "nowhere else"
        )
    if tensor.members and tensor.dims[0] != Dim(len(tensor.members), tensor.dims[0].axis):
        raise PlanError(
            f"tensor {tensor.name!r} stacks {len(tensor.members)} arrays along {tensor.dims[0]}"
        )


def _check_segments(name: str, dim: Dim, axes: Sequence[Axis]) -> None:
    if dim.axis is not None or (dim.outer, dim.inner) != (1, 1):
        raise PlanError(f"tensor {name!r}: a dimension of segments has no axis of its own: {dim}")
    for segment in dim.segments:
        check_dim(name, Dim(segment.size, segment.axis, 1, segment.inner), axes)
    if sum(segment.size for segment in dim.segments) != dim.size:
        raise PlanError(f"tensor {name!r}: the segments of {dim} do not add up to its size")
    whole = [segment.axis is None for segment in dim.segments]
    if len(whole) < 2 or all(whole) or any(a and b for a, b in pairwise(whole)):
        raise PlanError(
            f"tensor {name!r}: segments are at least two, one of them of an axis, and whole ones "
            f"are not neighbours: {dim}"
        )
