"""Seconds from the start of a coordinator's process until it answers the first bid."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.aggregate.durability.recovering import answer_bid, fill_memory
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent

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


def measure_answers(config: RecoveryTrial, begin: Begin = silent) -> RecoveryTimes:
    """Make the run, and start it as often as the parameters say. Raises `FigureError`."""
    tick = begin(f"{config.devices} devices in memory, a model of {config.megabytes:g} MB")
    with TemporaryDirectory(prefix="tessera-durability-") as place:
        folder = Path(place) / "run"
        fill_memory(folder, config.megabytes, config.devices)
        tick()
        found = []
        for _ in range(config.starts):
            found.append(_start(folder, config.megabytes))
            tick()
        memory = sum(path.stat().st_size for path in (folder / "memory").iterdir())
    return RecoveryTimes(
        megabytes=config.megabytes,
        devices=config.devices,
        memory_bytes=memory,
        answered_s=statistics.median(found),
        slowest_s=max(found),
    )


def _start(folder: Path, megabytes: float) -> float:
    """Start a process on the run; returns its seconds until the bid was answered."""
    command = [sys.executable, "-m", answer_bid.__module__, str(folder), str(megabytes)]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise FigureError("the coordinator's process has no output")
        line = process.stdout.readline().strip()
        seconds = time.perf_counter() - begun
    if line != "answered" or process.returncode:
        raise FigureError(f"the coordinator did not answer a bid: exit code {process.returncode}")
    return seconds


def recovery_figures(row: RecoveryTimes, *, quick: bool) -> list[Figure]:
    """Return the figures; a quick run has a smaller model and so no target."""
    target = None if quick else TARGET_S
    return [Figure("durability.recovery.answered_s", row.answered_s, "s", target=target)]
