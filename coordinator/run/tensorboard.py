"""Rounds as scalars for TensorBoard, from a served run or a simulation (extra `tensorboard`).

    accuracy/level_100      of every level whose accuracy is known
    devices/trained         and devices/skipped, of the round's devices
    bytes/down              and bytes/up, of encoded blocks
    coverage/min            and the other terms of the papers' theorems (docs/algorithms.md)
    staleness/mean          and staleness/max, of the movements of an asynchronous run
    train/loss              mean over the devices that trained
    spent/joules            and bytes, money, trainings, of a simulated fleet from the beginning

The step is the round. A run that is resumed adds a file to the same folder.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from types import TracebackType

from coordinator.errors import ConfigError
from coordinator.rounds.report import RoundReport


def scalars_of(report: RoundReport) -> dict[str, float]:
    """Return the numbers of a round, by their tags; what is not known is left out."""
    trained = [each for each in report.devices if each.level is not None]
    losses = [each.loss for each in trained if each.loss is not None]
    found = {
        f"accuracy/level_{100 * each.level:g}": each.accuracy
        for each in report.levels
        if each.accuracy is not None
    }
    found |= {
        "devices/trained": len(trained),
        "devices/skipped": len(report.devices) - len(trained),
        "bytes/down": sum(each.bytes_down for each in report.devices),
        "bytes/up": sum(each.bytes_up for each in report.devices),
        "coverage/min": report.coverage_min,
        "coverage/mean": report.coverage_mean,
        "coverage/oldest_uncovered": report.oldest_uncovered,
        "coverage/trained_min": report.trained_coverage_min,
        "coverage/trained_regions": report.trained_regions,
        "round/seconds": report.seconds,
    }
    if losses:
        found["train/loss"] = fmean(losses)
    if report.deviation is not None:
        found["accuracy/own_deviation"] = report.deviation
    if report.oldest_memory is not None:
        found["memory/oldest"] = report.oldest_memory
    terms = ("trust", "trust_alone", "ratio")
    measured = {f"memory/{each}": getattr(report, f"memory_{each}") for each in terms}
    found |= {tag: value for tag, value in measured.items() if value is not None}
    if report.staleness_mean is not None and report.staleness_max is not None:
        found |= {"staleness/mean": report.staleness_mean, "staleness/max": report.staleness_max}
    if report.time_s is not None:
        found["round/simulated_s"] = report.time_s
    return {tag: float(value) for tag, value in found.items()}


def check_tensorboard() -> None:
    """Raise `ConfigError` without the extra."""
    try:
        import tensorboardX  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "TensorBoard's files need an extra: pip install 'tessera-fl[tensorboard]'"
        ) from error


class TensorBoardSink:
    """Writes reports into a folder that `tensorboard --logdir` shows; a context manager."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` without the extra, and `OSError` for the folder."""
        check_tensorboard()
        from tensorboardX import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        # By itself, a file that is opened in the same second replaces the earlier one.
        self._writer = SummaryWriter(str(folder), filename_suffix=f".{secrets.token_hex(4)}")

    def write(self, report: RoundReport, more: Mapping[str, float] | None = None) -> None:
        """Add a round, and more numbers by their tags; they are on disk when this returns."""
        now = time.time()
        for tag, value in {**scalars_of(report), **(more or {})}.items():
            self._writer.add_scalar(tag, value, report.round, walltime=now)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def __enter__(self) -> TensorBoardSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
