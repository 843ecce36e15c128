"""Crashes at every step of a run: `bash scripts/crash`.

bash scripts/crash [--case ram-fed] [--kind lost] [--most 500] [--workers 2]
bash scripts/crash --only ram-fed:137:lost:zeros       one point again, with the run's log
bash scripts/crash --processes                         real processes, ended with kill -9
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import groupby
from multiprocessing import get_context

from benchmarks.aggregate.durability.enumeration import (
    Point,
    PointOutcome,
    act_out,
    all_points,
    parse_point,
    sampled,
    try_point,
)
from benchmarks.aggregate.durability.site import CASES

TOLD_S = 1.0
"""Seconds between two lines of progress."""
CHUNK = 16
"""Points that a worker takes at a time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is the exit code."""
    options = _parse(arguments)
    if options.only is not None:
        return _replay(options.only)
    points = all_points(options.case or CASES)
    if options.kind:
        points = [point for point in points if point.fault.kind in options.kind]
    if options.most is not None:
        points = sampled(points, options.most)
    begun = time.monotonic()
    outcomes = list(_told(try_all(points, options.workers), len(points)))
    failed = [outcome for outcome in outcomes if not outcome.survived]
    for outcome in failed:
        print(f"{outcome.point}: {outcome.operation}: {outcome.problem}")
        print(f"    again: bash scripts/crash --only {outcome.point}")
    for case, survived, tried in survivors(outcomes):
        print(f"{case}: {survived:,} of {tried:,} points survived")
    seconds = time.monotonic() - begun
    print(f"survived {len(outcomes) - len(failed):,} of {len(outcomes):,} in {seconds:.0f} s")
    return 1 if failed else 0


def try_all(points: Sequence[Point], workers: int) -> Iterator[PointOutcome]:
    """Try points in as many processes, in their order."""
    if workers <= 1:
        yield from map(try_point, points)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(try_point, points, chunksize=CHUNK)


def survivors(outcomes: Sequence[PointOutcome]) -> Iterator[tuple[str, int, int]]:
    """Return (case, survived, tried) for every case and kind of fault."""
    for name, group in groupby(sorted(outcomes, key=_kind_of), key=_kind_of):
        found = list(group)
        yield name, sum(outcome.survived for outcome in found), len(found)


def _kind_of(outcome: PointOutcome) -> str:
    case, _, kind, *_ = outcome.point.split(":")
    return f"{case} {kind}"


def _told(outcomes: Iterator[PointOutcome], total: int) -> Iterator[PointOutcome]:
    """Tell on the way how many survived."""
    due, survived = time.monotonic() + TOLD_S, 0
    for number, outcome in enumerate(outcomes, 1):
        survived += outcome.survived
        if time.monotonic() >= due:
            due = time.monotonic() + TOLD_S
            print(
                f"\r{number:,} of {total:,} tried, {survived:,} survived ", end="", file=sys.stderr
            )
        yield outcome
    print("\r", end="", file=sys.stderr)


def _replay(text: str) -> int:
    point = parse_point(text)
    logging.basicConfig(level=logging.INFO, format="    %(levelname)s %(message)s")
    outcome, deaths = act_out(point)
    for number, death in enumerate(deaths, 1):
        print(f"process {number}: {death}")
    print(f"{outcome.point}: {outcome.operation}: {outcome.problem or 'survived'}")
    return 0 if outcome.survived else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash scripts/crash",
        description=(
            "Fails every file operation and ends the coordinator at every message of small runs of "
            f"{', '.join(CASES)}, in memory: kill, error, torn and short writes, a full disk, and "
            "a power cut that loses what was not synced. Each run is then started again, finished, "
            "and compared with one that nobody disturbed: the model's bits, the history, the "
            "receipts. Exit code 1 means that something was lost."
        ),
    )
    parser.add_argument("--case", action="append", choices=CASES, help="only these runs")
    kinds = ("kill", "unsent", "torn", "short", "error", "full", "lost")
    parser.add_argument("--kind", action="append", choices=kinds, help="only these faults")
    parser.add_argument("--most", type=int, metavar="N", help="only so many, spread over all")
    parser.add_argument("--only", metavar="POINT", help="one point, as printed, with the run's log")
    workers = os.cpu_count() or 1
    parser.add_argument("--workers", type=int, default=workers, help="default %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
