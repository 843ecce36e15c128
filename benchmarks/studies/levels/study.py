"""The runs of a study, and what they say.

A way is compared with others at its own learning rate: the one with the best validation accuracy of
seed 0, at the best level that the way makes usable. Further seeds use that rate. The level to
deploy is chosen by validation too; accuracies are those of the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from benchmarks.report.figures import Figure
from benchmarks.studies.levels.fleets import ALTERNATIVES, FLEETS, UPPER_BOUND, WAYS
from benchmarks.studies.levels.settings import SETTINGS
from benchmarks.studies.levels.trial import Trial, TrialOutcome

RECOMMENDED = "growing"
"""The way whose results the aims are about."""
WITHIN = 3.0
"""Points that the recommended level may be below everybody at full level."""
SMALLEST = "0.25"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The runs that are asked for."""

    settings: tuple[str, ...]
    fleets: tuple[str, ...]
    ways: tuple[str, ...]
    seeds: int = 1
    rates: int | None = None
    """Learning rates to try of each setting, the middle ones first; None: all."""

    def next_case(self, done: Mapping[Trial, TrialOutcome]) -> Trial | None:
        """Return a run that is not done yet; None: all are. Rates come before further seeds."""
        return next((case for case in self.cases(done) if case not in done), None)

    def cases(self, done: Mapping[Trial, TrialOutcome]) -> Iterator[Trial]:
        """Yield the runs, in order; those of further seeds once the rate is known."""
        for seed in range(self.seeds):
            for setting in self.settings:
                for fleet in self.fleets:
                    for way in self.ways:
                        yield from self._of(Trial(setting, fleet, way, 0.0, seed), done)

    def count(self) -> int:
        """Number of runs in all."""
        pairs = len(self.fleets) * len(self.ways)
        tried = sum(len(self._rates(name)) for name in self.settings) * pairs
        return tried + (self.seeds - 1) * len(self.settings) * pairs

    def _of(self, case: Trial, done: Mapping[Trial, TrialOutcome]) -> Iterator[Trial]:
        tried = [
            Trial(case.setting, case.fleet, case.way, rate, 0) for rate in self._rates(case.setting)
        ]
        if case.seed == 0:
            yield from tried
        elif all(each in done for each in tried):
            best = best_rate([done[each] for each in tried])
            yield Trial(case.setting, case.fleet, case.way, best, case.seed)

    def _rates(self, setting: str) -> list[float]:
        rates = SETTINGS[setting].rates
        # Of two that are equally far from the middle, the larger: budgets are short.
        middle = sorted(rates, key=lambda rate: (abs(rates.index(rate) - len(rates) // 2), -rate))
        return middle[: self.rates]


@dataclass(frozen=True, slots=True)
class WayStanding:
    """A way in one setting and fleet, at its best rate: means over seeds, in percent."""

    way: str
    rate: float
    seeds: int
    by_level: dict[str, float]
    """Accuracy of every level that the way makes usable."""
    deploy: str
    """The level to deploy: the best in validation."""
    accuracy: float
    """Accuracy of the level to deploy."""
    low: float
    high: float
    """Lowest and highest accuracy of that level over seeds."""
    rounds: float
    joules: float


def usable(outcome: TrialOutcome) -> list[str]:
    """Return the levels that the outcome's way makes usable."""
    own = FLEETS[outcome.case.fleet].levels(SETTINGS[outcome.case.setting].devices)
    return [f"{level:g}" for level in WAYS[outcome.case.way].delivers(own)]


def best_rate(outcomes: Sequence[TrialOutcome]) -> float:
    """Return the learning rate with the best validation accuracy of a usable level."""
    best = max(
        outcomes, key=lambda each: max(each.validation.get(level, 0.0) for level in usable(each))
    )
    return best.case.rate


def standings(outcomes: Iterable[TrialOutcome], setting: str, fleet: str) -> list[WayStanding]:
    """Return every way's standing in a setting and fleet, in the order of `WAYS`."""
    of = [each for each in outcomes if (each.case.setting, each.case.fleet) == (setting, fleet)]
    found = []
    for way in WAYS:
        tried = [each for each in of if each.case.way == way]
        first = [each for each in tried if each.case.seed == 0]
        if first:
            rate = best_rate(first)
            found.append(_standing([each for each in tried if each.case.rate == rate]))
    return found


def _standing(outcomes: Sequence[TrialOutcome]) -> WayStanding:
    levels = usable(outcomes[0])
    checked = {
        level: mean(each.validation.get(level, 0.0) for each in outcomes) for level in levels
    }
    deploy = max(levels, key=lambda level: (checked[level], -float(level)))
    reached = [100 * each.test.get(deploy, 0.0) for each in outcomes]
    return WayStanding(
        way=outcomes[0].case.way,
        rate=outcomes[0].case.rate,
        seeds=len(outcomes),
        by_level={
            level: 100 * mean(each.test.get(level, 0.0) for each in outcomes) for level in levels
        },
        deploy=deploy,
        accuracy=mean(reached),
        low=min(reached),
        high=max(reached),
        rounds=mean(each.rounds for each in outcomes),
        joules=mean(each.joules for each in outcomes),
    )


@dataclass(frozen=True, slots=True)
class Aims:
    """The aims in one setting and fleet, in points; None: not all of it was run."""

    over: dict[str, float | None]
    """Level to deploy minus each thing a user would do instead, at equal energy."""
    under_full: float | None
    """Everybody at full level, at equal rounds, minus the level to deploy."""
    smallest_over: float | None
    """The smallest submodel minus a model of that size trained by everybody, at equal energy."""

    @property
    def values(self) -> list[float | None]:
        """All of them, as a row."""
        return [*self.over.values(), self.under_full, self.smallest_over]


def aims_of(found: Sequence[WayStanding], way: str = RECOMMENDED) -> Aims:
    """Return the aims of a way from the standings of one setting and fleet.

    A way with server momentum is compared only with others that were run with it too, and those
    count with it or without, whichever is better.
    """
    by = {each.way: each for each in found}
    ours = by.get(way)

    def ahead(name: str) -> float | None:
        twin = f"{name}-momentum"
        known = [by[each] for each in (name, twin) if each in by]
        if ours is None or not known or (WAYS[way].optimizer and twin not in by):
            return None
        return ours.accuracy - max(each.accuracy for each in known)

    full, small = ahead(UPPER_BOUND), ahead("all-smallest")
    return Aims(
        {name: ahead(name) for name in ALTERNATIVES},
        None if full is None else -full,
        # The smallest submodel's accuracy in place of that of the level to deploy.
        None if small is None or ours is None else small + ours.by_level[SMALLEST] - ours.accuracy,
    )


def mean_aims(all_aims: Sequence[Aims]) -> list[float | None]:
    """Return the mean of every aim over the settings and fleets in which it is known."""
    empty = Aims(dict.fromkeys(ALTERNATIVES), None, None)
    columns = zip(*(each.values for each in [*all_aims, empty]), strict=True)
    known = ([value for value in column if value is not None] for column in columns)
    return [mean(values) if values else None for values in known]


def study_figures(outcomes: Sequence[TrialOutcome]) -> list[Figure]:
    """Return the aims as means over all settings and fleets in which they are known."""
    pairs = {(each.case.setting, each.case.fleet) for each in outcomes}
    means = mean_aims([aims_of(standings(outcomes, *pair)) for pair in sorted(pairs)])
    names = [*(f"over_{name}" for name in ALTERNATIVES), "under_full", "smallest_over"]
    return [
        Figure(
            name=f"levels.{name}".replace("-", "_"),
            value=value,
            unit="points",
            target=WITHIN if name == "under_full" else 0.0,
            better="lower" if name == "under_full" else "higher",
        )
        for name, value in zip(names, means, strict=True)
        if value is not None
    ]
