"""`tessera-bench runs`: the number of runs that one coordinator process can serve."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.network.many.measure import ManyRows

MOST = 500


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "runs",
        _measure,
        help="runs held by one coordinator process",
        description=(
            "Serves one small run, and then 50 at once, in one coordinator process over a "
            "Mosquitto, with two devices for each run: CPU, memory and threads of the process, "
            "seconds of a round. The devices share a few processes and this machine. Needs Linux "
            "and mosquitto; folders are made where temporary files are (TMPDIR) and deleted. Takes "
            "a minute or two; --quick, with two rounds of each run, under one."
        ),
        example="runs --runs 20 --json runs.json",
        quick="fewer rounds",
    )
    parser.add_argument("--runs", type=int, metavar="N", help="number of runs (50)")


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict, replace

    from benchmarks.network.stage.processes import MEASURABLE

    number = arguments.runs
    if number is not None and not 2 <= number <= MOST:
        raise UsageError(f"--runs {number}: from 2 to {MOST}")
    if not MEASURABLE:
        raise UsageError("CPU and memory of programs are read from /proc, which is not here")

    from benchmarks.network.many import measure

    config = measure.QUICK if arguments.quick else measure.FULL
    if number is not None:
        config = replace(config, runs=number)
    with progress("runs", config.ticks) as part:
        rows = measure.measure_many(config, part)

    many = rows.many
    summary = (
        f"{many.held} of {many.runs} runs held, all served after {many.started_s:.1f} s; "
        f"{many.rounds_per_s:.1f} rounds a second together"
    )
    return Measured(
        figures=list(measure.many_figures(rows)),
        shown=[summary, _table(rows)],
        packages=("onnxruntime", "numpy", "paho-mqtt"),
        config=asdict(config),
        data={"method": measure.METHOD, **asdict(rows)},
    )


def _table(rows: ManyRows) -> Table:
    return table_of(
        "One coordinator process",
        [rows.alone, rows.many],
        ("runs", lambda row: str(row.runs)),
        ("held", lambda row: str(row.held)),
        ("idle\n% of a core", lambda row: f"{row.idle_share * 100:.1f}"),
        ("round\ns", lambda row: f"{row.round_s:.2f}"),
        ("rounds\na second", lambda row: f"{row.rounds_per_s:.1f}"),
        ("CPU ms\na round", lambda row: f"{row.coordinator_cpu_s * 1e3:.1f}"),
        ("broker CPU\nms a round", lambda row: f"{row.broker_cpu_s * 1e3:.1f}"),
        ("RSS\nMB", lambda row: f"{row.rss_mb:.0f}"),
        ("threads", lambda row: str(row.threads)),
    )
