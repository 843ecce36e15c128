"""The packs of a plan: blocks of one signature, over all tensors, and parts of buffers.

A signature is the set of (axis, group) pairs that own a block: a submodel holds the block if it
has all of them. Buffers are cut like weights, into *parts*, numbered in the order of the plan; a
part is in the pack of its signature. Constants (buffers that are not statistics) have separate
packs because they do not change: a device fetches their chunks once and keeps them in its cache.

Packs are ordered by their lowest block; those without blocks follow, by their lowest part.
Plans have tens of thousands of blocks, so no code here loops over them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.encoding.codec import part_specs
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.plan.layout import Indices, block_sizes
from edge_sdk.protocol.plan.plan import Chosen, ModelPlan, spans_of
from edge_sdk.protocol.plan.specs import MAX_BLOCKS, Buffer, Tensor

Signatures = NDArray[np.int32]
"""One row each: the numbers of its groups, ascending, zeros in front. Group `g` of an axis has the
number 1 + g + all groups of the axes before."""


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """The packs of a plan. Made by `find_packs`."""

    signatures: Signatures
    """Signature of every pack."""
    blocks: list[Indices]
    """The blocks of every pack, ascending."""
    parts: list[Indices]
    """The parts of buffers in every pack, ascending."""
    pack_of_block: Indices
    pack_of_part: Indices
    part_signatures: Signatures
    part_sizes: Indices
    """Bytes of every part of a buffer."""

    def __len__(self) -> int:
        return len(self.signatures)

    def of_submodel(self, plan: ModelPlan, chosen: Chosen) -> list[int]:
        """Return the packs that a submodel needs, ascending."""
        numbers: list[int] = np.flatnonzero(_held(self.signatures, plan, chosen)).tolist()
        return numbers

    def parts_of_submodel(self, plan: ModelPlan, chosen: Chosen) -> Indices:
        """Return the parts of buffers that a submodel needs, ascending."""
        return np.flatnonzero(_held(self.part_signatures, plan, chosen)).astype(np.int64)

    def sizes(self, plan: ModelPlan, encoding: Encoding) -> tuple[int, ...]:
        """Return the bytes of every pack; an upper bound with zstd."""
        specs = part_specs(plan.block_sizes, encoding)
        of_block = sum(spec.dtype.itemsize * spec.counts for spec in specs)
        sizes = np.bincount(self.pack_of_block, weights=of_block, minlength=len(self))
        sizes += np.bincount(self.pack_of_part, weights=self.part_sizes, minlength=len(self))
        return tuple(int(size) for size in sizes)  # float64 sums are exact below 2⁵³


@lru_cache(maxsize=4)
def find_packs(plan: ModelPlan) -> Packs:
    """Return the packs of a plan. Raises `MessageError` if buffers are cut too finely."""
    in_parts = sum(prod(_group_counts(plan, buffer)) for buffer in plan.buffers)
    if in_parts > MAX_BLOCKS:
        raise MessageError(f"buffers in {in_parts} parts; at most {MAX_BLOCKS} are allowed")
    everything = [*plan.tensors, *plan.buffers]
    width = max(1, *(len(_group_counts(plan, tensor)) for tensor in everything))
    rows = [_signatures(plan, tensor, width) for tensor in everything]
    signatures = np.concatenate(rows)
    constant = np.repeat(
        [isinstance(tensor, Buffer) and not tensor.statistic for tensor in everything],
        [len(each) for each in rows],
    )
    first, pack_of = _numbered([*signatures.T, constant])
    sizes = [
        block_sizes(spans_of(buffer, plan.axes)) * np.dtype(buffer.dtype).itemsize
        for buffer in plan.buffers
    ]
    at = plan.block_count
    return Packs(
        signatures=signatures[first],
        blocks=_members(pack_of[:at], len(first)),
        parts=_members(pack_of[at:], len(first)),
        pack_of_block=pack_of[:at],
        pack_of_part=pack_of[at:],
        part_signatures=signatures[at:],
        part_sizes=np.concatenate([np.zeros(0, dtype=np.int64), *sizes]),
    )


def _group_counts(plan: ModelPlan, tensor: Tensor) -> list[int]:
    counts = [len(axis.groups) for axis in plan.axes]
    return [dim.groups(counts) for dim in tensor.dims if not dim.whole]


def _signatures(plan: ModelPlan, tensor: Tensor, width: int) -> Signatures:
    """Return the signature of every block of a tensor, or part of a buffer, in order."""
    counts = [len(axis.groups) for axis in plan.axes]
    before = np.cumsum([0, *counts])
    shape = _group_counts(plan, tensor)
    rows = np.zeros((prod(shape), width), dtype=np.int32)
    cut = [dim for dim in tensor.dims if not dim.whole]
    for column, (dim, group) in enumerate(zip(cut, np.indices(shape), strict=True)):
        # A whole segment belongs to every submodel: no group owns it.
        owners = np.concatenate(
            [
                np.zeros(1) if axis is None else 1 + before[axis] + np.arange(count)
                for axis, count in dim.runs(counts)
            ]
        )
        rows[:, column] = owners[group.reshape(-1)]
    rows.sort(axis=1)
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = 0  # an axis may occur twice
    rows.sort(axis=1)
    return rows


def _numbered(columns: Sequence[NDArray[Any]]) -> tuple[Indices, Indices]:
    """Number the distinct rows in order of first appearance.

    Returns the first row of every number, and the number of every row. It works column by column
    and so sorts numbers: sorting rows takes far longer.
    """
    keys = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        keys = np.unique(keys * (int(column.max()) + 1) + column, return_inverse=True)[1]
    _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order].astype(np.int64), rank[numbers].astype(np.int64)


def _members(pack_of: Indices, packs: int) -> list[Indices]:
    """Return the members of every pack, ascending."""
    order = np.argsort(pack_of, kind="stable").astype(np.int64)
    ends = np.cumsum(np.bincount(pack_of, minlength=packs))
    return np.split(order, ends[:-1])


def _held(signatures: Signatures, plan: ModelPlan, chosen: Chosen) -> NDArray[np.bool_]:
    """Flag the signatures whose groups a submodel has all of."""
    member = [np.ones(1, dtype=bool)]  # number 0: no group at all
    for axis, groups in zip(plan.axes, chosen, strict=True):
        member.append(np.isin(np.arange(len(axis.groups)), groups))
    held: NDArray[np.bool_] = np.logical_and.reduce(np.concatenate(member)[signatures], axis=1)
    return held
