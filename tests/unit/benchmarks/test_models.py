"""Models of papers have the sizes that the papers print."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.models import FAMILIES
from coordinator.task.tracing.trace import trace_plan

LAYER_NORM = 5
"""Operations that the paper's count has for each number that a LayerNorm normalises."""


def test_submodels_of_subdismo_count_as_in_its_table() -> None:
    """Table 7: parameters, and operations for a batch of 128, of 1, 2 and 4 blocks of 4."""
    family = FAMILIES["vit-subdismo"]
    plan = trace_plan(family.model(), family.inputs(2), regions="depth")
    assert [(axis.name, axis.groups) for axis in plan.axes] == [("blocks", (1, 1, 1, 1))]
    printed = {0.25: (55_242, 103.809), 0.5: (88_522, 181.24), 1.0: (155_082, 336.102)}
    for level, (parameters, millions) in printed.items():
        cost = plan.cost_at(level)
        assert cost.parameters == parameters
        normed = 2 * 17 * 64 * 4 * level  # two norms over 17 tokens in every block
        assert 128 * (cost.macs + LAYER_NORM * normed) / 1e6 == pytest.approx(millions, abs=1e-3)
