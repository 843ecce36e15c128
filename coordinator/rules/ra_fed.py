"""`ra-fed`: each block moves by the mean over the devices that trained it; others stay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_sdk.protocol.blocks import Float32, add_blocks
from edge_sdk.protocol.messages import Movement
from edge_sdk.protocol.plan import ModelPlan


def ra_fed(plan: ModelPlan, movements: Sequence[Movement]) -> Float32:
    """`Γ_i = 0`: keep. Else the mean of `D_n,i` over `N_i`."""
    total = np.zeros(plan.parameters, dtype=np.float32)
    coverage = np.zeros(plan.block_count, dtype=np.int64)
    for movement in movements:
        add_blocks(total, movement.blocks, plan.block_offsets)
        coverage[movement.blocks.ids] += 1
    share = (1 / np.maximum(coverage, 1)).astype(np.float32)
    total *= np.repeat(share, plan.block_sizes)
    return total
