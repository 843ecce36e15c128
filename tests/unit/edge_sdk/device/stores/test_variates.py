"""A device's control variate: what it adds to gradients, and what verdicts make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_sdk.device.stores.residuals import ArrayStore, FolderStore
from edge_sdk.device.stores.variates import Variates
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan((Axis("a", (1, 1, 1)),), (Tensor("w", "float32", (Dim(3, 0), Dim(2))),))
STEPS, RATE = 5, 0.1


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArrayStore:
    return ArrayStore() if request.param == "memory" else FolderStore(tmp_path / "variates")


def blocks(values: list[float], groups: tuple[int, ...] = (0, 1, 2)) -> Blocks:
    return Blocks(np.array(groups, dtype=np.int64), np.array(values, dtype=np.float32))


def keep(variates: Variates, round: int, control: Blocks, movement: Blocks) -> None:
    variates.keep(round, control, movement, steps=STEPS, learning_rate=RATE)


def test_variate_follows_option_two_and_only_where_a_movement_counted(store: ArrayStore) -> None:
    random, variates = np.random.default_rng(1), Variates(PLAN, store)
    own = np.zeros(6)
    for round in range(1, 8):
        control, movement = (random.normal(size=6).astype(np.float32) for _ in range(2))
        told = blocks(control.tolist())
        np.testing.assert_allclose(
            variates.correction(round, told).values, control - own, rtol=1e-5, atol=1e-6
        )
        keep(variates, round, told, blocks(movement.tolist()))
        counted = round % 3 > 0
        variates = Variates(PLAN, store)  # the program was started again
        for _ in range(2):  # a verdict may come twice
            variates.settle(round, used=counted)
        if counted:
            own = own - control - movement / (STEPS * RATE)


def test_variate_changes_block_by_block_and_is_never_forgotten(store: ArrayStore) -> None:
    variates = Variates(PLAN, store)
    keep(variates, 1, blocks([1, 1, 2, 2], (0, 2)), blocks([0.5, 0.5, 0, 0], (0, 2)))
    variates.settle(1, used=True)
    zeros = blocks([0] * 6)
    own = -variates.correction(100_000, zeros).values
    np.testing.assert_allclose(own, [-2, -2, 0, 0, -2, -2])


def test_verdict_that_is_awaited_changes_nothing_yet(store: ArrayStore) -> None:
    variates = Variates(PLAN, store)
    keep(variates, 1, blocks([1.0] * 6), blocks([1.0] * 6))
    assert (variates.correction(2, blocks([3.0] * 6)).values == 3).all()
    variates.settle(1, used=False)
    assert (variates.correction(2, blocks([3.0] * 6)).values == 3).all()
    assert list(store.names()) == []
