"""`tessera-bench regress`: what became slower."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from benchmarks.report.suite.all_command import add_chosen, chosen_commands
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.report.figures import Figure
    from benchmarks.report.suite.change import FigureChange
    from benchmarks.report.suite.repeats import Repeated

REPEATS = 3


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "regress",
        _measure,
        help="what became slower between two measurements, or two checkouts",
        description=(
            "Compares the figures of two files that `all --json`, or --json of one command, wrote, "
            "and names those that are worse or better by more than noise: the median moved by more "
            "than the repeats lie apart, by more than 5 % (25 % where a side has one repeat), and "
            "no repeat of one side lies among those of the other. Figures of different machines "
            "are compared by their ratios alone, and so is benchmarks/baseline.json. Given two "
            "checkouts instead of files, it measures both, in turns: --commands, --repeats and "
            "--quick are for these."
        ),
        example="regress ../before ../after --commands step,wire --quick",
        quick="of checkouts: run every command with --quick",
    )
    for name, side in (("old", "earlier"), ("new", "later")):
        parser.add_argument(
            name,
            type=Path,
            metavar=name.upper(),
            help=f"the {side} figures: a file that --json wrote, or a checkout to measure",
        )
    add_chosen(parser, repeats=REPEATS)
    parser.set_defaults(repeats=None)  # to know if it was given


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.report.suite.change import changes
    from benchmarks.report.suite.repeats import ratios_of, repeats_of

    old, new, apart = _sides(arguments)
    left_out = 0
    if apart:
        left_out = len(list(changes(old, new)))
        old, new = ratios_of(old), ratios_of(new)
    found = list(changes(old, new))
    left_out -= len(found)
    if not found:
        raise UsageError(
            f"{arguments.old} and {arguments.new} have no figure in common"
            + (f" that is a ratio, and only ratios can be compared: {apart}" if apart else "")
        )
    verdicts = {
        verdict: [each for each in found if each.verdict == verdict]
        for verdict in ("worse", "better", "same")
    }
    shown: list[Table | str] = [
        _table(f"{len(each)} {verdict}", each)
        for verdict, each in verdicts.items()
        if each and verdict != "same"
    ]
    counts = [f"{len(each)} {verdict}" for verdict, each in verdicts.items()]
    shown.append(f"figures compared: {len(found)} ({', '.join(counts)} within noise)")
    if apart and left_out:
        shown.append(f"figures left out: {left_out} that are not ratios; {apart}")
    names = {each.name for each in found}
    for side, figures in (("old", old), ("new", new)):
        if alone := [each.name for each in figures if each.name not in names]:
            more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
            shown.append(f"only in the {side} ones: {', '.join(alone[:5])}{more}")
    return Measured(
        figures=list(_figures(verdicts)),
        shown=shown,
        config={"old": str(arguments.old), "new": str(arguments.new), "ratios": bool(apart)},
        data={
            "changes": [
                {
                    "name": each.name,
                    "unit": each.new.figure.unit,
                    "old": each.old.figure.value,
                    "new": each.new.figure.value,
                    "ratio": each.ratio if each.old.figure.value else None,
                    "noise": each.noise,
                    "verdict": each.verdict,
                }
                for each in found
            ],
            "old_repeats": repeats_of(old),
            "new_repeats": repeats_of(new),
        },
    )


def _sides(
    arguments: argparse.Namespace,
) -> tuple[Sequence[Repeated], Sequence[Repeated], str]:
    """Return both sides, and why only their ratios can be compared; empty if all figures can."""
    from benchmarks.report.suite.repeats import read_repeats

    folders = [each.is_dir() for each in (arguments.old, arguments.new)]
    if all(folders):
        return *_measured(arguments), ""
    if any(folders):
        raise UsageError("give two files, or two checkouts: a file has no code to measure")
    given = {"--commands": arguments.commands, "--repeats": arguments.repeats}
    given["--quick"] = arguments.quick
    if ignored := [option for option, value in given.items() if value]:
        raise UsageError(
            f"{ignored[0]} says what to measure in two checkouts; these are files, whose figures "
            "are all compared: leave it out"
        )
    (old, host), (new, other) = read_repeats(arguments.old), read_repeats(arguments.new)
    if None in (host, other):
        silent = arguments.old if host is None else arguments.new
        return old, new, f"{silent} does not say which machine it is of"
    return old, new, "" if host == other else "the files are of two machines"


def _measured(arguments: argparse.Namespace) -> tuple[list[Repeated], list[Repeated]]:
    """Measure two checkouts, in turns."""
    from benchmarks.report.suite.passes import run_measuring
    from benchmarks.report.suite.repeats import merge

    chosen, trees = chosen_commands(arguments), (arguments.old, arguments.new)
    repeats = arguments.repeats or REPEATS
    for tree in trees:
        if not (tree / "benchmarks" / "cli.py").is_file():
            raise UsageError(f"{tree} is not a checkout of this project: it has no benchmarks/")
    passes: dict[Path, list[list[Figure]]] = {tree: [] for tree in trees}
    with progress("regress", 2 * len(chosen) * repeats) as part:
        for number in range(repeats):
            for command in chosen:
                # Who goes first takes turns, too: what goes second finds a warmer machine.
                for tree in trees if number % 2 == 0 else trees[::-1]:
                    tick = part(f"{command} of {tree}")
                    run = run_measuring(command, quick=arguments.quick, tree=tree)
                    if run.failure is not None:
                        raise UsageError(f"{command} of {tree} failed: {run.failure}")
                    passes[tree].append(list(run.figures))
                    tick()
    return merge(passes[arguments.old]), merge(passes[arguments.new])


def _table(title: str, found: Sequence[FigureChange]) -> Table:
    return table_of(
        title,
        found,
        ("figure", lambda each: each.name),
        ("old", lambda each: f"{each.old.figure.value:.4g}"),
        ("new", lambda each: f"{each.new.figure.value:.4g}"),
        ("unit", lambda each: each.new.figure.unit),
        ("new ÷ old", lambda each: f"{each.ratio:.2f}"),
        ("noise", lambda each: f"{each.noise:.0%}"),
        texts=1,
    )


def _figures(verdicts: dict[str, list[FigureChange]]) -> list[Figure]:
    from benchmarks.report.figures import Figure

    return [
        Figure("regress.worse", len(verdicts["worse"]), "figures", target=0),
        Figure("regress.better", len(verdicts["better"]), "figures", better="higher"),
    ]
