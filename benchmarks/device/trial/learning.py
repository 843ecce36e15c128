"""Learning of a submodel that a device trains alone, against the cost of its rounds.

The accuracies come from real training; seconds, joules and bytes are those of one measured or
modelled round, times the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.data import Dataset, DatasetError, fit_images
from benchmarks.device.kit import read_task
from benchmarks.device.results import Case, Curve, LearningPoint
from benchmarks.device.trial.fresh import ProcessFailed, run_fresh
from benchmarks.device.trial.process import Asked
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream
from edge_sdk.protocol.task.data_spec import DataSpec

TEST_SAMPLES = 2000
"""Most test samples."""


def learners(data: Dataset, kit: Path, families: Sequence[str]) -> tuple[str, ...]:
    """Return the families that can learn from this data."""
    return tuple(family for family in families if _fits(data, read_task(kit, family)[1].data))


def _fits(data: Dataset, spec: DataSpec) -> bool:
    one = ArrayData(tuple(each[:1] for each in data.train.inputs), data.train.targets[:1])
    try:
        fit_data(replace(data, train=one, test=one, owners=None), spec)
    except DatasetError:
        return False
    return True


def fit_data(data: Dataset, spec: DataSpec) -> Dataset:
    """Return the data in the task's shape. Raises `DatasetError`."""
    inputs, highest = spec.inputs[0], spec.targets.highest
    if np.dtype(inputs.dtype).kind != "f":
        raise DatasetError(f"{data.name} has measurements, the model takes {inputs.dtype}")
    if highest is not None and data.classes > highest + 1:
        raise DatasetError(f"{data.name} has {data.classes} classes, the model {highest + 1}")
    return fit_images(data, tuple(inputs.shape))


def learn(kit: Path, family: str, data: Dataset, ask: Asked) -> list[float]:
    """Return the accuracy after each of `ask.rounds` rounds, in a fresh process, at one level.

    Draws as many samples from the data as are trained on. Raises `ProcessFailed`.
    """
    few = _few(data, ask.rounds * ask.steps * ask.batch)
    used = fit_data(few, read_task(kit, family)[1].data)
    with TemporaryDirectory(prefix="tessera-bench-") as temporary:
        file = Path(temporary) / "data.npz"
        np.savez(
            file,
            x=used.train.inputs[0],
            y=used.train.targets,
            test_x=used.test.inputs[0],
            test_y=used.test.targets,
        )
        accuracies: list[float | None] = run_fresh("learn", replace(ask, data=str(file)))
    known = [each for each in accuracies if each is not None]
    if len(known) != ask.rounds:
        raise ProcessFailed(f"{family} says no classes of {data.name}")
    return known


def make_curve(case: Case, data: str, accuracies: Sequence[float]) -> Curve:
    """Make a curve whose rounds cost as much as the case's."""
    joules = None if case.joules is None else case.joules.gross
    fp32 = next((each for each in case.bytes if each.encoding == "fp32"), None)
    size = 0 if fp32 is None else fp32.up + (fp32.down or 0)
    return Curve(
        family=case.family,
        level=case.level,
        data=data,
        provenance=case.round_s.provenance,
        joules_provenance=None if case.joules is None else case.joules.provenance,
        joules_source=None if case.joules is None else case.joules.source,
        points=tuple(
            LearningPoint(
                round=number,
                accuracy=accuracy,
                seconds=number * case.round_s.median,
                bytes=number * size,
                joules=None if joules is None else number * joules,
            )
            for number, accuracy in enumerate(accuracies, start=1)
        ),
    )


def _few(data: Dataset, samples: int) -> Dataset:
    draws = stream(0, "learn", data.name)
    return replace(
        data,
        train=_drawn(data.train, samples, draws),
        test=_drawn(data.test, TEST_SAMPLES, draws),
        owners=None,
    )


def _drawn(data: ArrayData, samples: int, draws: np.random.Generator) -> ArrayData:
    if len(data) <= samples:
        return data
    rows = np.sort(draws.permutation(len(data))[:samples])
    return ArrayData(tuple(each[rows] for each in data.inputs), data.targets[rows])
