"""`tessera-bench papers`: the tables of five papers, run again."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, count, names

if TYPE_CHECKING:
    from benchmarks.report.figures import Figure
    from benchmarks.report.sheet import Sheet
    from benchmarks.studies.papers.cell import CellOutcome, Outcomes, PaperTable

RECORD = Path("tessera-papers.jsonl")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "papers",
        _measure,
        help="tables of the papers, run again on simulated fleets that really train",
        description=(
            "Runs the tables of RAM-Fed, CCFL, Every Parameter Matters, Fed-RAA and SubDisMO "
            "again, several seeds for each cell, and says which claims show in the numbers "
            "(docs/results.md). Finished runs are added to --record, and a table goes on from "
            "there: stop it with Ctrl-C whenever you like. --hours lists the tables and the time "
            "that each takes. Runs yield to other programs."
        ),
        example="papers --table ram2,ccfl2 --data ~/data --record docs/results.jsonl --jobs 2",
        quick="a few cells of each table, shorter and with one seed: under 15 minutes in all",
    )
    parser.add_argument(
        "--table", type=names, metavar="A,B", help="tables (default: all; `list` lists them)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with mnist/, fashion_mnist/, cifar10/, ag_news/, uci_har/ (docs/benchmark.md)",
    )
    parser.add_argument(
        "--seeds", type=count, metavar="N", help="seeds of each cell (default: the table's, 3)"
    )
    parser.add_argument(
        "--record",
        type=Path,
        action="append",
        metavar="FILE",
        help=(
            f"file of finished runs, to go on from and to add to (default {RECORD}; none with "
            "--quick); further ones are only read"
        ),
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=1,
        metavar="N",
        help="processes that run cells, one for each core to use (default 1)",
    )
    parser.add_argument(
        "--limit-min",
        type=float,
        metavar="MIN",
        help="start no further run after so many minutes; 0 only shows what is recorded",
    )
    parser.add_argument(
        "--hours", action="store_true", help="list the tables with their hours, and run nothing"
    )
    parser.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="a page, such as docs/results.md, to update, with the plots beside it",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.device.report.page import read_page
    from benchmarks.studies.papers import page
    from benchmarks.studies.papers.record import outcomes_of, read_outcomes
    from benchmarks.studies.papers.tables import all_tables

    if arguments.table == ("list",):
        return Measured(figures=[], shown=_listed(all_tables()))
    tables = _tables(arguments.table)
    quick = arguments.quick
    records = arguments.record or ([] if quick else [RECORD])
    found = read_outcomes([*records[1:], *records[:1]])
    if arguments.hours:
        return Measured(figures=[], shown=[hours_sheet(tables, found, quick=quick)])
    if arguments.update:
        if quick:
            raise UsageError("--update shows full runs: leave out --quick")
        read_page(arguments.update, page.BEGIN)
    if arguments.limit_min != 0:
        _check_data(tables, arguments.data)
        found += _run(arguments, tables, found, records[0] if records else None)
    done = {table.name: outcomes_of(table, found, quick=quick) for table in tables}
    if arguments.update:
        update_results(arguments.update, all_tables(), found)
    shown = [page.render_table(table, done[table.name], plots=False) for table in tables]
    return Measured(
        figures=claim_figures(tables, done),
        shown=shown,
        closing=[_left(tables, done, arguments)],
        packages=("torch", "onnxruntime", "numpy"),
        config={"tables": [table.name for table in tables], "seeds": arguments.seeds},
        data={
            "runs": [
                run.plain() for each in done.values() for runs in each.values() for run in runs
            ]
        },
    )


def update_results(path: Path, tables: Sequence[PaperTable], found: Sequence[CellOutcome]) -> None:
    """Write the generated part of the page, and the plots beside it. Raises `PageError`."""
    from benchmarks.device.report.page import update_page
    from benchmarks.studies.papers import page
    from benchmarks.studies.papers.record import outcomes_of

    for table in tables:
        done = outcomes_of(table, found)
        if table.draw is not None and done:
            table.draw(table, done, path.parent / page.plot_name(table))
    update_page(path, page.render_page(tables, found), page.BEGIN)


def hours_sheet(
    tables: Sequence[PaperTable], found: Sequence[CellOutcome], *, quick: bool = False
) -> Sheet:
    """List the tables: runs, those done, and hours on one core by the seconds measured so far."""
    from benchmarks.report.sheet import Sheet
    from benchmarks.studies.papers.record import open_runs, outcomes_of

    rows, total, left = [], 0.0, 0.0
    for table in tables:
        done = outcomes_of(table, found, quick=quick)
        cells = table.quick_cells() if quick else table.cells
        seeds = 1 if quick else table.seeds
        waiting = open_runs(table, done, seeds, quick=quick)
        spent = sum(each.seconds for runs in done.values() for each in runs)
        rest = sum(_expected_s(table, done, cell.place) for cell, _ in waiting)
        total, left = total + spent + rest, left + rest
        rows.append(
            (
                table.name,
                f"{table.paper}: {table.title}",
                f"{len(cells) * seeds}",
                f"{sum(map(len, done.values()))}",
                f"{(spent + rest) / 3600:.2f}",
                f"{rest / 3600:.2f}",
            )
        )
    rows.append(("all", "", "", "", f"{total / 3600:.2f}", f"{left / 3600:.2f}"))
    return Sheet(
        title="Hours of processor time; two jobs on two cores take half as long",
        columns=("table", "", "runs", "done", "hours", "left"),
        rows=tuple(rows),
        texts=2,
    )


def claim_figures(tables: Sequence[PaperTable], done: Mapping[str, Outcomes]) -> list[Figure]:
    """Return the difference, or ratio, of every claim that was run."""
    from benchmarks.report.figures import Figure
    from benchmarks.studies.papers.verdicts import judge_all

    return [
        Figure(
            f"papers.{table.name}.{judged.claim.name}",
            judged.here,
            "×" if judged.claim.ratio else "points",
            better="lower" if judged.claim.ratio else "higher",
        )
        for table in tables
        for judged in judge_all(table, done[table.name])
        if judged.here is not None
    ]


def _expected_s(table: PaperTable, done: Outcomes, place: Any) -> float:
    """Return the seconds of a run: of the same cell, or else of the table's, or as expected."""
    same = [each.seconds for each in done.get(place, ())]
    known = same or [each.seconds for runs in done.values() for each in runs]
    return sum(known) / len(known) if known else table.expected_s


