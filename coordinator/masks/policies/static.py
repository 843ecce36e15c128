"""`static`: leading groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import Bundle, bundles_of, choose_each
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMasks:
    """Leading groups, the same in every round (HeteroFL: `tied`, at rescale 1).

    Where axes are cut alike, tied and untied are the same choice; `tied` insists on it.
    """

    uses_norms: ClassVar[bool] = False

    tied: bool = False

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`."""
        bundles = bundles_of(situation.plan, self.tied)
        return choose_each(situation.plan, bundles, situation.levels, _leading)

    def groups_at(
        self,
        plan: ModelPlan,
        level: float,
        round: int = 1,  # noqa: ARG002  all rounds are alike
    ) -> dict[str, tuple[int, ...]]:
        """See `OrderedMasks`."""
        return choose_each(plan, bundles_of(plan, self.tied), {"": level}, _leading)[""]

    def nests(self, plan: ModelPlan) -> bool:
        """True if groups of different sizes ascend: then no group fits behind one that does not."""
        if plan.has_alternatives:
            return False
        bundles = bundles_of(plan, self.tied)
        uneven = [axis for bundle in bundles for axis in bundle.uneven]
        return all(list(axis.groups) == sorted(axis.groups) for axis in uneven)

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """0 if the devices' sets together cover every block, else None.

        All rounds are alike: a block is covered in every round or never.
        """
        bundles = bundles_of(plan, self.tied)
        names = {str(number): level for number, level in enumerate(sorted(set(levels)))}
        choices = choose_each(plan, bundles, names, _leading)
        return 0 if plan.coverage(choices.values()).min() > 0 else None


def _leading(_device: str, level: float, _number: int, bundle: Bundle) -> tuple[int, ...]:
    return bundle.take(level, range(bundle.count))
