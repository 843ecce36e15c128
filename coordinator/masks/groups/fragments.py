"""Fragments: the model cut into parts that are trained one at a time (Fed-RAA).

- `alternate`: one group of every split axis and all groups of the others. No block has two split
  axes (`splitting.py`), so every parameter is in exactly one fragment or in all.
- `rotating`: one group of every axis. Which groups go together is drawn anew every time (IST).
- `tied`: group `j` of every axis. Blocks between different groups are in no fragment.

A device gets a fragment within its level. Where a fragment has all groups of an axis, a device with
a lower level gets some of them, drawn at random.

On an axis with fewer atoms than there are fragments, several fragments share a group if they are
`rotating` or `tied`; if they `alternate`, such an axis stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.groups.bundles import Bundle, bundles_of
from coordinator.masks.groups.splitting import split_axes
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Tensor

FragmentKind = Literal["alternate", "rotating", "tied"]

Fragment = dict[str, tuple[int, ...]]
"""Groups per axis."""


def fragments_of(plan: ModelPlan, kind: FragmentKind = "alternate") -> tuple[Fragment, ...]:
    """Return the fragments of a model, smallest first if groups differ in size and alternate.

    One fragment if no axis is split. Those that rotate are the ones before the first draw. Raises
    `ConfigError` if the axes cannot be tied (`bundles.py`).
    """
    if kind == "alternate":
        split = split_axes(plan)
        count = len(plan.axes[split[0]].groups) if split else 1
        orders = {plan.axes[number].name: ascending(plan.axes[number]) for number in split}
        whole = plan.full_groups()
        return tuple(
            whole | {name: (order[each],) for name, order in orders.items()}
            for each in range(count)
        )
    if kind == "tied":
        bundles_of(plan, tied=True)
    free = [axis for axis in plan.axes if not axis.alternatives]
    return _dealt(plan, {axis.name: range(len(axis.groups)) for axis in free}, 1.0)


def fragments_within(
    plan: ModelPlan, kind: FragmentKind, level: float, stream: np.random.Generator
) -> dict[int, Fragment]:
    """Return the fragments that a device with this level may train, at least one, by number.

    Numbers are the places in `fragments_of`; of rotating ones, those in this draw. Draws from the
    stream only what is left to chance. Raises as `fragments_of`.
    """
    if kind == "rotating":
        orders = {}
        for bundle in bundles_of(plan, tied=False):
            fitting = _fitting(bundle, level)
            orders[bundle.axes[0].name] = stream.permutation(fitting).tolist()
        return dict(enumerate(_dealt(plan, orders, level)))
    found = fragments_of(plan, kind)
    if kind == "tied":
        limits = [bundle for bundle in bundles_of(plan, tied=True) if bundle.count == len(found)]
        fitting = [j for j in range(len(found)) if all(each.fill(level, [j]) for each in limits)]
        return {j: found[j] for j in fitting or [each.smallest for each in limits]}
    split, alone = set(split_axes(plan)), bundles_of(plan, tied=False)
    narrowed: Fragment = {
        axis.name: (axis.alternative(level),) for axis in plan.axes if axis.alternatives
    }
    for bundle in alone:
        if bundle.numbers[0] not in split and bundle.surely(level) < bundle.count:
            order = stream.permutation(bundle.count).tolist()
            narrowed[bundle.axes[0].name] = bundle.take(level, order)
    cut = [bundle for bundle in alone if bundle.numbers[0] in split]
    fits = [j for j, each in enumerate(found) if all(_holds(axis, level, each) for axis in cut)]
    return {j: found[j] | narrowed for j in fits or [0]}


def never_trained(plan: ModelPlan, kind: FragmentKind) -> NDArray[np.bool_]:
    """Flag the blocks that no fragment ever holds. Raises as `fragments_of`."""
    if kind != "rotating":
        uncovered: NDArray[np.bool_] = plan.coverage(fragments_of(plan, kind)) == 0
        return uncovered
    counts = [len(axis.groups) for axis in plan.axes]
    return np.concatenate([_between(tensor, counts) for tensor in plan.tensors])


@lru_cache(maxsize=16)
def own_blocks(plan: ModelPlan, kind: FragmentKind) -> tuple[Indices, ...]:
    """Return, for every fragment, the blocks that no other fragment holds."""
    held = np.stack([plan.covers(plan.choose(each)) for each in fragments_of(plan, kind)])
    return tuple(np.flatnonzero(own).astype(np.int64) for own in held & (held.sum(axis=0) == 1))


def ascending(axis: Axis) -> Sequence[int]:
    """Return the groups of an axis in the order of fragments that alternate."""
    groups = range(len(axis.groups))
    return groups if axis.equal else sorted(groups, key=lambda group: axis.groups[group])


def _dealt(plan: ModelPlan, orders: dict[str, Sequence[int]], level: float) -> tuple[Fragment, ...]:
    """Give every fragment one group of each axis, in these orders."""
    count = max((len(order) for order in orders.values()), default=1)
    alternatives = {
        axis.name: (axis.alternative(level),) for axis in plan.axes if axis.alternatives
    }
    return tuple(
        {
            axis.name: alternatives.get(axis.name)
            or (orders[axis.name][each * len(orders[axis.name]) // count],)
            for axis in plan.axes
        }
        for each in range(count)
    )


def _fitting(bundle: Bundle, level: float) -> list[int]:
    """Return the groups that fit within a level; the smallest ones if none does."""
    fitting = [group for group in range(bundle.count) if bundle.fill(level, [group])]
    sizes = bundle.axes[0].groups
    return fitting or [group for group, atoms in enumerate(sizes) if atoms == min(sizes)]


def _holds(bundle: Bundle, level: float, fragment: Fragment) -> bool:
    return bool(bundle.fill(level, fragment[bundle.axes[0].name]))


def _between(tensor: Tensor, counts: Sequence[int]) -> NDArray[np.bool_]:
    """Flag the blocks of a tensor that two different groups of one axis own."""
    along = [
        [(axis, group) for axis, count in dim.runs(counts) for group in range(count)]
        for dim in tensor.dims
        if not dim.whole
    ]
    flags = np.zeros([len(owners) for owners in along], dtype=bool)
    for one in range(len(along)):
        for other in range(one + 1, len(along)):
            apart = np.array(
                [
                    [a is not None and a == b and g != h for b, h in along[other]]
                    for a, g in along[one]
                ]
            )
            shape = [1] * len(along)
            shape[one], shape[other] = apart.shape
            flags |= apart.reshape(shape)
    return flags.reshape(-1)
