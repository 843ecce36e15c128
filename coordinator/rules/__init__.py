"""Server rules: how movements become a movement of the global model (docs/algorithms.md).

A synchronous rule is a pure function of the plan and the counted movements, in device-name order;
it returns the movement of the whole model as a vector in block order. A new rule is one file and
one line in `RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coordinator.rules.ra_fed import ra_fed
from edge_sdk.protocol.blocks import Float32
from edge_sdk.protocol.messages import Movement
from edge_sdk.protocol.plan import ModelPlan

__all__ = ["RULES", "Rule"]


class Rule(Protocol):
    """Movements in, movement of the global model out."""

    def __call__(self, plan: ModelPlan, movements: Sequence[Movement]) -> Float32:
        """The movement of the whole model, in block order."""


RULES: dict[str, Rule] = {"ra-fed": ra_fed}
