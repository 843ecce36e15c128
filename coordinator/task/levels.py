"""Every level is a model: its submodel, with BatchNorm statistics of its own, and its accuracy.

Statistics of a level are computed for it on unlabelled data, in one forward pass over fixed
batches. They are never averaged from other submodels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.train.inference import accuracy
from edge_sdk.train.statistics import Moments

PIECE = 500
"""Samples to predict at a time."""
STATISTICS_SAMPLES = 1024
"""Samples from which statistics are computed, if there are as many."""


class LevelRuntime(Protocol):
    """Runs submodels of a task: with onnxruntime (`Predictor`) or torch (`TracedModel`)."""

    @property
    def plan(self) -> ModelPlan:
        """The task's plan."""

    def predict(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
    ) -> Array:
        """Compute a submodel's outputs."""

    def moments(
        self,
        weights: Mapping[str, Array],
        buffers: Mapping[str, Array],
        inputs: Sequence[Array],
        *,
        groups: Groups | None = None,
        rescale: float = 0.0,
    ) -> Moments | None:
        """Compute a submodel's BatchNorm moments; None: the model has no BatchNorm."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelModel:
    """The submodel of one level, ready to use."""

    level: float
    groups: Groups
    weights: Mapping[str, Array]
    buffers: Mapping[str, Array]
    rescale: float

    def accuracy(self, runtime: LevelRuntime, data: ArrayData) -> float | None:
        """Share of correct answers; None if the task has no such notion."""
        right = 0.0
        for first in range(0, len(data), PIECE):
            rows = slice(first, first + PIECE)
            outputs = runtime.predict(
                self.weights,
                self.buffers,
                [each[rows] for each in data.inputs],
                groups=self.groups,
                rescale=self.rescale,
            )
            share = accuracy(outputs, data.targets[rows])
            if share is None:
                return None
            right += share * len(outputs)
        return right / len(data)


def level_model(
    runtime: LevelRuntime,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    level: float,
    groups: Groups,
    *,
    rescale: float,
    samples: Sequence[Array],
) -> LevelModel:
    """Cut a level out of the whole model and compute its statistics from these unlabelled samples.

    Which samples are used, and in which batches, depends on their number alone.
    """
    cut, own = runtime.plan.cut(weights, groups), runtime.plan.cut_buffers(buffers, groups)
    order = np.random.default_rng(0).permutation(len(samples[0]))[:STATISTICS_SAMPLES]
    found = runtime.moments(
        cut, own, [each[order] for each in samples], groups=groups, rescale=rescale
    )
    own = own if found is None else found.fill(own)
    return LevelModel(level, groups, cut, own, rescale)


def score_levels(
    runtime: LevelRuntime,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    choices: Mapping[float, Groups],
    data: ArrayData,
    *,
    rescale: float,
) -> dict[float, float] | None:
    """Return the accuracy of every level; None if the task has no such notion."""
    scores = {}
    for level, groups in choices.items():
        model = level_model(
            runtime, weights, buffers, level, groups, rescale=rescale, samples=data.inputs
        )
        if (share := model.accuracy(runtime, data)) is None:
            return None
        scores[level] = share
    return scores


def best_level(scores: Mapping[float, float]) -> float:
    """Return the level to deploy: the most accurate one, the smallest of several."""
    return min(scores, key=lambda level: (-scores[level], level))
