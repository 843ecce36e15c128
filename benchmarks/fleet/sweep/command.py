"""`tessera-bench sweep`: many simulated experiments from one file, which can stop and go on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, count

if TYPE_CHECKING:
    from benchmarks.fleet.sweep.rows import SweepRows

FOLDER = Path("sweep-results")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "sweep",
        _measure,
        help="simulate many experiments from a file: rules, masks, fleets, seeds",
        description=(
            "Simulates every combination of the settings that a file gives as lists "
            "(docs/fleets.md). Rows are added to rows.jsonl in --out as they come, with every "
            "setting, and are a table in rows.parquet at the end. Stop it with Ctrl-C whenever you "
            "like: the same command goes on, and never runs a finished case again. A case that "
            "fails is recorded with its error. `tessera-bench plot` draws the results."
        ),
        example="sweep sweep.toml --out results --jobs 2",
        quick="experiments have at most 3 rounds; a case that is quick is another case",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the sweep's settings (.toml)")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="DIR", help=f"results (default {FOLDER})"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with mnist/, cifar10/, uci_har/ …"
    )
    parser.add_argument(
        "--jobs", type=count, default=1, metavar="N", help="cases to run at a time (default 1)"
    )
    parser.add_argument(
        "--retry", action="store_true", help="run cases that failed before once more"
    )
    parser.add_argument(
        "--tensorboard",
        type=Path,
        metavar="DIR",
        help="write the rounds of every case for TensorBoard too, in a folder each",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.fleet.sweep.grid import check_data, read_cases
    from benchmarks.fleet.sweep.rows import SweepRows
    from benchmarks.fleet.sweep.run import SweepPlaces, run_cases
    from benchmarks.fleet.sweep.summary import sweep_figures, sweep_lines, sweep_table
    from benchmarks.report.progress import progress
    from coordinator.run.tensorboard import check_tensorboard
    from edge_sdk.program.command import EXIT_INTERRUPTED

    cases = read_cases(arguments.file, quick=arguments.quick)
    check_data(cases, arguments.data)
    if arguments.tensorboard is not None:
        check_tensorboard()
    with _alone_in(arguments.out):
        rows = SweepRows(arguments.out)
        ended = rows.ended(failed=not arguments.retry)
        rows.keep(ended)
        wanted = [case for case in cases if case.id not in ended]
        places = SweepPlaces(
            base=arguments.file.parent, data=arguments.data, tensorboard=arguments.tensorboard
        )
        closing, code = [], 0
        try:
            with progress("sweep", sum(case.config.reports for case in wanted)) as begin:
                run_cases(wanted, rows, places, arguments.jobs, begin)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
            done = sum(case.id in rows.ended() for case in cases)
            closing.append(
                f"Interrupted: {done} of {len(cases)} cases have ended. The same command goes on."
            )
        closing = [*_saved(rows), *closing]
        own = {case.id for case in cases}
        lines = sweep_lines([row for row in rows.rows if row["id"] in own])
    errors = [
        f"failed: {row['case'] or row['id']}, seed {row['run.seed']}: {row['error']}"
        for row in rows.rows
        if row["id"] in own and row.get("error")
    ]
    return Measured(
        figures=sweep_figures(lines),
        shown=[*([sweep_table(lines)] if lines else []), *errors],
        closing=closing,
        packages=("torch", "onnxruntime", "numpy"),
        config={"file": str(arguments.file), "out": str(arguments.out)},
        data={"rows": [row for row in rows.rows if row["id"] in own]},
        code=code,
    )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make a folder and lock it. Raises `UsageError` if another sweep is at it."""
    from edge_sdk.program.files import lock_file, make_folder

    make_folder(folder)
    try:
        lock = lock_file(folder / ".lock")
    except BlockingIOError as error:
        raise UsageError(
            f"another sweep is writing to {folder}: wait for it, or give another --out"
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def _saved(rows: SweepRows) -> list[str]:
    from benchmarks.fleet.sweep.rows import LINES

    if not rows.rows:
        return []
    places = [str(rows.folder / LINES)]
    try:
        places.append(str(rows.write_table()))
    except UsageError as error:
        return [f"Rows are in {places[0]}. {error}."]
    return [f"Rows are in {' and '.join(places)}; draw them: tessera-bench plot {rows.folder}"]
