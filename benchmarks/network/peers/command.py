"""`tessera-bench peers`: the same jobs on other systems."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, count, names
from benchmarks.report.progress import Begin, progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.fleet.peers.measure import PeerRow
    from benchmarks.network.peers.beside import Beside

PARTS = ("simulated", "deployed")
TURNS, QUICK_TURNS = 8, 2
ROUNDS = 3


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "peers",
        _run,
        help="do one job on other systems and on ours, and compare their speed",
        description=(
            "Simulated: trains a perceptron with 100 of 1,000 devices a round on our simulation, "
            "on those of Flower and Apple's pfl, as far as they are installed, and as a bare torch "
            "loop on one thread, in turns. Deployed: job J of `deployed`, ten devices as programs, "
            "here and then on Flower's SuperLink and SuperNodes. A peer may be installed for "
            "another Python, so that what it pins does not meet what we pin."
        ),
        example="peers --flower-python ~/flower/bin/python --pfl-python ~/pfl/bin/python",
        quick="fewer turns, more noise; deployed only if --parts asks for it",
    )
    parser.add_argument(
        "--parts", type=names, metavar="A,B", help=f"what to measure (default {','.join(PARTS)})"
    )
    for name, title in (("flower", "Flower"), ("pfl", "pfl")):
        parser.add_argument(
            f"--{name}-python",
            metavar="PATH",
            help=f"Python that has {title} and torch (default: this one)",
        )
    parser.add_argument(
        "--processes",
        type=count,
        default=2,
        metavar="N",
        help="processes that train in a simulation (default 2)",
    )
    parser.add_argument(
        "--turns", type=count, metavar="N", help=f"simulated rounds each (default {TURNS})"
    )
    parser.add_argument(
        "--rounds",
        type=count,
        default=ROUNDS,
        metavar="N",
        help=f"deployed rounds of Flower, about half a minute each (default {ROUNDS})",
    )


def _run(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.fleet.peers.job import PeerJob
    from benchmarks.fleet.peers.measure import measure_peers, peers_figures, ticks
    from benchmarks.network.peers import beside

    wanted = arguments.parts or (PARTS[:1] if arguments.quick else PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise UsageError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    turns = arguments.turns or (QUICK_TURNS if arguments.quick else TURNS)
    job = PeerJob(processes=arguments.processes)
    given = {"flower": arguments.flower_python, "pfl": arguments.pfl_python}
    pythons = {name: python for name, python in given.items() if python is not None}
    simulated, deployed = ("simulated" in wanted), ("deployed" in wanted)
    rows: list[PeerRow] = []
    found: Beside | None = None
    total = simulated * ticks(turns) + deployed * beside.ticks(arguments.rounds)
    with progress("peers", total) as part:
        if simulated:
            rows = measure_peers(job, turns, pythons, part)
        if deployed:
            found = _deployed(arguments.flower_python, arguments.rounds, part)
    missing = {row.name: row.install for row in rows if row.install}
    if found is not None and found.install:
        missing["flower"] = found.install
    return Measured(
        figures=[*peers_figures(rows), *(beside.beside_figures(found) if found else ())],
        shown=[*_tables(rows, job.processes), *_deployed_tables(found)],
        closing=[f"{name} is not installed: {install}" for name, install in missing.items()],
        packages=("torch", "onnxruntime", "numpy"),
        config={**asdict(job), "turns": turns, "rounds": arguments.rounds, "parts": list(wanted)},
        data={
            "rows": [asdict(row) for row in rows],
            "deployed": None if found is None else asdict(found),
        },
    )


def _deployed(python: str | None, rounds: int, part: Begin) -> Beside:
    from benchmarks.network.deployed.job import SMALL
    from benchmarks.network.peers.beside import measure_beside

    return measure_beside(SMALL, python or sys.executable, rounds, part)


def _tables(rows: Sequence[PeerRow], processes: int) -> Iterator[Table]:
    def number(value: float | None, shape: str) -> str:
        return "not installed" if value is None else format(value, shape)

    if rows:
        yield table_of(
            f"Device-steps per second of one job; simulators train in {processes} processes",
            rows,
            ("simulator", lambda row: f"{row.name} {row.version}".strip()),
            ("per second", lambda row: number(row.steps_per_s, ",.0f")),
            ("over bare torch", lambda row: number(row.over_bare, ".2f")),
            ("per CPU second", lambda row: number(row.cpu_over_bare, ".2f")),
            texts=1,
        )


def _deployed_tables(found: Beside | None) -> Iterator[Table]:
    if found is not None:
        yield table_of(
            f"Job J deployed: {found.devices} devices as programs on this machine",
            found.systems,
            ("system", lambda row: f"{row.name} {row.version}".strip()),
            ("a round\ns", lambda row: f"{row.wall_s:.2f}"),
            ("device\nCPU ms", lambda row: f"{row.cpu_s * 1e3:.0f}"),
            ("÷ bare", lambda row: f"{row.over_bare:.1f}"),
            ("device\nMB", lambda row: "" if row.peak_mb is None else f"{row.peak_mb:.0f}"),
            texts=1,
        )
