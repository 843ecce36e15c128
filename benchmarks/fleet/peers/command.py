"""`tessera-bench peers`: the same job on other simulators."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.fleet.peers.measure import PeerRow

TURNS, QUICK_TURNS = 8, 2


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "peers",
        _run,
        help="do one job on other simulators and on ours, and compare their speed",
        description=(
            "Trains a perceptron with 100 of 1,000 devices a round on our simulation, on Flower's "
            "and on Apple's pfl, as far as they are installed, and as a bare torch loop on one "
            "thread. All take turns in one run. A peer may be installed for another Python, so "
            "that what it pins does not meet what we pin."
        ),
        example="peers --flower-python ~/flower/bin/python --pfl-python ~/pfl/bin/python",
        quick="fewer turns, more noise",
    )
    for name, title in (("flower", "Flower"), ("pfl", "pfl")):
        parser.add_argument(
            f"--{name}-python",
            metavar="PATH",
            help=f"Python that has {title} and torch (default: this one)",
        )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="processes that train (default 2)"
    )
    parser.add_argument("--turns", type=int, metavar="N", help=f"rounds each (default {TURNS})")


def _run(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.fleet.peers.job import PeerJob
    from benchmarks.fleet.peers.measure import measure_peers, peers_figures, ticks
    from benchmarks.report.options import UsageError

    turns = arguments.turns or (QUICK_TURNS if arguments.quick else TURNS)
    if turns < 1 or arguments.processes < 1:
        raise UsageError("--turns and --processes must be at least 1")
    job = PeerJob(processes=arguments.processes)
    given = {"flower": arguments.flower_python, "pfl": arguments.pfl_python}
    pythons = {name: python for name, python in given.items() if python is not None}
    with progress("peers", ticks(turns)) as part:
        rows = measure_peers(job, turns, pythons, part)
    return Measured(
        figures=peers_figures(rows),
        shown=[_table(rows, job.processes)],
        closing=[f"{row.name} is not installed: {row.install}" for row in rows if row.install],
        packages=("torch", "onnxruntime", "numpy"),
        config={**asdict(job), "turns": turns},
        data={"rows": [asdict(row) for row in rows]},
    )


def _table(rows: Sequence[PeerRow], processes: int) -> Table:
    def number(value: float | None, shape: str) -> str:
        return "not installed" if value is None else format(value, shape)

    return table_of(
        f"Device-steps per second of one job; simulators train in {processes} processes",
        rows,
        ("simulator", lambda row: f"{row.name} {row.version}".strip()),
        ("per second", lambda row: number(row.steps_per_s, ",.0f")),
        ("over bare torch", lambda row: number(row.over_bare, ".2f")),
        ("per CPU second", lambda row: number(row.cpu_over_bare, ".2f")),
        texts=1,
    )
