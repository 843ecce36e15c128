"""The sum of control variates on the server, against a loop over devices and blocks."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.optimizer import RamMoments
from coordinator.aggregate.robust.sums import PIECE
from coordinator.aggregate.rules import Closing
from coordinator.aggregate.rules.scaffold import Scaffold, VariateSum
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan(
    (Axis("a", (2, 3, 1)), Axis("b", (1, 2))),
    (
        Tensor("w", "float32", (Dim(6, 0), Dim(3, 1))),
        Tensor("bias", "float32", (Dim(6, 0),)),
        Tensor("whole", "float32", (Dim(2 * PIECE + 5),)),
    ),
)
STEPS, RATE = 7, 0.3
GROUPS = (
    {"a": (0, 1, 2), "b": (0, 1)},
    {"a": (1,), "b": (0, 1)},
    {"a": (0, 1), "b": (1,)},
)


@pytest.mark.parametrize("server_rate", [1.0, 0.25])
def test_sum_changes_by_the_changes_of_all_devices_that_counted(server_rate: float) -> None:
    random, rule = np.random.default_rng(4), Scaffold(server_rate=server_rate)
    size = PLAN.parameters
    sums = [RamMoments(VariateSum(), PLAN) for _ in range(2)]
    expected = np.zeros(size)
    for round in range(1, 4):
        control = random.normal(size=size).astype(np.float32)
        parts = []
        for number, groups in enumerate(GROUPS[: round + 1]):
            moved = random.normal(size=size).astype(np.float32)
            blocks = PLAN.select(moved, groups)
            parts.append(Contribution(f"d{number}", round, blocks, RATE, 1.0, 10))
            for block in blocks.ids:
                start, end = PLAN.block_offsets[block], PLAN.block_offsets[block + 1]
                change = -control[start:end] - moved[start:end].astype(float) / (STEPS * RATE)
                expected[start:end] += change
        for threads, kept in zip((1, 3), sums, strict=True):
            closing = Closing(
                plan=PLAN,
                round=round,
                theta=np.zeros(size, dtype=np.float32),
                learning_rate=RATE,
                fresh=parts,
                threads=threads,
            )
            rule.settle(closing, rule.move(closing), kept, control, STEPS)
        np.testing.assert_allclose(sums[0].current[0], expected, rtol=1e-4, atol=1e-4)
    assert sums[0].current[0].tobytes() == sums[1].current[0].tobytes()
