"""`tessera-bench`: the command line of the benchmarks."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.aggregate import command as aggregate
from benchmarks.aggregate.durability import command as durability
from benchmarks.device.commands import boards, compare, costs, device, kit, profile
from benchmarks.fleet import command as fleet
from benchmarks.fleet.sweep import command as sweep
from benchmarks.fleet.sweep import plot
from benchmarks.network.closing import command as closing
from benchmarks.network.deployed import command as deployed
from benchmarks.network.ingest import command as ingest
from benchmarks.network.load import command as load
from benchmarks.network.many import command as runs
from benchmarks.network.operate import command as operate
from benchmarks.network.peers import command as peers
from benchmarks.network.wire import command as wire
from benchmarks.report.suite import all_command, regress_command
from benchmarks.studies import partition
from benchmarks.studies.attack import command as attack
from benchmarks.studies.learn import command as learn
from benchmarks.studies.levels import command as levels
from benchmarks.studies.papers import command as papers
from benchmarks.training import footprint_command as footprint
from benchmarks.training import step_command as step
from benchmarks.zoo import command as zoo
from edge_sdk import __version__
from edge_sdk.program.command import run_command
from edge_sdk.program.completion import add_completion

COMMANDS = (
    device,
    kit,
    compare,
    boards,
    profile,
    learn,
    levels,
    attack,
    papers,
    partition,
    zoo,
    step,
    footprint,
    costs,
    aggregate,
    durability,
    wire,
    ingest,
    closing,
    deployed,
    load,
    runs,
    operate,
    fleet,
    peers,
    sweep,
    plot,
    all_command,
    regress_command,
)
"""Commands in the order of `--help`. A command imports what it needs when it runs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    with _ended_in_order():
        return run_command(make_parser, argv, "bench")


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does: programs and processes that were started end, too."""

    def end(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="tessera-bench",
        description="What federated learning costs a device, measured on this machine.",
        epilog=(
            "Every command prints tables and the targets that are not met, and exits 0 either way; "
            "--json writes the same as data. Compare ratios within a run, not seconds of two runs. "
            "example: tessera-bench device --quick"
        ),
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        command.add_parser(commands)
    add_completion(commands, parser)
    return parser
