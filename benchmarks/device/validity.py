"""Rules by which a run counts, in the spirit of MLPerf: what disturbed it is part of its numbers.

A run is *invalid* if

- other programs had the machine when it began, or took part of it while cases were measured;
- the processor was slowed down by heat or power in a case;
- the repeats of a case, each in a process of its own, lie too far apart: the machine had not
  settled;
- it is not complete.

The numbers of an invalid run are shown, and marked wherever they are. A `--quick` run has one
repeat and is never an entry for others to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.device.results import Case, Curve, LearningPoint, Results
from benchmarks.report.sheet import percent

MOST_LOAD = 0.25
"""Programs waiting for each core before the run, above which others had the machine."""
MOST_BUSY = 0.10
"""Share of the machine's processor time that other programs may take during a case."""
MOST_SPREAD = 0.10
"""Largest distance of a case's repeats from their middle, as a share of it."""
LEAST_REPEATS = 3
"""Repeats of every case in an entry for others to compare with."""
SHOWN = 3

QUALITY = {
    "digits": 0.90,
    "mnist": 0.95,
    "fashion_mnist": 0.80,
    "cifar10": 0.45,
    "uci_har": 0.85,
}
"""Accuracy that a training has to reach, by data set: the same goal on all boards."""


def faults(results: Results) -> list[str]:
    """Return the reasons why a run does not count; none of a modelled one, where nothing ran."""
    if results.provenance == "modelled":
        return []
    return list(_faults(results))


def _faults(results: Results) -> Iterator[str]:
    machine = results.machine
    if not results.complete:
        yield "it ended before everything was measured"
    if machine.load is not None and machine.load > MOST_LOAD * max(1.0, machine.cores or 1.0):
        yield f"other programs were running when it began (load {machine.load:.1f})"
    yield from _in_cases(
        results,
        lambda case: case.busy is not None and case.busy > MOST_BUSY,
        f"other programs took more than {MOST_BUSY:.0%} of the processor",
    )
    yield from _in_cases(
        results, lambda case: case.heat.throttled is True, "the processor was slowed down"
    )
    yield from _in_cases(
        results,
        lambda case: case.spread is not None and case.spread > MOST_SPREAD,
        f"the repeats lie more than {MOST_SPREAD:.0%} from their middle",
    )


def _in_cases(results: Results, holds: Callable[[Case], bool], what: str) -> Iterator[str]:
    found = [case for case in results.cases if holds(case)]
    if found:
        names = [f"{c.family} {percent(c.level)} {c.backend} × {c.threads}" for c in found[:SHOWN]]
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        yield f"{what} in {len(found)} of {len(results.cases)} cases ({', '.join(names)}{more})"


def objections(results: Results) -> list[str]:
    """Return the reasons why a run is no entry for others to compare with; none: it is one."""
    found = faults(results)
    if results.provenance == "modelled":
        found.append("it is modelled: no device was run")
    elif results.config.quick:
        found.append("it is a --quick run")
    elif results.config.repeats < LEAST_REPEATS:
        found.append(f"it has fewer than {LEAST_REPEATS} repeats of every case")
    if not results.cases:
        found.append("it has no cases")
    if results.machine.model is None:
        found.append("the machine's model is not known")
    return found


def verdict(results: Results) -> str | None:
    """Return the sentence that marks an invalid run; None: it is valid."""
    found = faults(results)
    return f"Invalid: {'; '.join(found)}." if found else None


def reached(curve: Curve) -> LearningPoint | None:
    """Return the first point of a curve that has the quality of its data set; None: none has."""
    goal = QUALITY.get(curve.data)
    points = (point for point in curve.points if goal is not None and point.accuracy >= goal)
    return next(points, None)
