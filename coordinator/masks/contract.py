"""The interface of every mask policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan

Masks = dict[str, dict[str, tuple[int, ...]]]
"""Groups per axis for every device: device name → axis name → groups, ascending."""


class MaskPolicy(Protocol):
    """Chooses groups for all devices that offered a level.

    Laws (tests/property/plan/test_mask_laws.py): every offering device gets at least one group of
    every axis and never more than it offered (`bundles.py`); the same situation gives the same
    answer; with `tied`, all axes with as many groups as the widest get the same groups. A policy
    is a frozen value: it remembers nothing between rounds.
    """

    uses_norms: ClassVar[bool]
    """True if the policy reads `Situation.norms`."""

    def __call__(self, situation: Situation) -> Masks:
        """Choose groups per axis for every offering device, in the order of the offers.

        Raises `ConfigError` if the plan's groups do not suit the policy.
        """

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """The most rounds in a row that any block can stay uncovered; None if there is no bound.

        Holds when devices that offer `levels` take part in every round from the first on, and all
        their movements count. 0 means that every round covers every block. Of alternatives, only
        those of some level are trained, and only its groups: there the bound holds for all other
        blocks. Each policy's docstring has the proof. Raises `ConfigError` as a call would.
        """


@runtime_checkable
class OrderedMasks(MaskPolicy, Protocol):
    """A policy by which a level means the same groups for every device.

    Where it `nests`, the groups of a level lie within those of every larger level, in every round.
    """

    def groups_at(
        self, plan: ModelPlan, level: float, round: int = 1
    ) -> dict[str, tuple[int, ...]]:
        """Return the groups, per axis, that a device with this level gets in a round.

        Raises `ConfigError` as a call would.
        """

    def nests(self, plan: ModelPlan) -> bool:
        """True if the groups of a level lie within those of every larger level."""


@runtime_checkable
class MeasuringMasks(MaskPolicy, Protocol):
    """A policy that measures, in some rounds, how important blocks are to training.

    In such a round, devices are asked for the whole model. One that cannot afford it offers what it
    can. `Situation.importance` then holds the result until the next measurement.
    """

    def measures(self, round: int) -> bool:
        """True if this round measures."""
