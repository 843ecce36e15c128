"""Every level is a model: its submodel, with BatchNorm statistics of its own, and its accuracy.

Statistics of a level are computed for it on unlabelled data, in one forward pass over fixed
batches: here, or on devices (`coordinator/rounds/survey.py`). They are never averaged from other
submodels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.errors import GraphError
from edge_sdk.protocol.plan.layout import Array, Indices
from edge_sdk.protocol.plan.plan import Groups
from edge_sdk.train.statistics import LevelRuntime

STATISTICS_SAMPLES = 1024
"""Samples from which statistics are computed, if there are as many."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelModel:
    """The submodel of one level, ready to use."""

    level: float
    groups: Groups
    weights: Mapping[str, Array]
    buffers: Mapping[str, Array]
    rescale: float
    statistics: Mapping[str, Array] = field(default_factory=dict)
    """The buffers among them that were computed for this level; empty without BatchNorm."""
    statistics_devices: int | None = None
    """See `LevelScore`; `statistics_share` too."""
    statistics_share: float | None = None

    def accuracy(self, runtime: LevelRuntime, data: ArrayData) -> float | None:
        """Share of correct answers; None if the task has no such notion."""
        found = self.accuracies(runtime, data)
        return None if found is None else float(found.mean())

    def accuracies(self, runtime: LevelRuntime, data: ArrayData) -> NDArray[np.float64] | None:
        """Share of correct answers for every sample; None if the task has no such notion."""
        # Imported here: it loads onnxruntime, which is optional and slow to load.
        from edge_sdk.train.evaluation import level_accuracies

        return level_accuracies(
            runtime, self.weights, self.buffers, data, groups=self.groups, rescale=self.rescale
        )


@dataclass(frozen=True, slots=True, eq=False)
class LevelScore:
    """One level of a model: the groups it means, and facts measured on data, if there was any."""

    level: float
    groups: Groups
    accuracy: float | None = None
    """Share of correct answers; None: not measured, or the task has no such notion."""
    statistics: Mapping[str, Array] = field(default_factory=dict)
    """Its own BatchNorm statistics, by name of their buffers; empty: not computed."""
    statistics_devices: int | None = None
    """Devices from whose data the statistics were computed; None: from the coordinator's data, or
    not at all."""
    statistics_share: float | None = None
    """Share of all training samples that those devices have; None: not known."""
    own_accuracy: float | None = None
    """Mean over devices of each one's accuracy on test data of its own; None: not known."""
    own_deviation: float | None = None
    """Standard deviation of these accuracies between the devices; None: not known."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelScores:
    """The levels of a model, largest first, and the `rescale` of their training."""

    levels: tuple[LevelScore, ...] = ()
    rescale: float = 0.0

    @property
    def accuracies(self) -> dict[float, float]:
        """Accuracy of every level that has one."""
        return {each.level: each.accuracy for each in self.levels if each.accuracy is not None}

    @property
    def deploy(self) -> float | None:
        """The level to deploy; None if no accuracy is known."""
        return best_level(found) if (found := self.accuracies) else None

    @property
    def best(self) -> float | None:
        """Accuracy of the level to deploy; None if no accuracy is known."""
        return max(self.accuracies.values(), default=None)

    @property
    def by_level(self) -> dict[float, LevelScore]:
        """Return the levels by their share of the model."""
        return {each.level: each for each in self.levels}


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
    if found is None:
        return LevelModel(level, groups, cut, own, rescale)
    own = found.fill(own)
    statistics = {name: own[name] for name in (*found.means, *found.m2s)}
    return LevelModel(level, groups, cut, own, rescale, statistics)


def evaluate_levels(
    runtime: LevelRuntime,
    weights: Mapping[str, Array],
    buffers: Mapping[str, Array],
    choices: Mapping[float, Groups],
    data: ArrayData,
    *,
    rescale: float,
    own: Sequence[Indices] = (),
) -> LevelScores:
    """Compute the statistics and the accuracy of every level.

    A level below 1 that no graph was compiled for has neither. `own`: the rows of the data that are
    the test data of each device, for the deviation between devices.
    """

    def score(level: float, groups: Groups) -> LevelScore:
        try:
            model = level_model(
                runtime, weights, buffers, level, groups, rescale=rescale, samples=data.inputs
            )
            shares = model.accuracies(runtime, data)
        except GraphError:
            if level == 1:
                raise
            return LevelScore(level, groups)
        if shares is None:
            return LevelScore(level, groups, statistics=model.statistics)
        mean, deviation = between_devices([float(shares[rows].mean()) for rows in own if len(rows)])
        return LevelScore(
            level,
            groups,
            float(shares.mean()),
            model.statistics,
            own_accuracy=mean,
            own_deviation=deviation,
        )

    return LevelScores(tuple(score(*choice) for choice in choices.items()), rescale)


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
    scores = evaluate_levels(runtime, weights, buffers, choices, data, rescale=rescale)
    return scores.accuracies or None


def between_devices(accuracies: Sequence[float]) -> tuple[float | None, float | None]:
    """Return mean and standard deviation of devices' accuracies, each counting once.

    The deviation is that of these devices (divided by their number); None for fewer than two.
    """
    if not accuracies:
        return None, None
    deviation = float(np.std(accuracies)) if len(accuracies) > 1 else None
    return float(np.mean(accuracies)), deviation


def best_level(scores: Mapping[float, float]) -> float:
    """Return the level to deploy: the most accurate one, the smallest of several."""
    return min(scores, key=lambda level: (-scores[level], level))


# -- as plain data -------------------------------------------------------------------------------


def pack_levels(scores: LevelScores) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return levels as JSON and arrays by name. Inverse of `unpack_levels`."""
    arrays = {
        f"level/{number}/{name}": array
        for number, each in enumerate(scores.levels)
        for name, array in each.statistics.items()
    }
    levels = [
        {
            "level": each.level,
            "groups": {axis: list(ids) for axis, ids in each.groups.items()},
            "accuracy": each.accuracy,
            "statistics_devices": each.statistics_devices,
            "statistics_share": each.statistics_share,
            "own_accuracy": each.own_accuracy,
            "own_deviation": each.own_deviation,
        }
        for each in scores.levels
    ]
    return {"rescale": scores.rescale, "levels": levels}, arrays


def unpack_levels(content: Mapping[str, Any], arrays: Mapping[str, Array]) -> LevelScores:
    """Read levels. Raises `KeyError`, `TypeError`, `ValueError` or `AttributeError` if damaged."""
    levels = []
    for number, each in enumerate(content["levels"]):
        start = f"level/{number}/"
        groups = {axis: tuple(ids) for axis, ids in each["groups"].items()}
        statistics = {
            name.removeprefix(start): array
            for name, array in arrays.items()
            if name.startswith(start)
        }
        levels.append(
            LevelScore(
                float(each["level"]),
                groups,
                each["accuracy"],
                statistics,
                each.get("statistics_devices"),
                each.get("statistics_share"),
                each.get("own_accuracy"),
                each.get("own_deviation"),
            )
        )
    return LevelScores(tuple(levels), float(content["rescale"]))
