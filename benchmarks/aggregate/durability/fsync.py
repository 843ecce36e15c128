"""The cost of being durable: rounds with and without `fsync`, in turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.aggregate.durability.disk import FaultyDisk
from benchmarks.aggregate.durability.site import ROUNDS, CrashSite, make_model, quiet
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent
from edge_sdk.program import files

METHOD = (
    "Runs of ram-fed (4 devices in memory, 3 rounds, the real service) in the folder for temporary "
    "files, in turns as they are and with an fsync that does nothing. Median of the seconds of a "
    "run, from the start of the service to its end, divided by its rounds. SQLite syncs in both. "
    "The ratio says what durability costs on this disk; training and the network are not in it, so "
    "in a real round the share is smaller."
)
GROUPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FsyncConfig:
    """Parameters: the model's size, and how often each kind of run is made."""

    megabytes: float = 20.0
    turns: int = 7

    @property
    def ticks(self) -> int:
        """Number of ticks of a measurement."""
        return 2 * self.turns


@dataclass(frozen=True, slots=True, kw_only=True)
class FsyncRow:
    """Seconds of a round."""

    megabytes: float
    synced_s: float
    unsynced_s: float
    ratio: float


class _PlainDisk(FaultyDisk):
    """A disk without faults, on which nothing is followed."""

    def __enter__(self) -> FaultyDisk:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave everything as it is."""

    def step(self, operation: str, subject: str, *, needs_room: bool = False) -> None:
        """Count nothing."""


class _NoSync:
    """`os` with an `fsync` that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, handle: int) -> None:
        """Do nothing."""


@contextmanager
def _unsynced() -> Iterator[None]:
    """Let nothing be synced."""
    vars(files)["os"] = _NoSync()
    try:
        yield
    finally:
        vars(files)["os"] = os


def measure_fsync(config: FsyncConfig, begin: Begin = silent) -> FsyncRow:
    """Run with and without `fsync`, in turns."""
    inputs = max(4, round(config.megabytes * 1e6 / 4 / (GROUPS * 64)))
    model = make_model(inputs, (64,) * GROUPS)
    tick = begin(f"fsync, a model of {config.megabytes:g} MB")
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(config.turns):
        for synced in (True, False):
            with TemporaryDirectory(prefix="tessera-durability-") as folder, quiet():
                site = CrashSite(
                    "ram-fed",
                    Path(folder),
                    model=model,
                    chunk_bytes=2**18,
                    make_disk=_PlainDisk,
                )
                os.sync()  # what others wrote is not ours to wait for
                begun = time.perf_counter()
                with nullcontext() if synced else _unsynced():
                    site.run()
                found[synced].append((time.perf_counter() - begun) / ROUNDS)
            tick()
    synced_s, unsynced_s = (statistics.median(found[each]) for each in (True, False))
    return FsyncRow(
        megabytes=config.megabytes,
        synced_s=synced_s,
        unsynced_s=unsynced_s,
        ratio=synced_s / unsynced_s,
    )


def fsync_figures(row: FsyncRow) -> list[Figure]:
    """Return the figures of a measurement."""
    return [
        Figure("durability.round.synced_s", row.synced_s, "s"),
        Figure("durability.round.fsync_ratio", row.ratio, "×"),
    ]
