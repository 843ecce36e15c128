"""The global model: moved in place, and what its encoding costs."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from edge_sdk.protocol.encoding.encoded_model import compression_noise
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan((Axis("a", (3, 5)),), (Tensor("w", "float32", (Dim(8, 0), Dim(4))),))


def make(encoding: str = "fp32") -> GlobalModel:
    weights = {"w": np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4)}
    return GlobalModel(PLAN, weights, {}, encoding=Encoding.parse(encoding))


def test_commit_takes_over_the_movement() -> None:
    model = make()
    before, movement = model.theta.copy(), np.full(32, 0.5, dtype=np.float32)
    expected = before + movement
    model.commit(movement, [])
    assert model.theta is movement
    assert model.theta.tobytes() == expected.tobytes()
    assert model.version == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_commit_that_is_not_finite_changes_nothing(bad: float) -> None:
    model = make()
    model.theta[7] = 3e38
    before = model.digest
    movement = np.zeros(32, dtype=np.float32)
    movement[7] = bad
    with np.errstate(over="ignore"), pytest.raises(StateError, match="not finite"):
        model.commit(movement, [])
    assert (model.digest, model.version) == (before, 0)


@pytest.mark.parametrize("encoding", ["fp32", "fp32+zstd"])
def test_noise_of_a_lossless_encoding_is_not_computed(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(encoding)
    monkeypatch.setattr(model, "serve", lambda: pytest.fail("the model was encoded"))
    assert model.noise == 0.0


def test_noise_is_the_relative_square_of_what_was_lost() -> None:
    model = make("int8")
    assert model.noise == compression_noise(model.theta, model.serve().decoded) > 0


def test_plain_model_is_served_without_a_copy() -> None:
    model = make()
    assert np.shares_memory(model.serve().decoded, model.theta)
