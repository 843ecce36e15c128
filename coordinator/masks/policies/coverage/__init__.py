"""`coverage`: the optimised runs of Every Parameter Matters. `goal.py` says what is optimised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coordinator.masks.contract import Masks
from coordinator.masks.groups.bundles import bundles_of, holds_all, spread
from coordinator.masks.groups.cells import cells_of
from coordinator.masks.policies.coverage.exact import best_choices
from coordinator.masks.policies.coverage.goal import make_goal
from coordinator.masks.policies.coverage.search import search_choices, sure_cells
from coordinator.masks.situation import Situation
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageMasks:
    """Longest uncovered first, then few uncovered, then even coverage, then large norms (OAP).

    Small fleets get a best choice of all (`exact.py`), others a good one (`search.py`): never worse
    than what `random` draws from the same stream. The order of the four steps is in `goal.py`.
    """

    uses_norms: ClassVar[bool] = True

    tied: bool = False

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`. Without norms the last step is left out."""
        plan, levels = situation.plan, situation.levels
        if not levels:
            return {}
        bundles = bundles_of(plan, self.tied)
        offered = list(levels.values())
        drawn = [
            tuple(
                bundle.take(level, situation.stream.permutation(bundle.count).tolist())
                for bundle in bundles
            )
            for level in offered
        ]
        goal = make_goal(cells_of(plan, bundles), situation.last_covered, situation.norms)
        choices = best_choices(goal, bundles, offered, situation.stream)
        if choices is None:
            choices = search_choices(goal, bundles, offered, drawn, situation.stream)
        return {
            device: spread(plan, bundles, choice)
            for device, choice in zip(levels, choices, strict=True)
        }

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """`⌈n / V⌉ − 1` with `n` cells and devices that can hold any `V` of them together.

        Blocks of one cell share their groups and are covered together. A device that has any `k`
        groups of every bundle can hold any `k` cells at once (`sure_cells`); `V` is the sum of `k`.
        None if it is 0: there may be a block that nobody can hold.

        Proof. Let `U` be the cells not covered since some round. They waited longer than all
        others, so step 1 of the goal looks at them first. Dealing out cells, longest wait and most
        blocks first, covers all cells that waited longer than some age, and of this age the `v`
        with most blocks, `V` cells together. The choice made is not worse in step 1: it covers all
        older ones too, and of this age at least as many blocks as those `v` hold, which no fewer
        than `v` cells do. So `U` shrinks by `V` a round or to nothing, and is empty after `⌈n / V⌉`
        rounds, in the last of which its last cell is covered.
        """
        bundles = bundles_of(plan, self.tied)
        if any(holds_all(bundles, level) for level in levels):
            return 0
        cells = cells_of(plan, bundles)
        sure = sum(sure_cells(cells, bundles, level) for level in levels)
        if not sure:
            return None
        count = sum(
            int((cells.blocks[table.cells] > 0).sum()) for table in cells.tables if table.bundles
        )
        return max(0, -(-count // sure) - 1)