def _run(
    arguments: argparse.Namespace,
    tables: Sequence[PaperTable],
    found: Sequence[CellOutcome],
    record: Path | None,
) -> list[CellOutcome]:
    from benchmarks.report.progress import progress
    from benchmarks.studies.papers.record import append_outcome, open_runs, outcomes_of
    from benchmarks.studies.papers.working import NICE, CellWork, run_all

    quick, limit = arguments.quick, arguments.limit_min
    ends_s = float("inf") if limit is None else time.monotonic() + 60 * limit
    works: list[CellWork] = []
    for table in tables:
        seeds = arguments.seeds or (1 if quick else table.seeds)
        done = outcomes_of(table, found, quick=quick)
        works += [(table.name, *each) for each in open_runs(table, done, seeds, quick=quick)]
    if arguments.jobs == 1 and works:
        os.nice(NICE)
    finished = []
    with progress("papers", len(works)) as begin:

        def starts(work: CellWork) -> None:
            name, cell, seed = work
            begin(", ".join(filter(None, (name, *cell.place, f"seed {seed}"))))

        tick = begin("begins")
        for outcome in run_all(works, arguments.data, arguments.jobs, starts, ends_s=ends_s):
            finished.append(outcome)
            if record is not None:
                append_outcome(record, outcome)
            tick()
    return finished


def _listed(tables: Sequence[PaperTable]) -> list[str]:
    width = max(len(table.name) for table in tables)
    return [f"{table.name:{width}}  {table.paper}: {table.title}" for table in tables]


def _tables(wanted: Sequence[str] | None) -> Sequence[PaperTable]:
    from benchmarks.studies.papers.tables import all_tables, find_table

    return all_tables() if wanted is None else [find_table(name) for name in wanted]


def _check_data(tables: Sequence[PaperTable], data: Path | None) -> None:
    """Raise `UsageError` if a data set is missing, before minutes are spent."""
    for folder in dict.fromkeys(folder for table in tables for folder in table.folders):
        if data is None or not (data / folder).is_dir():
            where = "--data is not given" if data is None else f"{data} has no folder {folder}"
            raise UsageError(f"data set {folder!r}: {where}; docs/benchmark.md says what it holds")


def _left(
    tables: Sequence[PaperTable], done: Mapping[str, Outcomes], arguments: argparse.Namespace
) -> str:
    """Say what was not run."""
    from benchmarks.studies.papers.record import open_runs

    left = {}
    for table in tables:
        seeds = arguments.seeds or (1 if arguments.quick else table.seeds)
        runs = len(open_runs(table, done[table.name], seeds, quick=arguments.quick))
        barred = sum(bool(cell.missing) for cell in table.cells)
        if runs or barred:
            left[table.name] = f"{runs} runs of {table.name}" + (
                f" ({barred} of its cells cannot be run yet)" if barred else ""
            )
    if left:
        return f"Not run: {', '.join(left.values())}."
    if arguments.quick:
        return "All cells of --quick were run: a few, shorter and with one seed; no evidence."
    return "Everything asked for was run."
