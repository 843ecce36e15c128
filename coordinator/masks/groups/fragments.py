"""Fragments: the model cut into parts that are trained one at a time (Fed-RAA).

Fragment `j` is group `j` of every axis. On an axis with fewer atoms than there are fragments,
neighbouring fragments share a group. Blocks without a width axis are in every fragment; blocks
between different groups are in none.
"""

from __future__ import annotations

from coordinator.masks.groups.bundles import bundles_of
from edge_sdk.protocol.plan.plan import ModelPlan


def fragments_of(plan: ModelPlan) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return the groups of every fragment, in order; one fragment if the plan has no axes.

    Raises `ConfigError` if the axes cannot be tied (`bundles.py`).
    """
    bundles = bundles_of(plan, tied=True)
    count = max((bundle.count for bundle in bundles), default=1)
    return tuple(
        {axis.name: (fragment * len(axis.groups) // count,) for axis in plan.axes}
        for fragment in range(count)
    )
