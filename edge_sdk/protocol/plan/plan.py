"""The structure of a model and how it may be cut: the contract between all parts of the project.

A `ModelPlan` names every weight tensor, the width axes behind its dimensions, the groups of every
axis and therefore the blocks (`docs/plans.md`). It needs no torch. All code that slices, sends,
sums or counts works on a plan and numpy arrays alone.

Laws, for any choice of groups `S` (tests/property/plan/test_plan_laws.py):

- blocks partition every tensor: `sum(block_sizes) == parameters`;
- `cut(weights, all groups) == weights`;
- `assemble(scatter(m, S), S) == m` for a submodel's arrays `m`;
- `cut(weights, S) == assemble(select(flatten(weights), S), S)`;
- `cut(weights, S)[places_within(S, T)] == cut(weights, T)` for every `T` within `S`.

The serialised form is canonical: one plan has exactly one encoding, and `hash` is its SHA-256
(`codec.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple, NewType, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import BlockError, GroupError, PlanError, TensorError
from edge_sdk.protocol.plan.blocks import Blocks, Float32, select_blocks
from edge_sdk.protocol.plan.layout import (
    Array,
    Indices,
    Place,
    Span,
    arrays_in_one,
    block_sizes,
    cut_array,
    pack,
    place,
    places,
    subtract,
    unpack,
)
from edge_sdk.protocol.plan.specs import (
    BUFFER_DTYPES,
    MAX_ATOMS,
    MAX_BLOCKS,
    MAX_DIMS,
    MAX_GROUPS,
    MAX_PARAMETERS,
    Axis,
    Buffer,
    Dim,
    MacTerm,
    Tensor,
    check_dim,
    check_stack,
)

Groups = Mapping[str, Collection[int]]
"""A choice of groups for each axis, by axis name, as given from outside."""

Chosen = NewType("Chosen", tuple[tuple[int, ...], ...])
"""Groups per axis, in axis order, sorted, checked. Only `ModelPlan.choose` makes one."""

Regions = Literal["width", "depth", "both"]
"""Parts that a model is cut into: of its widths, whole blocks of chains, or both."""

MOST_HELD = 1024
"""Choices of groups whose blocks are kept."""
MOST_HELD_BYTES = 64 * 2**20
"""Most memory that these blocks take, unless they are very many."""
MOST_SHAPED = 64
"""Choices of groups whose arrays' shapes are kept."""

_ALWAYS = np.ones(1, dtype=bool)
"""A whole segment belongs to every submodel."""
_WHOLE, _TUPLES = {int}, {tuple}
"""Types of groups, and of choices of them, that need no second look."""


@dataclass(frozen=True, slots=True)
class LevelCost:
    """Cost of one level: an upper bound over the groups that may be assigned."""

    level: float
    parameters: int
    parameter_share: float
    bytes_fp32: int
    macs: int


class HeldBlocks(NamedTuple):
    """Blocks of a submodel. The arrays are read-only: all who choose the same groups share them."""

    flags: NDArray[np.bool_]
    """Per block of the plan, True if the submodel holds it."""
    ids: Indices
    """Blocks that it holds, ascending."""
    sizes: Indices
    """Their parameters."""
    parameters: int
    """Parameters of all of them."""


