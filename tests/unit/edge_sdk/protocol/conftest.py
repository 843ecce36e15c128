from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Buffer, Dim, MacTerm, Tensor


@pytest.fixture(scope="session")
def plan() -> ModelPlan:
    """A plan with one of everything. The golden file holds it: it must never change."""
    return ModelPlan(
        axes=(Axis("hidden", (2, 1, 1)), Axis("heads", (1, 1))),
        tensors=(
            Tensor("fc.weight", "float32", (Dim(4, 0), Dim(3))),
            Tensor("qkv.weight", "float32", (Dim(12, 1, 3, 2), Dim(4, 0))),
            Tensor("mix.weight", "float32", (Dim(4, 0), Dim(4, 0))),
            Tensor("temperature", "float32", ()),
        ),
        buffers=(
            Buffer("norm.mean", "float32", (Dim(4, 0),), statistic=True),
            Buffer("norm.steps", "int64", ()),
        ),
        macs=(MacTerm(3, (0,)), MacTerm(6, (1, 0)), MacTerm(1, (0, 0))),
    )


@pytest.fixture
def weights(plan: ModelPlan) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in plan.tensors}


@pytest.fixture
def buffers() -> dict[str, Array]:
    return {"norm.mean": np.ones(4, dtype=np.float32), "norm.steps": np.array(7)}


@pytest.fixture
def groups() -> dict[str, tuple[int, ...]]:
    return {"hidden": (0, 2), "heads": (1,)}
