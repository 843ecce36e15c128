"""Runs the job on every simulator that is there, in turns, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from benchmarks.fleet.peers.job import PeerJob
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin
from edge_sdk import TesseraError
from edge_sdk.program.processes import ChildProcess, Children, run_child

DRIVERS = Path(__file__).parent / "drivers"
BARE, OURS = "bare torch", "tessera"
TICK_S = 0.01
"""CPU time is counted in pieces of this length."""
ENDING_S = 20.0
"""Seconds that a driver may take to end by itself: Ray stops its own processes."""


class PeerError(TesseraError):
    """A simulator failed; the text has its last words."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """A program that does the job."""

    name: str
    module: str = ""
    """Module that must be there; empty: none."""
    driver: str = ""
    """File of the driver; empty: it is a module of ours."""
    install: str = ""
    """Command that installs it."""


PEERS = (
    Simulator("flower", "flwr.simulation", "on_flower.py", "pip install 'flwr[simulation]' torch"),
    Simulator("pfl", "pfl.model.pytorch", "on_pfl.py", "pip install 'pfl[pytorch]' torch"),
)
ALL = (Simulator(BARE, "", "bare_torch.py"), Simulator(OURS), *PEERS)


@dataclass(frozen=True, slots=True)
class PeerTurn:
    """One turn of one simulator: its steps, the seconds they took, and CPU seconds."""

    steps: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One simulator: steps per second, and their ratios to the bare loop within turns.

    All numbers are None if it is not installed; `install` then says how to.
    """

    name: str
    version: str = ""
    steps_per_s: float | None = None
    over_bare: float | None = None
    cpu_over_bare: float | None = None
    """The ratio of steps per CPU second, of all processes of a simulator."""
    install: str = ""


def measure_peers(
    job: PeerJob, turns: int, pythons: Mapping[str, str], begin: Begin
) -> list[PeerRow]:
    """Measure one row per simulator. `pythons` are those of peers; others use this one.

    Raises `PeerError` if a simulator that is installed fails.
    """
    versions = {each.name: installed_version(each, pythons.get(each.name)) for each in PEERS}
    there = [each for each in ALL if versions.get(each.name) != ""]
    found: dict[str, list[PeerTurn]] = {each.name: [] for each in there}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-peers-")))
        path = job.write(folder)
        children = stack.enter_context(Children())
        running: list[RunningPeer] = []
        for each in there:
            tick = begin(f"{each.name} starts")
            python = pythons.get(each.name) or sys.executable
            running.append(RunningPeer(children, each, python, path))
            stack.callback(running[-1].end)
            tick()
        for _ in range(turns):
            for peer in running:
                tick = begin(peer.name)
                found[peer.name].append(peer.turn())
                tick()
    return rows_of(found, {name: said or "" for name, said in versions.items()})


def ticks(turns: int) -> int:
    """Return the most ticks of `measure_peers`."""
    return len(ALL) * (turns + 1)


def rows_of(found: Mapping[str, Sequence[PeerTurn]], versions: Mapping[str, str]) -> list[PeerRow]:
    """Compare simulators turn by turn; those that are not there get a row without numbers."""
    rows, bare = [], found[BARE]
    for each in ALL:
        if each.name not in found:
            rows.append(PeerRow(each.name, install=each.install))
            continue
        pairs = list(zip(found[each.name], bare, strict=True))
        rows.append(
            PeerRow(
                each.name,
                versions.get(each.name, ""),
                median(own.steps / own.seconds for own, _ in pairs),
                median((a.steps / a.seconds) / (b.steps / b.seconds) for a, b in pairs),
                median((a.steps / a.cpu_s) / (b.steps / b.cpu_s) for a, b in pairs),
            )
        )
    return rows


def peers_figures(rows: Sequence[PeerRow]) -> list[Figure]:
    """Return the ratios to the bare loop, and ours to those of the others."""
    figures = []
    ratios = {row.name: row.over_bare for row in rows if row.name != BARE}
    for name, ratio in ratios.items():
        if ratio is not None:
            figures.append(Figure(f"peers.{name}.steps_over_bare", ratio, "×", better="higher"))
    ours = ratios.get(OURS)
    for each in PEERS:
        theirs = ratios.get(each.name)
        if ours is not None and theirs is not None:
            figures.append(
                Figure(
                    f"peers.{OURS}_over_{each.name}",
                    ours / theirs,
                    "×",
                    target=1.0,
                    better="higher",
                )
            )
    return figures


class RunningPeer:
    """A simulator that has done its first round and waits for the next."""

    def __init__(self, children: Children, simulator: Simulator, python: str, job: Path) -> None:
        """Raises `PeerError` if it does not get that far."""
        self.name = simulator.name
        program = (
            [str(DRIVERS / simulator.driver)] if simulator.driver else ["-m", f"{__package__}.ours"]
        )
        log = job.parent / f"{simulator.name.replace(' ', '-')}.log"
        self._child: ChildProcess = children.start(
            simulator.name, [python, *program, str(job)], log, piped=True
        )
        self._answer("ready")

    def turn(self) -> PeerTurn:
        """Let it do a round. Raises `PeerError` if it ends instead."""
        before = self._cpu_s()
        process = self._child.process
        with suppress(BrokenPipeError):
            assert process.stdin is not None  # noqa: S101  it is piped
            process.stdin.write(b"\n")
            process.stdin.flush()
        said = self._answer("seconds")
        spent = max(self._cpu_s() - before, TICK_S)
        return PeerTurn(int(said["steps"]), said["seconds"], spent)

    def end(self) -> None:
        """Let it end by itself; what does not is stopped with the others."""
        process = self._child.process
        if process.stdin is not None:
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)

    def _answer(self, key: str) -> dict[str, float]:
        process = self._child.process
        line = b"" if process.stdout is None else process.stdout.readline()
        with suppress(ValueError):
            said: dict[str, float] = json.loads(line)
            if key in said:
                return said
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
        raise PeerError(f"{self.name} did not do the job: {self._child.last_words()}")

    def _cpu_s(self) -> float:
        """Return the CPU time of its processes so far."""
        own = psutil.Process(self._child.pid)
        total = 0.0
        for each in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(each.cpu_times()[:2])
        return total


def installed_version(simulator: Simulator, python: str | None) -> str:
    """Return the version of a peer in its Python; empty if it cannot be imported there."""
    package = simulator.module.partition(".")[0]
    code = (
        f"import importlib.metadata, {simulator.module}; "
        f"print(importlib.metadata.version({package!r}))"
    )
    if python is not None and which(python) is None:
        raise PeerError(f"--{simulator.name}-python {python} is no program: give a Python")
    done = run_child([python or sys.executable, "-c", code])
    lines = done.stdout.split()
    return lines[-1] if done.returncode == 0 and lines else ""