class _Shaped(NamedTuple):
    """Arrays of a submodel: its tensors and buffers along every dimension, and their shapes."""

    tensors: tuple[tuple[Span, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    buffer_shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ModelPlan:
    """The plan of one model. Equal plans have equal hashes, whoever made them."""

    axes: tuple[Axis, ...]
    tensors: tuple[Tensor, ...]
    buffers: tuple[Buffer, ...] = ()
    macs: tuple[MacTerm, ...] = ()

    def __post_init__(self) -> None:
        _check_plan(self)

    # -- identity ---------------------------------------------------------------------------

    @cached_property
    def encoded(self) -> bytes:
        """Canonical encoding, with its hash in front."""
        from edge_sdk.protocol.plan.codec import encode_plan

        return encode_plan(self)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the canonical encoding without the costs, as 64 hex digits."""
        from edge_sdk.protocol.plan.codec import plan_hash

        return plan_hash(self)

    @cached_property
    def regions(self) -> Regions:
        """The kinds of axes: widths, chains of blocks (depth), or both."""
        kinds = {axis.depth for axis in self.axes}
        if kinds == {True, False}:
            return "both"
        return "depth" if kinds == {True} else "width"

    # -- choosing groups --------------------------------------------------------------------

    def choose(self, groups: Groups) -> Chosen:
        """Check a choice of groups: every axis named, no empty set, ids in range.

        Raises `GroupError`, which names the axis.
        """
        given = tuple(groups.values())
        # Equal keys mean equal choices only among whole numbers: True and 1.0 equal 1 as well.
        plain = set(map(type, given)) == _TUPLES and set(map(type, chain(*given))) == _WHOLE
        if plain and (known := self._choices.get((*groups, *given))) is not None:
            return known
        names = self._axis_names
        if unknown := [name for name in groups if name not in names]:
            raise GroupError(f"unknown axis {unknown[0]!r}; the plan's axes are {sorted(names)}")
        chosen = Chosen(tuple([_chosen_of(axis, groups) for axis in self.axes]))
        if plain:
            _remember(self._choices, (*groups, *given), chosen, MOST_HELD)
        return chosen

    @cached_property
    def _axis_names(self) -> frozenset[str]:
        return frozenset(axis.name for axis in self.axes)

    @cached_property
    def _choices(self) -> dict[tuple[Any, ...], Chosen]:
        """Choices that were checked, by names and groups as they were given."""
        return {}

    def all_groups(self) -> dict[str, tuple[int, ...]]:
        """Return the choice of everything there is; with alternatives, that is no submodel."""
        return {axis.name: tuple(range(len(axis.groups))) for axis in self.axes}

    def full_groups(self) -> dict[str, tuple[int, ...]]:
        """Return the choice that is the whole model: all groups, of alternatives the last one."""
        return {
            axis.name: (axis.alternative(1.0),) if axis.alternatives else groups
            for axis, groups in zip(self.axes, self.all_groups().values(), strict=True)
        }

    @property
    def has_alternatives(self) -> bool:
        """True if there is an axis of alternatives: then no level lies within another."""
        return any(axis.alternatives for axis in self.axes)

    def levels(self, groups: Groups) -> dict[str, float]:
        """Return the share of units or blocks kept on every axis; 1 for alternatives."""
        kept = self.kept_atoms(self.choose(groups))
        return {
            axis.name: 1.0 if axis.alternatives else n / axis.atoms
            for axis, n in zip(self.axes, kept, strict=True)
        }

    def kept_atoms(self, chosen: Chosen) -> tuple[int, ...]:
        """Return the atoms left on every axis, in axis order."""
        return tuple(
            sum(axis.groups[g] for g in groups)
            for axis, groups in zip(self.axes, chosen, strict=True)
        )

    # -- slicing ----------------------------------------------------------------------------

    def cut(self, weights: Mapping[str, Array], groups: Groups) -> dict[str, Array]:
        """Cut out a submodel's weights: rows and columns of all other groups removed (copies)."""
        self.check(weights)
        return _cut(self.tensors, self.spans, weights, self.choose(groups), self._counts)

    def cut_buffers(self, buffers: Mapping[str, Array], groups: Groups) -> dict[str, Array]:
        """Cut out a submodel's buffers."""
        self.check_buffers(buffers)
        return _cut(self.buffers, self._buffer_spans, buffers, self.choose(groups), self._counts)

    def paste(self, target: Mapping[str, Array], part: Mapping[str, Array], groups: Groups) -> None:
        """Write a submodel's weights into their places in `target`, in place."""
        self.check(target)
        self.check(part, groups)
        chosen = self.choose(groups)
        for name, array in target.items():
            if not array.flags.writeable:
                raise TensorError(f"tensor {name!r} is read-only")
        for tensor, spans in zip(self.tensors, self.spans, strict=True):
            where = places(spans, per_dim(tensor, chosen, self._counts))
            target[tensor.name][where] = part[tensor.name]

    def places_within(self, groups: Groups, narrower: Groups) -> dict[str, Place]:
        """Return, for every weight and buffer, the place of a narrower submodel's part in the
        array of the submodel of `groups`. Raises `GroupError` unless the one is within the other.
        """
        own, inner = self.choose(groups), self.choose(narrower)
        for axis, outside, inside in zip(self.axes, own, inner, strict=True):
            if not set(inside) <= set(outside):
                raise GroupError(
                    f"axis {axis.name!r}: groups {list(inside)} are not all among {list(outside)}"
                )
        at = Chosen(tuple(map(_positions, own, inner)))
        pairs = (
            *zip(self.tensors, self.spans, strict=True),
            *zip(self.buffers, self._buffer_spans, strict=True),
        )
        kept = [len(each) for each in own]
        return {
            tensor.name: place(
                _keep(spans, per_dim(tensor, own, self._counts)), per_dim(tensor, at, kept)
            )
            for tensor, spans in pairs
        }

    def scatter(
        self, movement: Mapping[str, Array], groups: Groups, out: Float32 | None = None
    ) -> Blocks:
        """Turn a submodel's movement (or weights) into blocks. Inverse of `assemble`.

        `out`: the vector to write them to, as long as they are; None: a new one.
        """
        chosen = self.choose(groups)
        shaped, held = self._shaped(chosen), self.held(chosen)
        _check_arrays(self.tensors, shaped.shapes, movement)
        values = np.empty(held.parameters, dtype=np.float32) if out is None else out
        start = 0
        for tensor, spans, shape in zip(self.tensors, shaped.tensors, shaped.shapes, strict=True):
            end = start + prod(shape)
            pack(movement[tensor.name], spans, values[start:end])
            start = end
        return Blocks(held.ids, values)

    def assemble(self, blocks: Blocks, groups: Groups) -> dict[str, Float32]:
        """Assemble a submodel's arrays from its blocks. Inverse of `scatter`.

        The arrays lie in one piece of memory, which goes when the last of them does.
        """
        chosen = self.choose(groups)
        shaped = self._shaped(chosen)
        blocks.check(self.block_ids(chosen), self.block_sizes)
        arrays = arrays_in_one(
            {
                tensor.name: (shape, np.dtype(np.float32))
                for tensor, shape in zip(self.tensors, shaped.shapes, strict=True)
            }
        )[0]
        start = 0
        for tensor, spans, shape in zip(self.tensors, shaped.tensors, shaped.shapes, strict=True):
            end = start + prod(shape)
            unpack(blocks.values[start:end], spans, arrays[tensor.name])
            start = end
        return arrays

    def subtract(self, arrays: Mapping[str, Array], blocks: Blocks, groups: Groups) -> None:
        """Subtract a submodel's blocks from its arrays, which are contiguous, in place."""
        chosen = self.choose(groups)
        shaped = self._shaped(chosen)
        blocks.check(self.block_ids(chosen), self.block_sizes)
        _check_arrays(self.tensors, shaped.shapes, arrays)
        start = 0
        for tensor, spans, shape in zip(self.tensors, shaped.tensors, shaped.shapes, strict=True):
            end = start + prod(shape)
            subtract(blocks.values[start:end], spans, arrays[tensor.name])
            start = end

    def flatten(self, weights: Mapping[str, Array]) -> Float32:
        """Return the whole model as one vector in block order."""
        return self.scatter(weights, self.all_groups()).values

    def unflatten(self, flat: Float32) -> dict[str, Float32]:
        """Return the whole model's arrays from one vector in block order."""
        ids = np.arange(self.block_count, dtype=np.int64)
        return self.assemble(Blocks(ids, flat), self.all_groups())

    def select(self, flat: Float32, groups: Groups) -> Blocks:
        """Select the blocks of a submodel from the whole model's vector."""
        if flat.shape != (self.parameters,) or flat.dtype != np.float32:
            raise BlockError(
                f"{flat.dtype} of shape {flat.shape} is not the model's vector of "
                f"{self.parameters} float32 values"
            )
        return select_blocks(flat, self.block_ids(self.choose(groups)), self.block_offsets)

    def _shaped(self, chosen: Chosen) -> _Shaped:
        """Return the shapes of a submodel's arrays."""
        if (known := self._shapes.get(chosen)) is not None:
            return known
        tensors, buffers = (
            tuple(
                tuple(_keep(cuts, per_dim(tensor, chosen, self._counts)))
                for tensor, cuts in zip(arrays, spans, strict=True)
            )
            for arrays, spans in ((self.tensors, self.spans), (self.buffers, self._buffer_spans))
        )
        found = _Shaped(tensors, *map(_shapes_of, (tensors, buffers)))
        return _remember(self._shapes, chosen, found, MOST_SHAPED)

    @cached_property
    def _shapes(self) -> dict[Chosen, _Shaped]:
        return {}

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """Number of groups of every axis."""
        return tuple(len(axis.groups) for axis in self.axes)

    # -- blocks -----------------------------------------------------------------------------

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of every tensor's dimensions, in tensor order."""
        return tuple(spans_of(tensor, self.axes) for tensor in self.tensors)

    @cached_property
    def _buffer_spans(self) -> tuple[tuple[Span, ...], ...]:
        return tuple(spans_of(buffer, self.axes) for buffer in self.buffers)

    @cached_property
    def block_sizes(self) -> Indices:
        """Parameters of every block, in block order."""
        return np.concatenate([block_sizes(spans) for spans in self.spans])

    @cached_property
    def block_offsets(self) -> Indices:
        """Start of every block in the whole model's vector, with its end as last entry."""
        return np.concatenate(([0], np.cumsum(self.block_sizes))).astype(np.int64)

    @property
    def block_count(self) -> int:
        """Number of blocks."""
        return len(self.block_sizes)

    @cached_property
    def block_tensors(self) -> Indices:
        """Index of the tensor that every block belongs to."""
        return np.repeat(
            np.arange(len(self.tensors)), [len(block_sizes(spans)) for spans in self.spans]
        )

    def signature(self, block: int) -> tuple[tuple[str, int], ...]:
        """Return the (axis, group) pairs that own a block, in the order of its dimensions."""
        if not 0 <= block < self.block_count:
            raise GroupError(f"block {block} does not exist; the plan has {self.block_count}")
        index = int(self.block_tensors[block])
        runs = [dim.runs(self._counts) for dim in self.tensors[index].dims if not dim.whole]
        counts = [sum(count for _, count in along) for along in runs]
        first = int(np.searchsorted(self.block_tensors, index))
        numbers = np.unravel_index(block - first, counts) if counts else ()
        found = []
        for along, number in zip(runs, numbers, strict=True):
            owners = [(axis, group) for axis, count in along for group in range(count)]
            axis, group = owners[int(number)]
            if axis is not None:
                found.append((self.axes[axis].name, group))
        return tuple(found)

    def held(self, chosen: Chosen) -> HeldBlocks:
        """Return the blocks that the submodel of these groups holds."""
        if (known := self._held.get(chosen)) is not None:
            return known
        flags = self._find_held(chosen)
        ids = np.flatnonzero(flags).astype(np.int64)
        sizes = self.block_sizes[ids]
        for array in (flags, ids, sizes):
            array.flags.writeable = False
        each = flags.nbytes + 2 * 8 * len(flags)
        most = max(1, min(MOST_HELD, MOST_HELD_BYTES // each))
        return _remember(self._held, chosen, HeldBlocks(flags, ids, sizes, int(sizes.sum())), most)

    @cached_property
    def _held(self) -> dict[Chosen, HeldBlocks]:
        """Results of `held`: the devices of a round make few different choices."""
        return {}

    def covers(self, chosen: Chosen) -> NDArray[np.bool_]:
        """Flag the blocks that the submodel of these groups holds; the array is read-only."""
        return self.held(chosen).flags

    def _find_held(self, chosen: Chosen) -> NDArray[np.bool_]:
        member = []
        for axis, groups in zip(self.axes, chosen, strict=True):
            flags = np.zeros(len(axis.groups), dtype=bool)
            flags[list(groups)] = True
            member.append(flags)
        parts = []
        for tensor in self.tensors:
            held = np.ones((), dtype=bool)
            for dim in tensor.dims:
                if not dim.whole:
                    along = [
                        _ALWAYS if axis is None else member[axis]
                        for axis, _ in dim.runs(self._counts)
                    ]
                    held = np.logical_and.outer(held, np.concatenate(along))
            parts.append(held.reshape(-1))
        return np.concatenate(parts)

    def block_ids(self, chosen: Chosen) -> Indices:
        """Return the blocks of a submodel, ascending; the array is read-only."""
        return self.held(chosen).ids

    def coverage(self, choices: Iterable[Groups]) -> NDArray[np.int64]:
        """Count, for every block, the submodels that hold it (the papers' Γ)."""
        counts = np.zeros(self.block_count, dtype=np.int64)
        for groups in choices:
            counts += self.covers(self.choose(groups))
        return counts

    # -- costs ------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return int(self.block_offsets[-1])

    def submodel_parameters(self, groups: Groups) -> int:
        """Count the parameters of a submodel; four times as many bytes in fp32."""
        return self._parameters(self.kept_atoms(self.choose(groups)))

    def submodel_macs(self, groups: Groups) -> int:
        """Count the multiply-accumulates of a submodel's forward pass, per sample."""
        return self._macs(self.kept_atoms(self.choose(groups)))

    def cost_at(self, level: float) -> LevelCost:
        """Return the most a level can cost. Raises `GroupError` unless 0 < level ≤ 1."""
        if not 0 < level <= 1:
            raise GroupError(f"a level is a share in (0, 1], not {level!r}")
        kept = tuple(axis.atoms_at(level) for axis in self.axes)
        parameters = self._parameters(kept)
        return LevelCost(
            level, parameters, parameters / self.parameters, 4 * parameters, self._macs(kept)
        )

    def _parameters(self, kept: Sequence[int]) -> int:
        return sum(prod(dim.at(kept) for dim in tensor.dims) for tensor in self.tensors)

    def _macs(self, kept: Sequence[int]) -> int:
        return sum(term.macs * prod(kept[axis] for axis in term.axes) for term in self.macs)

    # -- names of the torch module ----------------------------------------------------------

    def stacked(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Stack arrays of the torch module, by its names, as the plan has them.

        Stacks that are there already stay. Raises `TensorError` where some blocks are missing, or
        differ in shape or type.
        """
        found = dict(arrays)
        for tensor in (*self.tensors, *self.buffers):
            rows = [found.pop(name) for name in tensor.members if name in found]
            if not rows:
                continue
            if missing := [name for name in tensor.members if name not in arrays]:
                raise TensorError(f"tensor {missing[0]!r} is missing")
            kinds = {(row.shape, row.dtype.name) for row in rows}
            if len(kinds) > 1:
                raise TensorError(
                    f"tensors {tensor.members[0]!r} to {tensor.members[-1]!r} differ in shape or "
                    f"type: {sorted(kinds)}"
                )
            found[tensor.name] = np.stack(rows)
        return found

    def unstacked(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return arrays by the names of the torch module; inverse of `stacked`.

        The blocks of a submodel are called as the first ones of the module, so that they fit a
        module with fewer blocks.
        """
        members = {each.name: each.members for each in (*self.tensors, *self.buffers)}
        found: dict[str, Array] = {}
        for name, array in arrays.items():
            rows = members.get(name, ())
            found |= dict(zip(rows, array, strict=False)) if rows else {name: array}
        return found

    # -- checking arrays --------------------------------------------------------------------

    def check(self, arrays: Mapping[str, Array], groups: Groups | None = None) -> None:
        """Raise `TensorError` unless these are the weights of the submodel (None: the model)."""
        chosen = self.choose(self.all_groups() if groups is None else groups)
        _check_arrays(self.tensors, self._shaped(chosen).shapes, arrays)

    def check_buffers(self, arrays: Mapping[str, Array], groups: Groups | None = None) -> None:
        """Raise `TensorError` unless these are the buffers of the submodel (None: the model)."""
        chosen = self.choose(self.all_groups() if groups is None else groups)
        _check_arrays(self.buffers, self._shaped(chosen).buffer_shapes, arrays)

    def check_statistics(self, arrays: Mapping[str, Array], groups: Groups) -> None:
        """Raise `TensorError` unless these are the statistics, and only they, of the submodel."""
        if not self.buffers and not arrays:
            return
        shapes = self._shaped(self.choose(groups)).buffer_shapes
        pairs = [
            (buffer, shape)
            for buffer, shape in zip(self.buffers, shapes, strict=True)
            if buffer.statistic
        ]
        _check_arrays([pair[0] for pair in pairs], [pair[1] for pair in pairs], arrays)


K = TypeVar("K")
V = TypeVar("V")


def _remember(known: dict[K, V], key: K, value: V, most: int) -> V:
    """Keep a value for the next call, and forget all others if they are too many."""
    if len(known) >= most:
        known.clear()
    known[key] = value
    return value


def _chosen_of(axis: Axis, groups: Groups) -> tuple[int, ...]:
    if axis.name not in groups:
        raise GroupError(f"no groups for axis {axis.name!r}; every axis needs at least one")
    ids = list(groups[axis.name])
    if set(map(type, ids)) == _WHOLE and min(ids) >= 0 and max(ids) < len(axis.groups):
        distinct = sorted(set(ids))
        if len(distinct) == len(ids):
            return tuple(distinct)
    if not ids:
        raise GroupError(f"axis {axis.name!r} has an empty set of groups; choose at least one")
    count = len(axis.groups)
    for group in ids:
        if isinstance(group, bool) or not isinstance(group, (int, np.integer)):
            raise GroupError(f"axis {axis.name!r}: group {group!r} is not a whole number")
        if not 0 <= group < count:
            raise GroupError(f"axis {axis.name!r} has groups 0 to {count - 1}, not {group}")
    if len(set(ids)) != len(ids):
        raise GroupError(f"axis {axis.name!r} names a group twice: {ids}")
    return tuple(sorted(int(group) for group in ids))


def spans_of(tensor: Tensor, axes: Sequence[Axis]) -> tuple[Span, ...]:
    """Return the spans of a tensor's or buffer's dimensions.

    Segments lie one after the other, so their groups are those of one dimension.
    """
    return tuple(_span(dim, axes) for dim in tensor.dims)


def _span(dim: Dim, axes: Sequence[Axis]) -> Span:
    if dim.axis is not None:
        return Span(dim.outer, axes[dim.axis].groups, dim.inner)
    if not dim.segments:
        return Span(dim.size, None, 1)
    groups: list[int] = []
    for segment in dim.segments:
        own = (segment.size,) if segment.axis is None else axes[segment.axis].groups
        groups += [atoms * segment.inner for atoms in own]
    return Span(1, tuple(groups), 1)


def per_dim(tensor: Tensor, chosen: Chosen, counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups chosen along every dimension; an axis has `counts` groups to choose of."""
    return [_along(dim, chosen, counts) for dim in tensor.dims]


def _along(dim: Dim, chosen: Chosen, counts: Sequence[int]) -> tuple[int, ...]:
    found: list[int] = []
    start = 0
    for axis, count in dim.runs(counts):
        found += [start + group for group in ((0,) if axis is None else chosen[axis])]
        start += count
    return tuple(found)


def _positions(own: Sequence[int], inner: Sequence[int]) -> tuple[int, ...]:
    """Return where the inner groups stand among the own ones."""
    return tuple(own.index(group) for group in inner)


def _keep(spans: Sequence[Span], chosen: Sequence[tuple[int, ...]]) -> list[Span]:
    return [span.keep(groups) for span, groups in zip(spans, chosen, strict=True)]


def _cut(
    tensors: Sequence[Tensor],
    spans: Sequence[tuple[Span, ...]],
    arrays: Mapping[str, Array],
    chosen: Chosen,
    counts: Sequence[int],
) -> dict[str, Array]:
    return {
        tensor.name: cut_array(arrays[tensor.name], cuts, per_dim(tensor, chosen, counts))
        for tensor, cuts in zip(tensors, spans, strict=True)
    }


def _shapes_of(arrays: Iterable[Iterable[Span]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(span.size for span in spans) for spans in arrays)


def _check_arrays(
    tensors: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], arrays: Mapping[str, Array]
) -> None:
    names = {tensor.name for tensor in tensors}
    if arrays.keys() != names:
        if unknown := sorted(set(arrays) - names):
            raise TensorError(f"unknown tensor {unknown[0]!r}; the plan has {sorted(names)}")
        raise TensorError(f"tensor {min(names - set(arrays))!r} is missing")
    for tensor, shape in zip(tensors, shapes, strict=True):
        array: Any = arrays[tensor.name]
        if not isinstance(array, np.ndarray):
            kind = type(array).__name__
            raise TensorError(f"tensor {tensor.name!r} is {kind}, not a numpy array")
        # Comparing types is quick, asking for a name is not.
        if array.dtype != tensor.dtype and array.dtype.name != tensor.dtype:
            kind = array.dtype.name
            raise TensorError(f"tensor {tensor.name!r} is {kind}; the plan says {tensor.dtype}")
        if array.shape != shape:
            raise TensorError(f"tensor {tensor.name!r} has shape {array.shape}, not {shape}")


def _check_plan(plan: ModelPlan) -> None:
    """Raise `PlanError` unless every part of the project can work with the plan."""
    if not plan.tensors:
        raise PlanError("a plan needs at least one tensor")
    for kind, names in (
        ("axis", [axis.name for axis in plan.axes]),
        ("tensor", [n for t in (*plan.tensors, *plan.buffers) for n in (t.name, *t.members)]),
    ):
        if twice := [name for name, uses in Counter(names).items() if uses > 1]:
            raise PlanError(f"{kind} name {min(twice)!r} is used twice")
    for axis in plan.axes:
        if not 1 <= len(axis.groups) <= MAX_GROUPS:
            raise PlanError(
                f"axis {axis.name!r} has {len(axis.groups)} groups; 1 to {MAX_GROUPS} are allowed"
            )
        if min(axis.groups) < 1:
            raise PlanError(f"axis {axis.name!r} has a group without atoms")
        if axis.atoms > MAX_ATOMS:
            raise PlanError(f"axis {axis.name!r} has {axis.atoms} atoms; at most {MAX_ATOMS}")
    for tensor in plan.tensors:
        if tensor.dtype != "float32":
            raise PlanError(
                f"weight {tensor.name!r} is {tensor.dtype}; weights are float32: "
                "convert the model with .float()"
            )
    for buffer in plan.buffers:
        if buffer.dtype not in BUFFER_DTYPES:
            raise PlanError(f"buffer {buffer.name!r} is {buffer.dtype}, not a plain number type")
    for tensor in (*plan.tensors, *plan.buffers):
        if len(tensor.dims) > MAX_DIMS:
            raise PlanError(
                f"tensor {tensor.name!r} has {len(tensor.dims)} dimensions; "
                f"at most {MAX_DIMS} are allowed"
            )
        for dim in tensor.dims:
            check_dim(tensor.name, dim, plan.axes)
        check_stack(tensor, plan.axes)
    _check_depth(plan)
    _check_sizes(plan)
    for term in plan.macs:
        if term.macs < 0 or any(not 0 <= axis < len(plan.axes) for axis in term.axes):
            raise PlanError(f"cost term {term} does not fit the plan's {len(plan.axes)} axes")


def _check_depth(plan: ModelPlan) -> None:
    """Raise `PlanError` unless every axis of depth has a weight, and groups of equal size."""
    used = {tensor.dims[0].axis for tensor in plan.tensors if tensor.members}
    for number, axis in enumerate(plan.axes):
        if axis.depth and (axis.alternatives or len(set(axis.groups)) > 1):
            raise PlanError(f"axis {axis.name!r} is of depth: its groups are equal, and no choices")
        if axis.depth and number not in used:
            raise PlanError(f"axis {axis.name!r} is of depth, but no weight is stacked along it")


def _check_sizes(plan: ModelPlan) -> None:
    """Raise `PlanError` for a plan that no machine could hold, before anything is allocated."""
    parameters = sum(prod(tensor.shape) for tensor in (*plan.tensors, *plan.buffers))
    if parameters > MAX_PARAMETERS:
        raise PlanError(f"too many parameters: {parameters}; at most {MAX_PARAMETERS} are allowed")
    counts = [len(axis.groups) for axis in plan.axes]
    blocks = sum(
        prod(dim.groups(counts) for dim in tensor.dims if not dim.whole) for tensor in plan.tensors
    )
    if blocks > MAX_BLOCKS:
        raise PlanError(f"too many blocks: {blocks}; at most {MAX_BLOCKS} are allowed")
