"""Rules side by side over several seeds.

Totals alone say little: a rule that skips more spends less and learns less. So rules are compared
in two more ways, for joules and for bytes: the amount each had spent when it first reached an
accuracy that every run reached (the largest whole percent), and each one's accuracy when it had
spent as much as the thriftiest run spent in total.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

import numpy as np

from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin
from benchmarks.studies.learn.config import LearnConfig
from benchmarks.studies.learn.run import StudyRun, run_rule
from benchmarks.studies.learn.setting import Setting

Spent = Literal["joules", "bytes"]

METHOD = (
    "Phones are emulated: training is real, on this machine; seconds, battery and joules follow "
    "from their profiles and the fleet's scenario, so they are modelled. Joules are the watts of a "
    "training phone times the seconds it trains, calibration included, radio not. Bytes are those "
    "of the model's and the movements' blocks, both ways. Each phone decides by itself, every "
    "round, what it can afford; fedavg takes whole models only."
)


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """One number over seeds."""

    mean: float
    least: float
    greatest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One rule over its seeds."""

    rule: str
    seeds: int
    accuracy: SeedSpread
    """Accuracy after the last round."""
    joules: SeedSpread
    """Total joules; bytes and seconds likewise."""
    bytes: SeedSpread
    train_s: SeedSpread
    waited_s: SeedSpread
    joules_to_common: SeedSpread
    """Joules spent when the common accuracy was first reached; bytes likewise."""
    bytes_to_common: SeedSpread
    accuracy_at_joules: SeedSpread
    """Accuracy when the common joules were spent; likewise for bytes."""
    accuracy_at_bytes: SeedSpread
    trained: float
    """Share of phones that trained in a round."""
    level: float
    """Mean level of those that trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleComparison:
    """All rules, and the points at which they are compared."""

    common_accuracy: float
    """Accuracy that every run reached, in whole percents."""
    common_joules: float
    """Joules that every run spent."""
    common_bytes: float
    summaries: tuple[Summary, ...]


def run_study(setting: Setting, config: LearnConfig, part: Begin) -> Iterator[StudyRun]:
    """Yield every run as it ends. `part` is begun for each and ticks once per round."""
    for rule, seed in config.cases:
        tick = part(f"{rule}, seed {seed}")
        yield run_rule(setting, rule, seed, config.rounds, tick)


def compare_runs(runs: Sequence[StudyRun]) -> RuleComparison:
    """Return one summary per rule, in the order of their first runs; needs at least one run."""
    accuracy = math.floor(100 * min(run.best for run in runs)) / 100
    joules, size = (min(_spent(run, what)[-1] for run in runs) for what in ("joules", "bytes"))
    by_rule: dict[str, list[StudyRun]] = {}
    for run in runs:
        by_rule.setdefault(run.rule, []).append(run)
    return RuleComparison(
        common_accuracy=accuracy,
        common_joules=joules,
        common_bytes=size,
        summaries=tuple(_summary(each, accuracy, joules, size) for each in by_rule.values()),
    )


def _summary(runs: Sequence[StudyRun], accuracy: float, joules: float, size: float) -> Summary:
    rounds = [point for run in runs for point in run.points[1:]]
    trained = Counter[str]()
    for point in rounds:
        trained.update(point.levels)
    times = trained.total()
    return Summary(
        rule=runs[0].rule,
        seeds=len(runs),
        accuracy=_spread(run.last.accuracy for run in runs),
        joules=_spread(run.last.joules for run in runs),
        bytes=_spread(run.last.bytes for run in runs),
        train_s=_spread(run.last.train_s for run in runs),
        waited_s=_spread(run.last.waited_s for run in runs),
        joules_to_common=_spread(spent_until(run, accuracy, "joules") for run in runs),
        bytes_to_common=_spread(spent_until(run, accuracy, "bytes") for run in runs),
        accuracy_at_joules=_spread(accuracy_at(run, joules, "joules") for run in runs),
        accuracy_at_bytes=_spread(accuracy_at(run, size, "bytes") for run in runs),
        trained=times / (times + sum(point.skips for point in rounds)),
        level=sum(int(level) * n for level, n in trained.items()) / 100 / max(1, times),
    )


def _spread(values: Iterable[float]) -> SeedSpread:
    each = list(values)
    return SeedSpread(mean(each), min(each), max(each))


def spent_until(run: StudyRun, accuracy: float, what: Spent) -> float:
    """Amount spent after the first round with this accuracy; the total if there is none."""
    reached = (point for point in run.points if point.accuracy >= accuracy)
    return float(getattr(next(reached, run.last), what))


def accuracy_at(run: StudyRun, spent: float, what: Spent) -> float:
    """Interpolate the run's accuracy when it had spent this much."""
    accuracies = [point.accuracy for point in run.points]
    return float(np.interp(spent, _spent(run, what), accuracies))


def _spent(run: StudyRun, what: Spent) -> list[float]:
    return [float(getattr(point, what)) for point in run.points]


def learn_figures(comparison: RuleComparison) -> list[Figure]:
    """Return the figures of each rule; they have no targets."""
    figures = [
        Figure("learn.common_accuracy", comparison.common_accuracy, "share", better="higher"),
        Figure("learn.common_joules", comparison.common_joules, "J (modelled)"),
        Figure("learn.common_bytes", comparison.common_bytes, "B"),
    ]
    for each in comparison.summaries:
        figures += [
            Figure(
                f"learn.{each.rule}.{name}",
                getattr(each, name).mean,
                unit,
                better="higher" if name.startswith("accuracy") else "lower",
            )
            for name, unit in _FIGURES.items()
        ]
    return figures


_FIGURES = {
    "accuracy": "share",
    "joules": "J (modelled)",
    "bytes": "B",
    "train_s": "s (modelled)",
    "waited_s": "s (modelled)",
    "joules_to_common": "J (modelled)",
    "bytes_to_common": "B",
    "accuracy_at_joules": "share",
    "accuracy_at_bytes": "share",
}
