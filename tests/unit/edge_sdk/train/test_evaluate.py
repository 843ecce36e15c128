"""Losses on a device are those of the coordinator's torch."""

from __future__ import annotations

import numpy as np
import pytest

from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.train.evaluation import LOSSES, evaluate
from edge_sdk.train.inference import Predictor
from tests.unit.edge_sdk.train.handmade import CLASSES, INPUTS, Handmade, Reference, bundle

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("more", [(), (3,)])
def test_loss_per_sample_is_torchs(name: str, more: tuple[int, ...]) -> None:
    from coordinator.task.task import LOSSES as THEIRS

    random = np.random.default_rng(4)
    outputs = random.normal(size=(7, 5, *more)) * 30
    classes, shares = random.integers(0, 5, (7, *more)), random.random((7, 5, *more))
    targets: Array = classes if name == "cross-entropy" else shares
    theirs = THEIRS[name](torch.from_numpy(outputs), torch.from_numpy(targets)).numpy()
    np.testing.assert_allclose(LOSSES[name](outputs, targets), theirs, rtol=1e-12)


def test_scores_are_means_over_all_batches() -> None:
    random = np.random.default_rng(4)
    plan, manifest, files = bundle(Handmade())
    theta = random.normal(size=plan.parameters).astype(np.float32)
    weights = plan.unflatten(theta)
    x = random.normal(size=(600, INPUTS)).astype(np.float32)
    data = ArrayData((x,), random.integers(0, CLASSES, 600))
    scores = evaluate(Predictor(plan, manifest, files), weights, {}, data, manifest.loss)
    exact = {name: array.astype(np.float64) for name, array in weights.items()}
    reference = Reference()
    assert scores.loss == pytest.approx(reference.loss(exact, x, data.targets), rel=1e-5)
    right = float(np.mean(reference.logits(exact, x).argmax(1) == data.targets))
    assert scores.accuracy == pytest.approx(right)
    assert scores.samples == 600


def test_what_cannot_be_evaluated_is_refused() -> None:
    plan, manifest, files = bundle(Handmade())
    predictor = Predictor(plan, manifest, files)
    none = ArrayData((np.zeros((0, INPUTS), dtype=np.float32),), np.zeros(0, dtype=np.int64))
    with pytest.raises(TrainingError, match="the loss 'custom' is a custom one"):
        evaluate(predictor, {}, {}, none, "custom")
    with pytest.raises(TrainingError, match="no data"):
        evaluate(predictor, {}, {}, none, "mse")
