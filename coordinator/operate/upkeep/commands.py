"""`verify`, `repair`, `rollback`, `pack` and `unpack`: for a run that nobody serves now."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from coordinator.operate.upkeep.moving import add_commands as add_moving_commands
from edge_sdk.program.command import confirm


def add_commands(commands: Any) -> None:
    """Add the commands to a parser."""
    verify = commands.add_parser(
        "verify",
        help="compare every file of a run with its checksum",
        description=(
            "Reads every file of a run's folder and says which are damaged or missing. A start "
            "checks only what it reads; this checks all. Changes nothing. Stop serve before."
        ),
        epilog=(
            "exit codes: 0 everything is as it was written; 1 something is damaged or missing. "
            "example: tessera-coordinator verify run"
        ),
    )
    verify.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    verify.set_defaults(run=_verify)
    repair = commands.add_parser(
        "repair",
        help="let a damaged run go on, and say what is lost",
        description=(
            "Finds what keeps a damaged run from going on, says for each step what would be lost, "
            "asks, and takes the steps. Adds checksums to a run of the version before. Copy the "
            "folder first: nothing brings back what is dropped. Stop serve before."
        ),
        epilog="example: tessera-coordinator repair run",
    )
    repair.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    repair.add_argument("--yes", action="store_true", help="do not ask")
    repair.set_defaults(run=_repair)
    rollback = commands.add_parser(
        "rollback",
        help="return to the model of an earlier round",
        description=(
            "Makes an earlier checkpoint the newest; serve then resumes from it. "
            "Deletes later checkpoints and the rule's memory. Round numbers keep counting up. "
            "Stop serve before you run this."
        ),
        epilog="example: tessera-coordinator rollback run --to-round 12",
    )
    rollback.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    rollback.add_argument("--to-round", "--round", type=int, required=True, metavar="N")
    rollback.add_argument("--yes", action="store_true", help="do not ask")
    rollback.set_defaults(run=_rollback)
    add_moving_commands(commands)


def _verify(arguments: argparse.Namespace) -> int:
    from coordinator.operate.upkeep.inspection import Inspection
    from coordinator.operate.upkeep.upgrade import needs_checksums
    from coordinator.run.folder import locked, read_about

    folder: Path = arguments.folder
    files, size, bad = 0, 0, 0
    shows = sys.stderr.isatty()
    with locked(folder):
        if needs_checksums(folder):
            read_about(folder)  # says so
        for found in Inspection(folder).all():
            files, size = files + 1, size + found.size
            if shows:
                print(f"\r\x1b[K{files} files, {size / 1e6:.0f} MB", end="", file=sys.stderr)
            if found.condition != "good":
                bad += 1
                clear = "\r\x1b[K" if shows else ""
                print(f"{clear}{found.condition:8} {found.path}: {found.problem}")
    if shows:
        print("\r\x1b[K", end="", file=sys.stderr)
    if not bad:
        print(f"{folder}: {files} files, {size / 1e6:.1f} MB: everything is as it was written")
        return 0
    print(f"{folder}: {bad} of {files} files are damaged or missing")
    print(f"to see what can be saved: tessera-coordinator repair {folder}")
    return 1


def _repair(arguments: argparse.Namespace) -> int:
    from coordinator.operate.upkeep.repair import find_steps
    from coordinator.run.folder import locked

    folder: Path = arguments.folder
    with locked(folder):
        steps = find_steps(folder)
    if not steps:
        print(f"{folder}: nothing to repair")
        return 0
    for step in steps:
        print(step.words)
    confirm(f"{folder}: what is named as lost is lost for good.", yes=arguments.yes)
    for step in steps:
        step.take()
    with locked(folder):
        left = find_steps(folder)
    if left:
        print(f"{folder}: this is still damaged: {left[0].words}")
        return 1
    print(f"{folder}: repaired; serve resumes from here")
    return 0


def _rollback(arguments: argparse.Namespace) -> int:
    from coordinator.run.folder import Run

    with Run(arguments.folder) as run:
        newest = run.rounds()[-1:]
        if arguments.to_round in run.rounds():
            confirm(
                f"{arguments.folder}: the models after round {arguments.to_round}, up to round "
                f"{newest[0]}, and the rule's memory will be deleted for good.",
                yes=arguments.yes,
            )
        run.rollback(arguments.to_round)
        print(f"{arguments.folder}: the run will resume from round {arguments.to_round}")
    return 0
