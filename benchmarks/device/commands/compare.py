"""`tessera-bench compare`: costs of the same cases on several boards."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report.options import UsageError, add_common, check_writable


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "compare",
        help="compare the results of several boards",
        description=(
            "Compares the costs of the same cases on several boards: seconds, joules and memory "
            "from files written by `tessera-bench device`, and their ratios to the first. Runs "
            "nothing."
        ),
        epilog="example: tessera-bench compare pi4/results.json pi5/results.json --out boards.md",
    )
    add_common(parser, "has no effect here")
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
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

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
    from benchmarks.report.figures import print_figures, write_json
    from benchmarks.report.sheet import printable

    for path in (arguments.json, arguments.out):
        check_writable(path)
    check_plot(arguments.plot)
    if arguments.threads is not None and arguments.threads < 1:
        raise UsageError("--threads must be at least 1")
    comparison = compare([read_results(path) for path in arguments.files], arguments.threads)

    console = Console()
    boards_sheet(comparison).print(console)
    for note in comparison.notes:
        console.print(printable(note), markup=False, highlight=False)
    for sheet in (*case_sheets(comparison), means_sheet(comparison)):
        sheet.print(console)
    console.print("~ modelled, not measured, or a ratio with such a number; – not known")
    figures = comparison_figures(comparison)
    print_figures(figures, console)
    if arguments.out:
        arguments.out.write_text(comparison_markdown(comparison), encoding="utf-8")
    if arguments.plot:
        from benchmarks.device.report.comparison_plot import write_comparison_plot

        write_comparison_plot(comparison, arguments.plot)
    if arguments.json:
        data = {
            "command": "compare",
            "config": {"files": [str(path) for path in arguments.files]}
            | {"threads": arguments.threads, "quick": arguments.quick},
            "boards": [
                {"title": results.title, "provenance": results.provenance}
                for results in comparison.boards
            ],
            "work": comparison.work,
            "notes": list(comparison.notes),
            "lines": [asdict(line) for line in comparison.lines],
        }
        write_json(arguments.json, figures, data)
    return 0
