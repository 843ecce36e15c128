"""How a submodel learns that a device trains alone, against what its rounds cost.

The accuracies are those of real trainings; seconds, joules and bytes are those of one round, as it
was measured or modelled, times the rounds.
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
"""At most."""


def learners(data: Dataset, kit: Path, families: Sequence[str]) -> tuple[str, ...]:
    """The families that can learn from this data."""
    return tuple(family for family in families if _fits(data, read_task(kit, family)[1].data))


def _fits(data: Dataset, spec: DataSpec) -> bool:
    one = ArrayData(tuple(each[:1] for each in data.train.inputs), data.train.targets[:1])
    try:
        fit_data(replace(data, train=one, test=one, owners=None), spec)
    except DatasetError:
        return False
    return True


def fit_data(data: Dataset, spec: DataSpec) -> Dataset:
    """The data in the shape that a task wants. Raises `DatasetError`."""
    inputs, highest = spec.inputs[0], spec.targets.highest
    if np.dtype(inputs.dtype).kind != "f":
        raise DatasetError(f"{data.name} has measurements, the model takes {inputs.dtype}")
    if highest is not None and data.classes > highest + 1:
        raise DatasetError(f"{data.name} has {data.classes} classes, the model {highest + 1}")
    return fit_images(data, tuple(inputs.shape))


def learn(kit: Path, family: str, data: Dataset, ask: Asked) -> list[float]:
    """The accuracy after each of `ask.rounds` rounds, in a fresh process; `ask` has one level.

    As many samples as are trained on are drawn from the data. Raises `ProcessFailed`.
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
    """A curve whose rounds cost what those of the case did."""
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
