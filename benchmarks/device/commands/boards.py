"""`tessera-bench boards`: submitted results of boards, checked and lined up."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError

FOLDER = Path("docs/boards")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "boards",
        _measure,
        help="check submitted results of boards, and line them up",
        description=(
            "Reads the results.json files in a folder, one for each board, and shows the fastest "
            "way of each to train every model at every level. A run that other programs, heat or "
            "an unsettled machine disturbed is refused with the reason, and so are --quick and "
            "modelled runs. Runs nothing."
        ),
        example="boards docs/boards --update docs/board-results.md",
        quick="has no effect here",
    )
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=FOLDER,
        metavar="DIR",
        help="folder with the files (default %(default)s)",
    )
    parser.add_argument(
        "--update", type=Path, metavar="PAGE", help="put the tables into this Markdown page"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.device.report.entries import MARKER, entries_page, entries_sheets, read_entries
    from benchmarks.device.report.page import read_page, update_page
    from benchmarks.report.figures import Figure

    if not arguments.folder.is_dir():
        raise UsageError(f"{arguments.folder} is not a folder: name the one with the results")
    if arguments.update is not None:
        read_page(arguments.update, MARKER)
    entries = read_entries(arguments.folder)
    if arguments.update is not None:
        update_page(arguments.update, entries_page(entries), MARKER)
    return Measured(
        figures=[Figure("boards.entries", len(entries), "boards", better="higher")],
        shown=entries_sheets(entries) if entries else [entries_page(entries)],
        config={"folder": str(arguments.folder)},
        data={"entries": [name for name, _ in entries]},
    )
