"""Mask policies: which groups each device trains (docs/algorithms.md).

A policy is a small frozen value with options. Called with a `Situation`, it chooses groups for
every offering device. It never assigns more than a device offered, but at least one group per axis.
A new policy is one file and one line in `MASKS`; a policy of one's own is a file beside the run's.
"""

from __future__ import annotations

from typing import Any

from coordinator.masks.contract import MaskPolicy, Masks, MeasuringMasks, OrderedMasks
from coordinator.masks.groups.fragments import fragments_of
from coordinator.masks.levels import Narrower, level_choices, level_groups, settle_masks
from coordinator.masks.own import is_reference, make_own, try_masks
from coordinator.masks.policies.coverage import CoverageMasks
from coordinator.masks.policies.disjoint import DisjointMasks
from coordinator.masks.policies.gre_raa import GreRaaMasks
from coordinator.masks.policies.greedy import GreedyMasks
from coordinator.masks.policies.nested import CoreMasks, NestedMasks
from coordinator.masks.policies.prunefl import PruneFlMasks
from coordinator.masks.policies.random import RandomMasks
from coordinator.masks.policies.rolling import RollingMasks
from coordinator.masks.policies.static import StaticMasks
from coordinator.masks.policies.studies.periodic import PeriodicMasks
from coordinator.masks.policies.studies.places import PlacesMasks
from coordinator.masks.policies.studies.scheduled import ScheduledMasks
from coordinator.masks.situation import Situation
from edge_sdk.program.settings.choices import make_named
from edge_sdk.protocol.plan.plan import ModelPlan

__all__ = [
    "MASKS",
    "MaskPolicy",
    "Masks",
    "MeasuringMasks",
    "Narrower",
    "OrderedMasks",
    "Situation",
    "check_masks",
    "fragments_of",
    "level_choices",
    "level_groups",
    "make_masks",
    "masks_name",
    "settle_masks",
]

MASKS: dict[str, type[MaskPolicy]] = {
    "random": RandomMasks,
    "rolling": RollingMasks,
    "static": StaticMasks,
    "nested": NestedMasks,
    "core": CoreMasks,
    "greedy": GreedyMasks,
    "coverage": CoverageMasks,
    "prunefl": PruneFlMasks,
    "disjoint": DisjointMasks,
    "gre-raa": GreRaaMasks,
    "periodic": PeriodicMasks,
    "places": PlacesMasks,
    "scheduled": ScheduledMasks,
}
"""Policies by name. The first line of each docstring describes the policy."""


def make_masks(name: str, **options: Any) -> MaskPolicy:
    """Make the policy called `name`. Raises `ConfigError` for an unknown name or option.

    `file.py:Class` and `package.module:Class` name a policy of one's own (`own.py`).
    """
    if is_reference(name):
        return make_own(name, options)
    return make_named("mask policy", MASKS, name, options)


def masks_name(masks: MaskPolicy) -> str:
    """Return the name a policy is registered under, or that of its class."""
    found = next((name for name, kind in MASKS.items() if type(masks) is kind), None)
    return type(masks).__name__ if found is None else found


def check_masks(masks: MaskPolicy, plan: ModelPlan) -> None:
    """Raise `ConfigError` if a policy of one's own does not keep to the contract on this plan."""
    if type(masks) not in MASKS.values():
        try_masks(masks, plan, type(masks).__name__)
