"""Levels as submodels: the groups that a level means, and those that lie within others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.masks.contract import MaskPolicy, OrderedMasks
from coordinator.masks.policies.nested import NestedMasks
from edge_sdk.protocol.plan.plan import ModelPlan

Submodel = Mapping[str, tuple[int, ...]]
"""Groups per axis."""


def level_groups(masks: MaskPolicy, plan: ModelPlan, level: float) -> dict[str, tuple[int, ...]]:
    """Return the groups that stand for a level of the model, for evaluation and export.

    Those of the policy's order (for `core` the order of the first round), or leading groups if it
    has none. Raises `ConfigError` if the order is not known yet (`settle_masks`).
    """
    ordered = masks if isinstance(masks, OrderedMasks) else NestedMasks()
    return ordered.groups_at(plan, level)


def level_choices(
    masks: MaskPolicy, plan: ModelPlan, levels: Sequence[float]
) -> dict[float, dict[str, tuple[int, ...]]]:
    """Return the groups of every level, largest first; one of several that mean the same groups."""
    found: dict[float, dict[str, tuple[int, ...]]] = {}
    for level in levels:
        groups = level_groups(masks, plan, level)
        if groups not in found.values():
            found[level] = groups
    return found


def settle_masks(
    masks: MaskPolicy, plan: ModelPlan, norms: Callable[[], NDArray[np.float64]]
) -> MaskPolicy:
    """Return the policy with its order settled for a run; most policies stay as they are.

    `norms` gives, per block, the squared norm of the weights the run starts with. It is called only
    if needed.
    """
    if isinstance(masks, NestedMasks) and masks.order == "importance" and masks.ranked is None:
        return masks.rank(plan, norms())
    return masks


@dataclass(frozen=True, slots=True)
class Narrower:
    """The narrower submodels of assignments in one round."""

    submodels: Sequence[Submodel]
    """Those of the run's levels, largest first; empty if devices train their own width only."""
    _known: dict[tuple[tuple[int, ...], ...], tuple[Submodel, ...]] = field(default_factory=dict)

    def within(self, groups: Submodel) -> tuple[Submodel, ...]:
        """Return the distinct ones that are part of this submodel, and not all of it."""
        key = tuple(groups.values())
        if key not in self._known:
            found: list[Submodel] = []
            for each in self.submodels:
                inside = all(set(ids) <= set(groups[axis]) for axis, ids in each.items())
                if inside and each != groups and each not in found:
                    found.append(each)
            self._known[key] = tuple(found)
        return self._known[key]
