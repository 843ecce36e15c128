"""Weighting by agreement with the root: a movement that the operator's own data made.

A device's trust is the cosine between its movement and the root's, over the blocks that the device
holds; 0 where they point apart. It is a factor of the movement's weight, in this round and in
memory. Blocks are shortened to `factor` times the root's. Cao, Fang, Liu and Gong, *FLTrust:
Byzantine-robust Federated Learning via Trust Bootstrapping*, NDSS 2021, stretches short movements
to the root's length, too; a block that a device hardly moved stays as it is here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.robust.clipping import Lengths, yardstick
from coordinator.aggregate.robust.sums import PIECE, Float64
from coordinator.aggregate.screening import block_squares
from edge_sdk.protocol.plan.blocks import Blocks, block_runs
from edge_sdk.protocol.plan.plan import ModelPlan

STEP = 2.0**-20
"""Trust is rounded to this, so that running sums of weights stay exact."""


def root_yardstick(plan: ModelPlan, root: Blocks, learning_rate: float) -> Float64:
    """Return the squared norm over γ² that each block may have: the root's, but for blocks that it
    hardly moved or does not hold, which get the share of their tensor that `yardstick` states."""
    squares = block_squares(root.values, plan.block_sizes[root.ids]) / learning_rate**2
    return yardstick(plan, [Lengths(root.ids, squares)] * 3)


def trusted(plan: ModelPlan, root: Blocks, parts: Sequence[Contribution]) -> list[Contribution]:
    """Return movements with the trust that each deserves."""
    whole = np.zeros(plan.parameters, dtype=np.float32)
    for place, within in block_runs(root.ids, plan.block_offsets):
        whole[place] = root.values[within]
    return [replace(part, trust=_agreement(plan, whole, part.blocks)) for part in parts]


def _agreement(plan: ModelPlan, root: np.ndarray, blocks: Blocks) -> float:
    along = own = roots = 0.0
    for place, within in block_runs(blocks.ids, plan.block_offsets):
        for low in range(0, place.stop - place.start, PIECE):
            high = min(low + PIECE, place.stop - place.start)
            one = blocks.values[within][low:high].astype(np.float64)
            other = root[place][low:high].astype(np.float64)
            along += float(np.einsum("i,i->", one, other))
            own += float(np.einsum("i,i->", one, one))
            roots += float(np.einsum("i,i->", other, other))
    if along <= 0:
        return 0.0
    return min(1.0, round(along / math.sqrt(own * roots) / STEP) * STEP)
