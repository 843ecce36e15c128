"""Evaluates a model on the device's own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.errors import TensorError, TrainingError, TrainingStopped
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.train.inference import Predictor, accuracy, sample_accuracies
from edge_sdk.train.statistics import LevelRuntime

BATCH = 256
PIECE = 512
"""Samples of a level to predict at a time."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over the samples; `accuracy` None: the task has no classes."""

    samples: int
    loss: float
    accuracy: float | None


def evaluate(
    predictor: Predictor,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    data: ArrayData,
    loss: str,
) -> Scores:
    """Run the whole model on all of the data.

    Raises `TrainingError` when there is no data, or when the loss is a custom one: no graph
    computes it without training. Otherwise raises what `Predictor.predict` does.
    """
    if loss not in LOSSES:
        raise TrainingError(f"the loss {loss!r} is a custom one and cannot be evaluated here")
    if not len(data):
        raise TrainingError("there is no data to evaluate on")
    total, right, classes = 0.0, 0.0, True
    for at in range(0, len(data), BATCH):
        inputs = [array[at : at + BATCH] for array in data.inputs]
        targets = data.targets[at : at + BATCH]
        outputs = predictor.predict(weights, buffers, inputs, batch_size=BATCH)
        total += float(LOSSES[loss](outputs.astype(np.float64), targets).sum())
        share = accuracy(outputs, targets)
        classes = classes and share is not None
        right += (share or 0.0) * len(targets)
    samples = len(data)
    return Scores(samples, total / samples, right / samples if classes else None)


def level_accuracies(
    runtime: LevelRuntime,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    data: ArrayData,
    *,
    groups: Groups,
    rescale: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> NDArray[np.float64] | None:
    """Return a submodel's share of correct answers for every sample.

    None if the task has no such notion. `should_stop` is polled from time to time; raises
    `TrainingStopped` when it returns True.
    """
    found = []
    for first in range(0, len(data), PIECE):
        if should_stop():
            raise TrainingStopped(first // PIECE)
        rows = slice(first, first + PIECE)
        inputs = [each[rows] for each in data.inputs]
        outputs = runtime.predict(weights, buffers, inputs, groups=groups, rescale=rescale)
        shares = sample_accuracies(outputs, data.targets[rows])
        if shares is None:
            return None
        found.append(shares)
    return np.concatenate(found)


def _cross_entropy(outputs: NDArray[np.float64], targets: Array) -> NDArray[np.float64]:
    shifted = outputs - outputs.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    places, classes = np.expand_dims(targets.astype(np.int64), 1), outputs.shape[1]
    if np.any((places < 0) | (places >= classes)):
        raise TensorError(f"some labels are not among the model's classes, 0 to {classes - 1}")
    return _per_sample(-np.take_along_axis(logs, places, axis=1))


def _mse(outputs: NDArray[np.float64], targets: Array) -> NDArray[np.float64]:
    return _per_sample(np.square(outputs - targets))


def _bce(outputs: NDArray[np.float64], targets: Array) -> NDArray[np.float64]:
    # log(1 + exp(z)) − t z, in a form that does not overflow.
    softplus = np.maximum(outputs, 0) + np.log1p(np.exp(-np.abs(outputs)))
    return _per_sample(softplus - targets * outputs)


def _per_sample(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    means: NDArray[np.float64] = losses.reshape(len(losses), -1).mean(axis=1)
    return means


LOSSES: dict[str, Callable[[NDArray[np.float64], Array], NDArray[np.float64]]] = {
    "cross-entropy": _cross_entropy,
    "mse": _mse,
    "bce-with-logits": _bce,
}
"""(outputs, targets) → one loss per sample, by the names that manifests use."""
