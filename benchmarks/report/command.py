"""The frame of a command that measures: its options, its tables, and the file it writes.

A command says how to measure. Printing the tables and the targets that are not met, and writing
`--json`, is the same for all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.report.options import add_common, check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.report.figures import Figure
    from benchmarks.report.sheet import Sheet


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The outcome of a command.

    `shown` are tables and lines for a person, in order, and `closing` lines that follow the missed
    targets; `packages` are those whose versions the numbers depend on; `data` is written beside the
    figures; `code` is the exit code.
    """

    figures: Sequence[Figure]
    shown: Sequence[Table | Sheet | str]
    closing: Sequence[str] = ()
    packages: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    code: int = 0


Measure = Callable[[argparse.Namespace], Measured]


def add_command(
    commands: Any,
    name: str,
    measure: Measure,
    *,
    help: str,
    description: str,
    example: str,
    quick: str,
) -> argparse.ArgumentParser:
    """Add a command; the caller adds its own options to the result.

    `quick` says what `--quick` leaves out. `measure` imports what it needs when it is called, so
    that `--help` stays fast. It raises `UsageError` before it spends any time.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description, epilog=f"example: tessera-bench {example}"
    )
    add_common(parser, quick)
    parser.set_defaults(run=partial(run_command, name, measure))
    return parser


def run_command(name: str, measure: Measure, arguments: argparse.Namespace) -> int:
    """Measure, print, and write `--json` where asked for; return the exit code."""
    from rich.console import Console

    from benchmarks.report.figures import environment, host, print_figures, write_json
    from benchmarks.report.sheet import Sheet

    def show(shown: Sequence[Table | Sheet | str]) -> None:
        for each in shown:
            if isinstance(each, Sheet):
                each.print(console)
            else:
                plain = isinstance(each, str)
                console.print(each, highlight=not plain, soft_wrap=plain, markup=not plain)

    check_writable(arguments.json)
    measured = measure(arguments)
    console = Console()
    show(measured.shown)
    print_figures(measured.figures, console)
    show(measured.closing)
    if arguments.json:
        data = {
            "command": name,
            "host": host(),
            "environment": environment(*measured.packages, "tessera-fl"),
            "config": {**measured.config, "quick": arguments.quick},
            **measured.data,
        }
        write_json(arguments.json, measured.figures, data)
    return measured.code
