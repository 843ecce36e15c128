"""Runs one cell: a simulated fleet that really trains, measured on test images between rounds.

The settings of a cell are those of a study (`benchmarks/fleet/config.py`), by key. Accuracy is that
of the whole model on the official test set, which no device has any sample of. Nothing is chosen by
it; `best` is the best of all measurements, as papers print it, and `last` the mean of the last
tenth of the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data import Dataset
from benchmarks.fleet.config import StudyConfig, make_study
from benchmarks.fleet.study import Study
from benchmarks.studies.papers.cell import PaperCell, Ran
from coordinator.errors import CoordinatorError
from coordinator.simulate.fleet.simulation import FleetRound
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream

EVERY = "simulation.evaluate_every"
NEVER = 1_000_000_000
LAST = 0.1
"""Share of the rounds, at the end, over which accuracy is averaged."""
PIECE = 500
"""Images to predict at a time."""


def study_of(cell: PaperCell, seed: int) -> StudyConfig:
    """Return the study that a cell's settings describe. Raises `ConfigError`."""
    return make_study(
        {**cell.settings, "run.seed": seed, EVERY: NEVER}, label=f"{'; '.join(cell.place)}: "
    )


def run_study_cell(cell: PaperCell, seed: int, data: Path | None) -> Ran:
    """Run a cell to its end; `data` holds a folder for each data set. Raises `DatasetError`."""
    study = Study(study_of(cell, seed), data)
    watch = RoundWatch(study, int(cell.settings.get(EVERY, 1)))
    failed = ""
    try:
        for each in study.run():
            watch.see(each)
    except CoordinatorError as error:  # nobody's training succeeds any more
        failed = str(error)[:200]
    return watch.ran({"failed": failed} if failed else {})


class RoundWatch:
    """Measures a study's model on the test set, and gathers what rounds report."""

    def __init__(self, study: Study, every: int) -> None:
        self._study, self._every = study, every
        self._data = study.data
        self._last: FleetRound | None = None
        self._seen = 0
        self._curve: list[tuple[int, float, float]] = []
        self._deviations: list[float] = []
        self._terms: dict[str, list[float]] = {}
        self._parts: list[NDArray[np.int64]] | None = None

    def see(self, each: FleetRound) -> None:
        """Look at a round that has closed."""
        self._last, self._seen = each, self._seen + 1
        report = each.report
        trained = [device for device in report.devices if device.level is not None]
        terms: dict[str, float | None] = {
            "coverage_min": report.coverage_min,
            "gamma": report.trained_coverage_min,
            "trained_blocks": report.trained_blocks,
            "uncovered": report.oldest_uncovered,
            "memory_age": report.oldest_memory,
            "trained": len(trained),
            "asked": len(report.devices),
            "noise": fmean([device.reduction_noise or 0.0 for device in trained] or [0.0]),
        }
        for name, value in terms.items():
            if value is not None:
                self._terms.setdefault(name, []).append(float(value))
        if self._seen % self._every == 0 and self._data is not None:
            self._measure(each, self._data)

    def ran(self, more: Mapping[str, Any]) -> Ran:
        """Return the numbers of the run so far."""
        values = {name: fmean(found) for name, found in self._terms.items()}
        if "memory_age" in self._terms:
            values["memory_age"] = max(self._terms["memory_age"])
        values["uncovered"] = max(self._terms.get("uncovered", [0.0]))
        if self._last is not None:
            values |= {"rounds": self._seen, "time_s": self._last.time_s}
            values |= {"joules": self._last.joules, "bytes_up": self._last.bytes_up}
        if self._curve:
            first = self._curve[-1][0] - LAST * self._curve[-1][0]
            tail = [number for number, point in enumerate(self._curve) if point[0] > first]
            values["last"] = fmean(self._curve[number][2] for number in tail)
            values["best"] = max(point[2] for point in self._curve)
            values["deviation"] = fmean(self._deviations[number] for number in tail)
        curve = [(at, round(time_s, 3), round(share, 3)) for at, time_s, share in self._curve]
        return Ran(values=rounded(values), curve=curve, more=more)

    def _measure(self, each: FleetRound, data: Dataset) -> None:
        right = self._right(data.test)
        self._curve.append((each.report.round, each.time_s, 100 * float(right.mean())))
        if self._parts is None:
            held = [data.train.targets[rows] for rows in self._study.rows]
            draws = stream(self._study.config.run.seed, "papers", "tests")
            self._parts = own_tests(held, data.test.targets, draws)
        shares = [100 * float(right[part].mean()) for part in self._parts if len(part)]
        self._deviations.append(pstdev(shares))

    def _right(self, test: ArrayData) -> NDArray[np.bool_]:
        """Mark the test images that the whole model is right about."""
        model, runtime = self._study.model, self._study.runtime
        weights, buffers = model.weights, model.buffers
        marks = []
        for at in range(0, len(test), PIECE):
            inputs = [array[at : at + PIECE] for array in test.inputs]
            scores = runtime.predict(weights, buffers, inputs)
            marks.append(scores.argmax(axis=1) == test.targets[at : at + PIECE])
        return np.concatenate(marks)


def own_tests(
    held: Sequence[NDArray[np.int64]], labels: NDArray[np.int64], random: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Deal out a test set: of each class, a device gets the share that it has in training."""
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in held]
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        counts = np.array([np.count_nonzero(each == label) for each in held], dtype=np.float64)
        if not counts.sum():
            continue
        cuts = np.rint(np.cumsum(counts)[:-1] / counts.sum() * len(rows)).astype(np.int64)
        for device, piece in zip(pieces, np.split(rows, cuts), strict=True):
            device.append(piece)
    return [np.concatenate(each) if each else np.zeros(0, np.int64) for each in pieces]


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return values with six digits, which is more than their noise leaves."""
    return {name: float(f"{value:.6g}") for name, value in values.items()}
