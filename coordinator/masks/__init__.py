"""Mask policies: which groups each device trains (docs/algorithms.md).

A policy is a pure function of the plan, the offers in device-name order, and a random stream. It
never hands out more than a device offered, but at least one group an axis. A new policy is one
file and one line in `MASKS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from coordinator.masks.random import random_masks
from edge_sdk.protocol.messages import Bid
from edge_sdk.protocol.plan import ModelPlan

__all__ = ["MASKS", "MaskPolicy"]


class MaskPolicy(Protocol):
    """Chooses groups for all devices that offered a level."""

    def __call__(
        self, plan: ModelPlan, offers: Sequence[Bid], stream: np.random.Generator
    ) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Groups per axis for every offering device, by device name."""


MASKS: dict[str, MaskPolicy] = {"random": random_masks}
