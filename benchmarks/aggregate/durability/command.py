"""`tessera-bench durability`: what survives crashes, its cost, and how soon a run is back."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.aggregate.durability.enumeration import PointOutcome
    from benchmarks.report.figures import Figure

QUICK_POINTS = 90
SHOWN = 10
"""Most points that did not survive to print."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    add_command(
        commands,
        "durability",
        _measure,
        help="what survives crashes, the cost of fsync, and seconds to recover",
        description=(
            "Fails every file operation and message of small runs of ram-fed, ccfl-2, fed-raa and "
            "fedbuff in every way (kill, error, torn write, full disk, power cut), restarts and "
            "compares them with undisturbed ones: survived of tried. Then the time of a round "
            "with and without fsync, as a ratio. Then the seconds from the start of a process "
            "until it answers the first bid, with a model of 100 MB and 100 devices in memory. "
            "Takes some minutes and 4 GB of free disk; --quick, with a sample of the points, a "
            "model of 4 MB and 20 devices, under one minute: it says nothing of larger ones."
        ),
        example="durability --quick --json durability.json",
        quick="a sample of the points, a smaller model, fewer devices",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.aggregate.durability import fsync, recovery
    from benchmarks.aggregate.durability.crash import survivors, try_all
    from benchmarks.aggregate.durability.enumeration import all_points, sampled

    quick: bool = arguments.quick
    points = all_points(distinct=not quick)
    if quick:
        points = sampled(points, QUICK_POINTS)
    outcomes: list[PointOutcome] = []
    with progress("points", len(points)) as part:
        tick = part(f"{len(points):,} points")
        for outcome in try_all(points, 1 if quick else os.cpu_count() or 1):
            outcomes.append(outcome)
            tick()
    syncing = fsync.FsyncConfig(megabytes=4.0, turns=3) if quick else fsync.FsyncConfig()
    with progress("fsync", syncing.ticks) as part:
        cost = fsync.measure_fsync(syncing, part)
    trial = recovery.RecoveryTrial()
    if quick:
        trial = recovery.RecoveryTrial(megabytes=4.0, devices=20, starts=3)
    with progress("recovery", trial.ticks) as part:
        times = recovery.measure_answers(trial, part)
    found = list(survivors(outcomes))
    size = f"{times.devices} devices in memory, a model of {times.megabytes:g} MB"
    return Measured(
        figures=[
            *_survival_figures(outcomes),
            *fsync.fsync_figures(cost),
            *recovery.recovery_figures(times, quick=quick),
        ],
        shown=[
            _survival_table(found),
            f"A round takes {cost.synced_s:.3f} s, and {cost.unsynced_s:.3f} s without fsync: "
            f"{cost.ratio:.2f} times as long (a model of {cost.megabytes:g} MB, without training)",
            f"The first bid is answered {times.answered_s:.2f} s after the start of a process "
            f"({size}), of which {times.cpu_s:.2f} s are of the processor",
            *_lost(outcomes),
        ],
        packages=("numpy", "safetensors"),
        config={"points": len(points), "fsync": asdict(syncing), "recovery": asdict(trial)},
        data={
            "method": {"fsync": fsync.METHOD, "recovery": recovery.METHOD},
            "points": [
                {"kind": kind, "survived": survived, "tried": tried}
                for kind, survived, tried in found
            ],
            "lost": [asdict(outcome) for outcome in outcomes if not outcome.survived],
            "fsync": asdict(cost),
            "recovery": asdict(times),
        },
    )


def _survival_figures(outcomes: Sequence[PointOutcome]) -> list[Figure]:
    from benchmarks.report.figures import Figure

    survived = sum(outcome.survived for outcome in outcomes)
    return [
        Figure("durability.points.tried", len(outcomes), "points", better="higher"),
        Figure(
            "durability.points.survived",
            100 * survived / len(outcomes),
            "%",
            target=100.0,
            better="higher",
        ),
    ]


def _survival_table(found: Sequence[tuple[str, int, int]]) -> Table:
    table = make_table("Points that survived", "rule and fault", "survived", "tried")
    for kind, survived, tried in found:
        table.add_row(kind, f"{survived:,}", f"{tried:,}")
    table.add_row(
        "all", f"{sum(each[1] for each in found):,}", f"{sum(each[2] for each in found):,}"
    )
    return table


def _lost(outcomes: Sequence[PointOutcome]) -> list[str]:
    """Return a line for each of the first points that did not survive."""
    lost = [outcome for outcome in outcomes if not outcome.survived]
    return [f"{each.point}: {each.operation}: {each.problem}" for each in lost[:SHOWN]]
