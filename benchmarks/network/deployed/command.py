"""`tessera-bench deployed`: CPU and memory of deployed devices beside a bare torch loop, and what
programs take to start.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, names
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.network.deployed.measure import DeployedRow
    from benchmarks.network.deployed.start import StartRow

PARTS = ("start", "j", "l")
TURNS, QUICK_TURNS = 8, 3


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "deployed",
        _measure,
        help="CPU and memory of deployed devices, beside a bare torch loop",
        description=(
            "Deploys two jobs as programs on their own broker: J, a perceptron 784-200-200-10 on "
            "10 devices that take 20 steps a round, and L, a perceptron of 25 million parameters "
            "on 4 devices that take 4. Compares the CPU time of a device's program in a round with "
            "that of a bare torch loop for the same steps, in the same run, and says which parts "
            "of the device it goes to. Before that it starts programs: their help, and a device "
            "until it is connected, beside `import numpy`. With --against, every other device runs "
            "the code of another checkout, in the same rounds."
        ),
        example="deployed --quick --parts j",
        quick="fewer rounds",
    )
    parser.add_argument(
        "--parts", type=names, metavar="A,B", help=f"what to measure (default {','.join(PARTS)})"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="measured rounds of every job")
    parser.add_argument(
        "--against", type=Path, metavar="DIR", help="another checkout, to be compared with this one"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.network.deployed.job import JOBS, QUICK_ROUNDS

    wanted = arguments.parts or PARTS
    if unknown := [name for name in wanted if name not in PARTS]:
        raise UsageError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    if arguments.rounds is not None and arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds}: must be at least 1")
    if arguments.against is not None and not (arguments.against / "edge_sdk").is_dir():
        raise UsageError(f"--against {arguments.against}: there is no folder edge_sdk in it")

    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    from benchmarks.network.deployed.measure import (
        METHOD,
        deployed_figures,
        measure_deployed,
        ticks,
    )
    from benchmarks.network.deployed.start import measure_start, start_figures
    from benchmarks.network.stage.processes import MEASURABLE
    from benchmarks.network.stage.programs import write_bytecode
    from benchmarks.network.stage.tasks import prepare_perceptron

    if not MEASURABLE:
        raise UsageError("there is no /proc here to read CPU times from: run it on Linux")
    jobs = [job for job in JOBS if job.name in wanted]
    if arguments.quick:
        jobs = [job.with_rounds(QUICK_ROUNDS[job.name]) for job in jobs]
    if arguments.rounds is not None:
        jobs = [job.with_rounds(arguments.rounds) for job in jobs]
    turns = (QUICK_TURNS if arguments.quick else TURNS) if "start" in wanted else 0
    rows, starts = [], list["StartRow"]()
    with (
        progress("deployed", sum(map(ticks, jobs)) + (turns and turns + 1)) as part,
        TemporaryDirectory(prefix="tessera-bench-") as bytecode,
    ):
        if turns:
            starts = measure_start(turns, Path(bytecode), part)
        write_bytecode(Path(bytecode))
        for job in jobs:
            task = prepare_perceptron(job.widths)
            rows.append(measure_deployed(job, task, Path(bytecode), arguments.against, part))
    return Measured(
        figures=[
            *start_figures(starts),
            *(
                figure
                for row, job in zip(rows, jobs, strict=True)
                for figure in deployed_figures(row, job)
            ),
        ],
        shown=[*_start_tables(starts), *_tables(rows)],
        packages=("torch", "onnxruntime", "numpy", "paho-mqtt"),
        config={"jobs": [asdict(job) for job in jobs]},
        data={
            "method": METHOD,
            "start": [asdict(row) for row in starts],
            "rows": [asdict(row) for row in rows],
        },
    )


def _start_tables(rows: Sequence[StartRow]) -> Iterator[Table]:
    if rows:
        yield table_of(
            "CPU of the start of programs",
            rows,
            ("program", lambda row: row.program),
            ("CPU ms", lambda row: f"{row.cpu_ms:.0f}"),
            ("÷ import\nnumpy", lambda row: f"{row.over_numpy:.2f}"),
            texts=1,
        )


def _tables(rows: Sequence[DeployedRow]) -> Iterator[Table]:
    if not rows:
        return
    yield table_of(
        "Deployed rounds; CPU of a device and round",
        [(row, each) for row in rows for each in row.checkouts],
        ("job", lambda pair: pair[0].job.upper()),
        ("code", lambda pair: pair[1].checkout),
        ("round\ns", lambda pair: f"{pair[0].wall_s:.2f}"),
        ("bare loop\ns", lambda pair: f"{pair[0].bare_wall_s:.2f}"),
        ("bare loop\nCPU ms", lambda pair: f"{pair[0].bare_cpu_s * 1e3:.1f}"),
        ("device\nCPU ms", lambda pair: f"{pair[1].cpu_s * 1e3:.1f}"),
        ("÷ bare", lambda pair: f"{pair[1].over_bare:.2f}"),
        ("peak\nMB", lambda pair: f"{pair[1].peak_mb:.0f}"),
        ("fsyncs", lambda pair: f"{pair[1].fsyncs:.1f}"),
        texts=2,
    )
    for row in rows:
        parts = dict.fromkeys(part for each in row.checkouts for part in each.parts_s)
        yield table_of(
            f"Job {row.job.upper()}: CPU ms a round of the parts of a device",
            list(parts),
            ("part", str),
            *(
                (
                    each.checkout,
                    lambda part, each=each: f"{each.parts_s.get(part, 0.0) * 1e3:.1f}",
                )
                for each in row.checkouts
            ),
            texts=1,
        )
