"""Options shared by the commands, and their checks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from edge_sdk import TesseraError

RUNS = Path("bench-results")
"""Default folder of runs."""
NO_TORCH = (
    "there is no torch here to compile models with: give --kit DIR, which `tessera-bench kit` "
    "makes on another machine, or pip install 'tessera-fl[bench]'"
)


class UsageError(TesseraError):
    """The command line asks for something that does not exist."""


def add_common(parser: argparse.ArgumentParser, quick: str) -> None:
    """Add the options of every command; `quick` says what `--quick` leaves out."""
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and figures")


def names(text: str) -> tuple[str, ...]:
    """Parse comma-separated names, each once."""
    return tuple(dict.fromkeys(text.split(",")))


def listed_choices(
    arguments: argparse.Namespace, choices: Mapping[str, Iterable[str]]
) -> list[str]:
    """Return a line for each option that is `list`: its name, and what it can be."""
    return [
        f"--{option}: {', '.join(known)}"
        for option, known in choices.items()
        if getattr(arguments, option) == ("list",)
    ]


def add_families(
    parser: argparse._ActionsContainer, usual: Sequence[str], quick: Sequence[str] = ()
) -> None:
    """Add `--families`, the models to measure; `chosen_families` reads it."""
    more = f"; quick {','.join(quick)}" if quick else ""
    parser.add_argument(
        "--families",
        type=names,
        metavar="A,B",
        help=f"models by name (default {','.join(usual)}{more})",
    )


def chosen_families(
    arguments: argparse.Namespace, usual: Sequence[str], quick: Sequence[str] = ()
) -> Sequence[str]:
    """Return the models to measure. Raises `UsageError` for an unknown one."""
    fewer = quick if arguments.quick and quick else usual
    families: Sequence[str] = arguments.families or fewer
    check_families(families)
    return families


def check_families(names: Sequence[str]) -> None:
    """Raise `UsageError` for an unknown model."""
    from benchmarks.models import FAMILIES

    if unknown := [name for name in names if name not in FAMILIES]:
        raise UsageError(f"unknown family {unknown[0]!r}; choose from {', '.join(FAMILIES)}")


def check_writable(path: Path | None) -> None:
    """Raise `UsageError` for a file that cannot be written, before minutes are spent."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"cannot write {path}: name a file in a directory that exists")


def levels(text: str) -> tuple[float, ...]:
    """Parse comma-separated shares of every width, each once, largest first."""
    try:
        found = {float(each) for each in text.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give shares such as 1,0.5,0.25") from None
    if not all(0 < level <= 1 for level in found):
        raise argparse.ArgumentTypeError(f"{text!r}: a level is above 0 and at most 1")
    return tuple(sorted(found, reverse=True))


def level_words(levels: Sequence[float]) -> str:
    """Levels as `levels` reads them, for `--help`."""
    return ",".join(f"{level:g}" for level in levels)


def count(text: str) -> int:
    """Parse a whole number above 0."""
    found = numbers(text)
    if len(found) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give one number")
    return found[0]


def numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers above 0, each once, smallest first."""
    try:
        found = {int(each) for each in text.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers such as 1,4") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of at least 1")
    return tuple(sorted(found))
