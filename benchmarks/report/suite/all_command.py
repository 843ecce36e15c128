"""`tessera-bench all`: every performance figure in one go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, check_writable, count, names
from benchmarks.report.progress import duration, progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from benchmarks.report.suite.passes import CommandRun

MEASURING = (
    "step",
    "footprint",
    "costs",
    "aggregate",
    "durability",
    "wire",
    "ingest",
    "closing",
    "deployed",
    "load",
    "runs",
    "operate",
    "fleet",
)
"""Commands that measure how fast something is, in the order in which they run. Left out are studies
(they measure learning), `device` and `profile` (they describe a board), and `peers`, which needs
other systems."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "all",
        _measure,
        help="every performance figure in one go, for `regress`",
        description=(
            f"Runs {', '.join(MEASURING)}, one after the other, each in a process of its own, and "
            "writes all their figures to one file. With --repeats, it goes through all commands "
            "several times, so that the repeats of a figure lie far apart; the file then has the "
            "medians, and every repeat beside them. `regress` compares two such files. Close other "
            "programs first. --quick takes under 10 minutes for each repeat."
        ),
        example="all --quick --json now.json",
        quick="run every command with --quick",
    )
    add_chosen(parser, repeats=1)
    parser.add_argument(
        "--ratios",
        type=Path,
        metavar="FILE",
        help="also write the ratios alone, which other machines can be compared with "
        "(benchmarks/baseline.json)",
    )


def add_chosen(parser: argparse.ArgumentParser, *, repeats: int) -> None:
    """Add the options that say which commands run, and how often."""
    parser.add_argument(
        "--commands", type=names, metavar="A,B", help="run these commands alone (default: all)"
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=repeats,
        metavar="N",
        help=f"times to run each command, in turns (default {repeats})",
    )


def chosen_commands(arguments: argparse.Namespace) -> Sequence[str]:
    """Return the commands to run. Raises `UsageError` for an unknown one."""
    chosen: Sequence[str] = arguments.commands or MEASURING
    if unknown := [each for each in chosen if each not in MEASURING]:
        raise UsageError(
            f"unknown command {unknown[0]!r} in --commands; choose from {', '.join(MEASURING)}"
        )
    return chosen


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.report.figures import environment, write_json
    from benchmarks.report.suite.passes import run_measuring
    from benchmarks.report.suite.repeats import merge, ratios_of, repeats_of

    chosen = chosen_commands(arguments)
    check_writable(arguments.ratios)
    passes: list[list[CommandRun]] = []
    with progress("all", len(chosen) * arguments.repeats) as part:
        for number in range(1, arguments.repeats + 1):
            passes.append([])
            for command in chosen:
                tick = part(f"{command}, {number} of {arguments.repeats}")
                passes[-1].append(run_measuring(command, quick=arguments.quick))
                tick()
    runs = [run for each in passes for run in each]
    found = merge([[figure for run in each for figure in run.figures] for each in passes])
    if arguments.ratios is not None:
        ratios = ratios_of(found)
        about = {
            "command": "all",
            "environment": environment("tessera-fl", "torch", "onnxruntime", "numpy"),
            "repeats": repeats_of(ratios),
        }
        write_json(arguments.ratios, [each.figure for each in ratios], about)
    failed = [run for run in runs if run.failure is not None]
    return Measured(
        figures=[each.figure for each in found],
        shown=[
            table_of(
                "Commands",
                runs,
                ("command", lambda run: run.command),
                ("figures", lambda run: str(len(run.figures))),
                ("took", lambda run: duration(run.seconds)),
                texts=1,
            )
        ],
        closing=[f"  no figures from {run.command}: {run.failure}" for run in failed],
        packages=("torch", "onnxruntime", "numpy"),
        config={"commands": list(chosen), "repeats": arguments.repeats},
        data={"repeats": repeats_of(found), "runs": _described(runs)},
        code=0,
    )


def _described(runs: Sequence[CommandRun]) -> list[dict[str, Any]]:
    return [
        {"command": run.command, "seconds": run.seconds, "failure": run.failure} for run in runs
    ]
