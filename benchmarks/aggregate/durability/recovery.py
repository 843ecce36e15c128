"""Seconds from the start of a coordinator's process until it answers the first bid."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.aggregate.durability.recovering import ANSWERED, answer_bid, fill_memory
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent
from edge_sdk.program.processes import run_child

METHOD = (
    "A run of ram-fed with devices in memory: each has trained a quarter of the model once, "
    "through the real service over a link in memory. Its process is killed. Then a new process "
    "starts, opens the run, publishes the model and opens a round; one device bids and is assigned "
    "its part. From the start of that process, the interpreter and all imports included; the "
    "pages of its files are warm, and there is no network. Median of a few starts."
)
TARGET_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTrial:
    """Parameters: size of the model, devices in memory, and how often it is started."""

    megabytes: float = 100.0
    devices: int = 100
    starts: int = 5

    @property
    def ticks(self) -> int:
        """Number of ticks of a measurement."""
        return 1 + self.starts


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """Seconds until the first bid is answered."""

    megabytes: float
    devices: int
    memory_bytes: int
    """Bytes of the memory's files."""
    answered_s: float
    slowest_s: float
    cpu_s: float
    """CPU seconds of the process until then: the wait without neighbours is hardly longer."""


def measure_answers(config: RecoveryTrial, begin: Begin = silent) -> RecoveryTimes:
    """Make the run, and start it as often as the parameters say. Raises `FigureError`."""
    tick = begin(f"{config.devices} devices in memory, a model of {config.megabytes:g} MB")
    with TemporaryDirectory(prefix="tessera-durability-") as place:
        folder = Path(place) / "run"
        fill_memory(folder, config.megabytes, config.devices)
        tick()
        found: list[tuple[float, float]] = []
        for _ in range(config.starts):
            found.append(_start(folder, config.megabytes))
            tick()
        memory = sum(path.stat().st_size for path in (folder / "memory").iterdir())
    return RecoveryTimes(
        megabytes=config.megabytes,
        devices=config.devices,
        memory_bytes=memory,
        answered_s=statistics.median(each for each, _ in found),
        slowest_s=max(each for each, _ in found),
        cpu_s=statistics.median(each for _, each in found),
    )


def _start(folder: Path, megabytes: float) -> tuple[float, float]:
    """Start a process on the run: seconds until it answered the bid, and CPU seconds of those."""
    answered: list[tuple[float, float]] = []

    def hear(line: str) -> None:
        word, _, cpu_s = line.partition(" ")
        if word == ANSWERED:
            answered.append((time.perf_counter() - begun, float(cpu_s)))

    command = [sys.executable, "-m", answer_bid.__module__, str(folder), str(megabytes)]
    begun = time.perf_counter()
    done = run_child(command, hear=hear)
    if done.returncode or not answered:
        raise FigureError(f"the coordinator did not answer a bid: {done.stderr[-500:]}")
    return answered[0]


def recovery_figures(row: RecoveryTimes, *, quick: bool) -> list[Figure]:
    """Return the figures; a quick run has a smaller model and so no target."""
    target = None if quick else TARGET_S
    return [
        Figure("durability.recovery.answered_s", row.answered_s, "s", target=target),
        Figure("durability.recovery.cpu_s", row.cpu_s, "s"),
    ]
