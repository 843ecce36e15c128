"""Robust aggregation: what a few bad devices cannot do to a block (docs/algorithms.md).

A choice has two parts, which go with every synchronous rule. **Clipping** (`clipping.py`) shortens
movements that are longer than those of the same round, before a rule or memory sees them. Then a
rule's mean over devices becomes a **robust mean** (`means.py`), block by block over the devices
that hold it. Where one or two devices hold a block, no majority can be right: it is only clipped.
"""

from __future__ import annotations

from coordinator.aggregate.robust.choice import (
    CLIPPING_ONLY,
    RECOMMENDED,
    SERVED,
    THIN,
    Robust,
    RobustName,
)
from coordinator.aggregate.robust.means import RobustMean, Weighed, robust_mean

__all__ = [
    "CLIPPING_ONLY",
    "RECOMMENDED",
    "SERVED",
    "THIN",
    "Robust",
    "RobustMean",
    "RobustName",
    "Weighed",
    "robust_mean",
]
