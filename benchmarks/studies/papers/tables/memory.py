"""The question behind RAM-Fed: when does memory help, and is the adaptive rule safe by itself?

Rates, dampings, participation and levels, each rule at its own best rate on validation data. The
rule was chosen on other data and other code (docs/algorithms.md); these runs confirm it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.fleet.study import Study
from benchmarks.studies.papers.cell import (
    CellOutcome,
    CellPlace,
    Outcomes,
    PaperCell,
    PaperTable,
    Ran,
)
from benchmarks.studies.papers.page import markdown, mean_and_spread
from benchmarks.studies.papers.running import LAST, rounded, study_of
from benchmarks.studies.papers.tables.shared import settings
from coordinator.errors import CoordinatorError

RATES = (0.0125, 0.025, 0.05, 0.1, 0.2)
RA_FED, ADAPTIVE = "ra-fed", "ram-fed, adaptive"
RULES: Mapping[str, Mapping[str, Any]] = {
    RA_FED: {"rule.name": "ra-fed"},
    "ram-fed, ρ = 1": {"rule.name": "ram-fed", "rule.options.damping": 1.0},
    "ram-fed, ρ = 0.8": {"rule.name": "ram-fed", "rule.options.damping": 0.8},
    ADAPTIVE: {"rule.name": "ram-fed", "rule.options.damping": "adaptive"},
}
FIXED = tuple(rule for rule in RULES if rule not in (RA_FED, ADAPTIVE))
LEVELS = {"whole models": 1.0, "L": 0.5, "S": 0.25}
SETTINGS = ((2, "whole models"), (2, "L"), (2, "S"), (5, "L"), (5, "S"))
"""Devices in a round, of ten, and their level."""
GAIN = 1.0
"""Points over ra-fed from which on a rule counts as one with a gain."""
KEPT = 0.8
"""Share of such a gain that the adaptive rule is to keep."""
EVERY = 2
"""Rounds from one measurement to the next, in the last tenth of a run."""

BASE = settings(
    data_name="fashion_mnist",
    data_partition="dirichlet",
    data_alpha=0.1,
    data_least=10,
    data_samples=10_000,
    model_name="mlp-200",
    fleet_devices=10,
    run_batch_size=32,
    run_momentum=0.5,
    run_steps=5,
    run_rounds=100,
    run_rescale=0.5,
)
QUICK = {"run.rounds": 40}
QUICK_CELLS = {((2, "L"), 0.025), ((2, "L"), 0.2)}


def _part(participants: int, level: str) -> str:
    return f"{participants} of 10 devices, {level}"


def _column(rate: float) -> str:
    return f"rate {rate:g}"


def _cells() -> Iterator[PaperCell]:
    for place in SETTINGS:
        for name, rule in RULES.items():
            for rate in RATES:
                yield PaperCell(
                    place=CellPlace(_part(*place), name, _column(rate)),
                    settings={
                        **BASE,
                        **rule,
                        "round.participants": place[0],
                        "fleet.levels": [LEVELS[place[1]]],
                        "run.learning_rate": rate,
                    },
                    quick=QUICK if (place, rate) in QUICK_CELLS else None,
                )


def run_memory_cell(cell: PaperCell, seed: int, data: Path | None) -> Ran:
    """Run a cell; `last` is on the test half of the held-out images, `validation` on the other."""
    study = Study(study_of(cell, seed), data)
    begins = cell.settings["run.rounds"] * (1 - LAST)
    found: dict[str, list[float]] = {}
    failed = ""
    try:
        for each in study.run():
            report = each.report
            terms = {
                "trust": report.memory_trust,
                "alone": report.memory_trust_alone,
                "ratio": report.memory_ratio,
            }
            if report.round > begins and report.round % EVERY == 0:
                outcome = study.outcome()
                terms |= {
                    "validation": 100 * outcome.validation[1.0],
                    "last": 100 * outcome.test[1.0],
                }
            for name, value in terms.items():
                if value is not None:
                    found.setdefault(name, []).append(value)
    except CoordinatorError as error:  # nobody's training succeeds any more
        failed = str(error)[:200]
    values = {name: fmean(numbers) for name, numbers in found.items()}
    return Ran(values=rounded(values), more={"failed": failed} if failed else {})


# -- the numbers -------------------------------------------------------------------------------

RunsByRate = Mapping[str, Sequence[CellOutcome]]
"""RunsByRate of a rule in a setting, by rate."""


def best_rate(runs: RunsByRate) -> str | None:
    """Return the rate with the best mean accuracy on validation data; None without runs."""
    means = {
        rate: fmean(each.values.get("validation", 0.0) for each in found)
        for rate, found in runs.items()
        if found
    }
    return max(means, key=lambda rate: means[rate], default=None)


def gains(runs: Sequence[CellOutcome], base: Sequence[CellOutcome]) -> list[float]:
    """Return the differences to other runs, seed by seed."""
    other = {each.seed: each.values.get("last", 0.0) for each in base}
    return [each.values.get("last", 0.0) - other[each.seed] for each in runs if each.seed in other]


def _of(done: Outcomes, part: str, rule: str) -> dict[str, Sequence[CellOutcome]]:
    return {_column(rate): done.get(CellPlace(part, rule, _column(rate)), ()) for rate in RATES}


def _difference(runs: Sequence[CellOutcome], base: Sequence[CellOutcome]) -> str:
    found = gains(runs, base)
    if not found:
        return "–"
    text = f"{fmean(found):+.1f}"
    return f"{text} ± {stdev(found):.1f}" if len(found) > 1 else text


def _noise(base: Sequence[CellOutcome]) -> float:
    known = [each.values.get("last", 0.0) for each in base]
    return stdev(known) if len(known) > 1 else 0.0


def show(_: PaperTable, done: Outcomes) -> str:
    """Print each rule at its own best rate, all rates, and the aims."""
    parts = [_part(*each) for each in SETTINGS if any(_of(done, _part(*each), RA_FED).values())]
    return "\n\n".join((_best_sheet(done, parts), _rates_sheet(done, parts), aims(done)))


def _best_sheet(done: Outcomes, parts: Sequence[str]) -> str:
    head = [
        "each rule at its own best rate",
        "ra-fed, %",
        *(rule for rule in RULES if rule != RA_FED),
    ]
    rows = []
    for part in parts:
        base = _of(done, part, RA_FED)
        own = best_rate(base) or ""
        line = [part, f"{mean_and_spread(base.get(own, ()), 'last')} ({own.removeprefix('rate ')})"]
        for rule in head[2:]:
            runs = _of(done, part, rule)
            best = best_rate(runs) or ""
            gain = _difference(runs.get(best, ()), base.get(own, ()))
            line.append(f"{gain} ({best.removeprefix('rate ')})")
        rows.append(line)
    return markdown(head, rows)


def _rates_sheet(done: Outcomes, parts: Sequence[str]) -> str:
    head = [
        "all rules at the same rate",
        "rate",
        "ra-fed, %",
        *(rule for rule in RULES if rule != RA_FED),
    ]
    head += ["λ", "μ", "‖ū‖ / ‖D̄‖"]
    rows = []
    for part in parts:
        for rate in map(_column, RATES):
            base = _of(done, part, RA_FED)[rate]
            if not base:
                continue
            adaptive = _of(done, part, ADAPTIVE)[rate]
            rows.append(
                [
                    part,
                    rate.removeprefix("rate "),
                    mean_and_spread(base, "last"),
                    *(_difference(_of(done, part, rule)[rate], base) for rule in head[3:-3]),
                    *(_mean(adaptive, name) for name in ("trust", "alone", "ratio")),
                ]
            )
    return markdown(head, rows)


def _mean(runs: Sequence[CellOutcome], name: str) -> str:
    known = [each.values[name] for each in runs if name in each.values]
    return f"{fmean(known):.2f}" if known else "–"


def aims(done: Outcomes) -> str:
    """Say where the adaptive rule is below ra-fed, and where it keeps too little of a gain."""
    below, short = [], []
    cells = gaining = 0
    for part in (_part(*each) for each in SETTINGS):
        base, adaptive = _of(done, part, RA_FED), _of(done, part, ADAPTIVE)
        for rate in map(_column, RATES):
            found = gains(adaptive[rate], base[rate])
            if len(found) < 2:
                continue
            cells += 1
            if fmean(found) < -_noise(base[rate]):
                below.append(f"{part}, {rate}")
            fixed = [gains(_of(done, part, rule)[rate], base[rate]) for rule in FIXED]
            best = max((fmean(each) for each in fixed if each), default=0.0)
            gaining += best > GAIN
            if best > GAIN and fmean(found) < KEPT * best:
                short.append(
                    f"{part}, {rate}, where ra-fed has {mean_and_spread(base[rate], 'last')} %"
                )
    if not cells:
        return ""
    return (
        f"The adaptive rule is below ra-fed by more than one standard deviation of ra-fed over "
        f"seeds in {len(below)} of {cells} settings and rates{_listed(below)}. At {gaining} of "
        f"them a fixed damping gains more than {GAIN:g} point over ra-fed; the adaptive rule keeps "
        f"less than {100 * KEPT:.0f} % of the better one's gain at {len(short)}{_listed(short)}."
    )


def _listed(names: Sequence[str]) -> str:
    return f" ({'; '.join(names)})" if names else ""


MEMORY = PaperTable(
    name="memory",
    title="When memory helps",
    paper="RAM-Fed",
    about="""\
Our own question, with no value in the paper: ten devices with clothes by Dir(0.1), 784-200-10,
batches of 32, momentum 0.5, five steps, 100 rounds; two or five devices a round, drawn anew; `L`
trains two of four regions, `S` one, with `coverage` masks and `rescale = 0.5`, so that regions stay
untrained in a round only with two devices at `S`. Accuracy is the mean of the last tenth of the
rounds. Half of the held-out images are for validation, by which each rule's rate is chosen; the
numbers are of the other half. The first table has the best rate in brackets. Differences are to
ra-fed, seed by seed. λ and μ are the adaptive rule's trust in memory, as means over the run, and
the last column is the length of the remembered step relative to the fresh one
([algorithms.md](algorithms.md#trust-in-memory)).""",
    cells=tuple(_cells()),
    run=run_memory_cell,
    show=show,
    expected_s=6.0,
    folders=("fashion_mnist",),
)
TABLES = (MEMORY,)
