"""`tessera-bench closing`: from the last movement of a round to the opening of the next."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, names
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.network.closing.measure import ClosingRow

ROUNDS, QUICK_ROUNDS = 8, 2
STARTS, QUICK_STARTS = 5, 2
JOB_NAMES = ("j", "l")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "closing",
        _measure,
        help="from the last movement of a round to the next opening, and the start of `serve`",
        description=(
            "Runs `tessera-coordinator serve` with ram-fed over a real Mosquitto, with devices "
            "that upload movements without training: J, a perceptron 784-200-200-10 on 10 devices, "
            "and L, one of 25 million parameters on 4. Measures the seconds from when the last "
            "movement is on disk to the opening of the next round, and the parts of that; how long "
            "a device and an operator wait for an answer meanwhile; and the seconds from the "
            "start of `serve`, its task compiled, until it answers a device. --quick: under 50 s."
        ),
        example="closing --quick --json closing.json",
        quick="fewer rounds and starts",
    )
    parser.add_argument("--jobs", type=names, metavar="A,B", help="what to run (default j,l)")
    parser.add_argument("--rounds", type=int, metavar="N", help="measured rounds of every job")


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from benchmarks.network.closing.measure import METHOD, closing_figures, measure_closing
    from benchmarks.network.deployed.job import JOBS
    from benchmarks.network.stage.programs import write_bytecode
    from benchmarks.network.stage.tasks import prepare_untrained

    wanted = arguments.jobs or JOB_NAMES
    if unknown := [name for name in wanted if name not in JOB_NAMES]:
        raise UsageError(f"unknown job {unknown[0]!r}; choose from {', '.join(JOB_NAMES)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds}: must be at least 1")
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    starts = QUICK_STARTS if arguments.quick else STARTS
    jobs = [job for job in JOBS if job.name in wanted]
    rows = []
    with (
        progress("closing", len(jobs) * (rounds + starts)) as part,
        TemporaryDirectory(prefix="tessera-bench-") as bytecode,
    ):
        write_bytecode(Path(bytecode))
        for job in jobs:
            task = prepare_untrained(job.widths)
            rows.append(
                measure_closing(job, task, Path(bytecode), rounds=rounds, starts=starts, begin=part)
            )
    return Measured(
        figures=[figure for row in rows for figure in closing_figures(row)],
        shown=list(closing_tables(rows)),
        packages=("numpy", "paho-mqtt", "msgpack"),
        config={"rounds": rounds, "starts": starts, "jobs": [asdict(job) for job in jobs]},
        data={"method": METHOD, "rows": [asdict(row) for row in rows]},
    )


def closing_tables(rows: Sequence[ClosingRow]) -> Iterator[Table]:
    """Make the table of all jobs, then that of the parts of each."""
    yield table_of(
        "From the last movement to the next opening",
        rows,
        ("job", lambda row: row.job.upper()),
        ("model\nMB", lambda row: f"{row.model_mb:.1f}"),
        ("close\ns", lambda row: f"{row.close_s:.2f}"),
        ("most\ns", lambda row: f"{max(each.close_s for each in row.rounds):.2f}"),
        ("device waits\np99, ms", lambda row: f"{row.waits_ms[0]:.0f}"),
        ("operator waits\np99, ms", lambda row: f"{row.waits_ms[1]:.0f}"),
        ("start\ns", lambda row: f"{row.start_s:.2f}"),
        texts=1,
    )
    for row in rows:
        cpu = row.parts_s(cpu=True)
        yield table_of(
            f"Job {row.job.upper()}: parts of a close; some lie within others or run beside them",
            [(part, spent, cpu[part]) for part, spent in row.parts_s().items()],
            ("part", lambda row: row[0]),
            ("ms", lambda row: f"{row[1] * 1e3:.0f}"),
            ("CPU ms", lambda row: f"{row[2] * 1e3:.0f}"),
            texts=1,
        )
