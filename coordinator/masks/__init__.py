"""Mask policies: which groups each device trains (docs/algorithms.md).

A policy is a small frozen value with options. Called with a `Situation`, it chooses groups for
every offering device. It never assigns more than a device offered, but at least one group per axis.
A new policy is one file and one line in `MASKS`.
"""

from __future__ import annotations

from typing import Any

from coordinator.masks.contract import MaskPolicy, Masks, MeasuringMasks, OrderedMasks
from coordinator.masks.groups.fragments import fragments_of
from coordinator.masks.levels import Narrower, level_choices, level_groups, settle_masks
from coordinator.masks.policies.coverage import CoverageMasks
from coordinator.masks.policies.disjoint import DisjointMasks
from coordinator.masks.policies.gre_raa import GreRaaMasks
from coordinator.masks.policies.greedy import GreedyMasks
from coordinator.masks.policies.nested import CoreMasks, NestedMasks
from coordinator.masks.policies.prunefl import PruneFlMasks
from coordinator.masks.policies.random import RandomMasks
from coordinator.masks.policies.rolling import RollingMasks
from coordinator.masks.policies.static import StaticMasks
from coordinator.masks.situation import Situation
from edge_sdk.program.settings.choices import make_named

__all__ = [
    "MASKS",
    "MaskPolicy",
    "Masks",
    "MeasuringMasks",
    "Narrower",
    "OrderedMasks",
    "Situation",
    "fragments_of",
    "level_choices",
    "level_groups",
    "make_masks",
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
}
"""Policies by name. The first line of each docstring describes the policy."""


def make_masks(name: str, **options: Any) -> MaskPolicy:
    """Make the policy called `name`. Raises `ConfigError` for an unknown name or option."""
    return make_named("mask policy", MASKS, name, options)
