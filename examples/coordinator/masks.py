"""A mask policy of your own: `[mask] name = "masks.py:Striped"` in run.toml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coordinator import Situation
from edge_sdk import ModelPlan


@dataclass(frozen=True, kw_only=True)
class Striped:
    """Groups that are `stride` apart, beginning one later in every round."""

    uses_norms: ClassVar[bool] = False

    stride: int = 2

    def __call__(self, situation: Situation) -> dict[str, dict[str, tuple[int, ...]]]:
        """Choose groups per axis for every offering device."""
        return {
            device: {
                axis.name: self._pick(len(axis.groups), axis.wanted(level), situation.round)
                for axis in situation.plan.axes
            }
            for device, level in situation.levels.items()
        }

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if a device trains every group in every round, else no bound that is known."""
        for level in levels:
            if all(axis.wanted(level) == len(axis.groups) for axis in plan.axes):
                return 0
        return None

    def _pick(self, groups: int, wanted: int, round: int) -> tuple[int, ...]:
        order = sorted(range(groups), key=lambda group: ((group + round) % self.stride, group))
        return tuple(sorted(order[:wanted]))
