"""`random`: a uniform subset of the wanted size, for every device and axis on its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_sdk.protocol.messages import Bid
from edge_sdk.protocol.plan import ModelPlan
from edge_sdk.protocol.specs import Axis


def random_masks(
    plan: ModelPlan, offers: Sequence[Bid], stream: np.random.Generator
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Groups per axis for every offering device."""
    return {
        bid.device: {
            axis.name: _subset(axis, 1.0 if bid.level is None else bid.level, stream)
            for axis in plan.axes
        }
        for bid in offers
    }


def _subset(axis: Axis, level: float, stream: np.random.Generator) -> tuple[int, ...]:
    """Groups in random order, as many as the level allows.

    Groups of one size: as many as `level` means, all subsets alike. Groups of differing size: each
    that still fits within the level; the smallest group if none does.
    """
    order = [int(group) for group in stream.permutation(len(axis.groups))]
    if axis.equal:
        return tuple(sorted(order[: axis.wanted(level)]))
    room = level * axis.atoms + 1e-9
    taken = []
    for group in order:
        if axis.groups[group] <= room:
            taken.append(group)
            room -= axis.groups[group]
    return tuple(sorted(taken)) or (int(np.argmin(axis.groups)),)
