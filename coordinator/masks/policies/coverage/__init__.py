"""`coverage`: the optimised runs of Every Parameter Matters. `goal.py` defines the goal."""

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

    Small fleets get an optimal choice (`exact.py`), others a good one (`search.py`) that is never
    worse than the `random` policy's draw from the same stream. `goal.py` defines the order of the
    four steps.
    """

    uses_norms: ClassVar[bool] = True

    tied: bool = False

    def __call__(self, situation: Situation) -> Masks:
        """See `MaskPolicy`. Without norms, the last step is skipped."""
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
            device: spread(plan, bundles, choice, level)
            for (device, level), choice in zip(levels.items(), choices, strict=True)
        }

    def longest_gap(self, plan: ModelPlan, levels: Sequence[float]) -> int | None:
        """`⌈n / V⌉ − 1` with `n` cells and devices that can hold any `V` of them together.

        Blocks of one cell share their groups and are covered together. A device that has any `k`
        groups of every bundle can hold any `k` cells at once (`sure_cells`); `V` is the sum of `k`.
        None if `V` is 0: there may be a block that no device can hold.

        Proof. Let `U` be the cells not covered since some round. They have waited longer than all
        others, so step 1 of the goal looks at them first. Dealing out cells, longest wait and most
        blocks first, covers all cells that have waited longer than some age, and of this age the
        `v` with the most blocks, `V` cells together. The actual choice is not worse in step 1: it
        also covers all older cells, and of this age at least as many blocks as those `v` hold,
        which takes at least `v` cells. So `U` shrinks by `V` per round or to nothing, and is empty
        after `⌈n / V⌉` rounds, the last of which covers its last cell.
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
