"""`tessera-bench compare`: costs of the same cases on several boards."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, check_writable


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "compare",
        _measure,
        help="compare the results of several boards",
        description=(
            "Compares the costs of the same cases on several boards: seconds, joules and memory "
            "from files written by `tessera-bench device`, and their ratios to the first. Runs "
            "nothing."
        ),
        example="compare pi4/results.json pi5/results.json --out boards.md",
        quick="has no effect here",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="two or more results.json"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="only cases with this many threads (default: each board's fastest number)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the tables as Markdown")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot time and energy: .png, .svg or .pdf"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.device.report.comparison import (
        boards_sheet,
        case_sheets,
        compare,
        comparison_figures,
        comparison_markdown,
        means_sheet,
    )
    from benchmarks.device.results import read_results
    from benchmarks.report.drawing import check_plot
    from benchmarks.report.sheet import printable

    check_writable(arguments.out)
    check_plot(arguments.plot)
    if arguments.threads is not None and arguments.threads < 1:
        raise UsageError("--threads must be at least 1")
    comparison = compare([read_results(path) for path in arguments.files], arguments.threads)
    if arguments.out:
        arguments.out.write_text(comparison_markdown(comparison), encoding="utf-8")
    if arguments.plot:
        from benchmarks.device.report.comparison_plot import write_comparison_plot

        write_comparison_plot(comparison, arguments.plot)
    return Measured(
        figures=comparison_figures(comparison),
        shown=[
            boards_sheet(comparison),
            *map(printable, comparison.notes),
            *case_sheets(comparison),
            means_sheet(comparison),
            "~ modelled, not measured, or a ratio with such a number; – not known",
        ],
        config={"files": [str(path) for path in arguments.files], "threads": arguments.threads},
        data={
            "boards": [
                {"title": results.title, "provenance": results.provenance}
                for results in comparison.boards
            ],
            "work": comparison.work,
            "notes": list(comparison.notes),
            "lines": [asdict(line) for line in comparison.lines],
        },
    )
