"""Compares predicted costs with measured ones, in fresh processes.

`METHOD`, which is written with the data, describes how each is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.device.kit import write_task
from benchmarks.device.trial.fresh import ProcessFailed, call_fresh
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from edge_sdk.protocol.plan import LEVELS

TIME_TARGET = 0.20

METHOD = {
    "time": (
        "CPU seconds of a training of several steps on the onnx backend, one thread, predicted "
        "from a calibration of the same process (the smallest level and the full model, a batch "
        "and a quarter of it, at most 15 steps of each) and measured in turns over the levels, "
        "median. The error is |predicted ÷ measured − 1|."
    ),
    "memory": (
        "By how much a fresh process grows, at most (VmHWM over resident before), in one round "
        "from the chunks of the model to the movement on disk, against the prediction made from a "
        "calibration of another process. Each level with momentum and fp32; the full model and the "
        "smallest level also with SAM, with top-k, and after a round at either, whose memory is "
        "still held."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig:
    """Parameters: `reps` trainings of each level, each for about `burst_s`; further `variants`."""

    batch: int = 32
    reps: int = 5
    burst_s: float = 0.3
    variants: bool = True

    def cases(self) -> list[tuple[float, str, str, float | None]]:
        """(level, rule, encoding, level trained before) of every memory case."""
        cases: list[tuple[float, str, str, float | None]]
        cases = [(level, "momentum", "fp32", None) for level in LEVELS]
        if self.variants:
            least, most = min(LEVELS), max(LEVELS)
            for level in (most, least):
                cases += [(level, "sam", "fp32", None), (level, "momentum", "top-k:0.1", None)]
            pairs = ((most, least), (least, most), (most, most))
            cases += [(level, "momentum", "fp32", before) for level, before in pairs]
        return cases

    @property
    def ticks(self) -> int:
        """Ticks for each family."""
        return 2 + len(self.cases())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """One level of one family."""

    family: str
    level: float
    steps: int
    predicted_s: float
    measured_s: float
    calibration_s: float
    """Wall-clock seconds; the same for all levels."""

    @property
    def error(self) -> float:
        """Relative error; 0.1: a tenth too much or too little."""
        return abs(self.predicted_s / self.measured_s - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRow:
    """One memory case of one family."""

    family: str
    level: float
    rule: str
    encoding: str
    before: float | None
    predicted_bytes: float
    grown_bytes: float

    @property
    def under(self) -> bool:
        """True if the measured value is above the predicted one."""
        return self.predicted_bytes < self.grown_bytes

    @property
    def over(self) -> float:
        """Predicted over measured; at least a megabyte is assumed."""
        return self.predicted_bytes / max(self.grown_bytes, 1e6)


def compare_costs(
    families: Sequence[str], config: CostsConfig, begin: Begin = silent
) -> tuple[list[TimeRow], list[PredictionRow]]:
    """Predict and measure. `begin` is called with each family, its result `config.ticks` times."""
    times: list[TimeRow] = []
    memory: list[PredictionRow] = []
    for family in families:
        tick = begin(family)
        with TemporaryDirectory(prefix="tessera-bench-") as temporary:
            folder = Path(temporary)
            write_task(family, config.batch, folder)
            tick()
            times += _times(family, folder, config)
            tick()
            memory += _memory(family, folder, config, tick)
    return times, memory


def _times(family: str, folder: Path, config: CostsConfig) -> list[TimeRow]:
    levels = ",".join(map(str, LEVELS))
    said = _child(
        "time_levels", folder, levels, str(config.batch), str(config.reps), str(config.burst_s)
    )
    return [
        TimeRow(family=family, calibration_s=said["calibration_s"], **row) for row in said["levels"]
    ]


def _memory(
    family: str, folder: Path, config: CostsConfig, tick: Callable[[], None]
) -> list[PredictionRow]:
    rows = []
    for level, rule, encoding, before in config.cases():
        first = "" if before is None else str(before)
        said = _child("peak_of_round", folder, str(level), str(config.batch), rule, encoding, first)
        rows.append(
            PredictionRow(
                family=family, level=level, rule=rule, encoding=encoding, before=before, **said
            )
        )
        tick()
    return rows


def _child(function: str, folder: Path, *arguments: str) -> dict[str, Any]:
    try:
        said: dict[str, Any] = call_fresh(
            "benchmarks.device.costs.process", function, str(folder), *arguments
        )
    except ProcessFailed as error:
        raise FigureError(f"{function} {' '.join(arguments)} failed: {error}") from error
    return said


def cost_figures(times: Sequence[TimeRow], memory: Sequence[PredictionRow]) -> list[Figure]:
    """Return the figures of `compare_costs`."""
    figures = [
        Figure("costs.time_error", median(row.error for row in times), "×", target=TIME_TARGET),
        Figure(
            "costs.memory_under", sum(row.under for row in memory) / len(memory), "×", target=0.0
        ),
        Figure("costs.memory_over", median(row.over for row in memory), "×"),
    ]
    for family in dict.fromkeys(row.family for row in times):
        own = [row.error for row in times if row.family == family]
        over = [row.over for row in memory if row.family == family]
        figures += [
            Figure(f"costs.{family}.time_error", median(own), "×"),
            Figure(f"costs.{family}.memory_over", median(over), "×"),
        ]
    return figures
