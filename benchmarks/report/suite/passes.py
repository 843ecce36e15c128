"""Runs other commands of `tessera-bench`, each in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.suite.repeats import parse_figures
from edge_sdk.program.processes import run_child

_PROGRAM = "import sys; from benchmarks.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of a command: its figures, or why there are none."""

    command: str
    seconds: float
    figures: tuple[Figure, ...] = ()
    failure: str | None = None


def run_measuring(command: str, *, quick: bool, tree: Path | None = None) -> CommandRun:
    """Run a command and read its figures.

    `tree` is the checkout whose code runs; None: the code that is running.
    """
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = str(tree.absolute())
    with tempfile.TemporaryDirectory(prefix="tessera-bench-") as folder:
        path = Path(folder) / "figures.json"
        asked = [command, *(["--quick"] if quick else []), "--json", str(path)]
        began = time.monotonic()
        # There, because the programs that it starts in turn take their code from where they run.
        ended = run_child([sys.executable, "-c", _PROGRAM, *asked], environment, folder=tree)
        seconds = time.monotonic() - began
        if ended.returncode != 0:
            return CommandRun(command, seconds, failure=_last_line(ended.stderr, ended.returncode))
        try:
            figures = parse_figures(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, FigureError) as error:
            return CommandRun(command, seconds, failure=f"it wrote no figures: {error}")
        return CommandRun(command, seconds, tuple(figures))


def _last_line(errors: str, code: int) -> str:
    lines: Sequence[str] = errors.strip().splitlines()
    said = lines[-1].strip()[:200] if lines else "it said nothing"
    return f"exit code {code}: {said}"
