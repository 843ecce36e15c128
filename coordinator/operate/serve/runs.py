"""The runs that a process serves, as the page, the API and the metrics see them.

Any thread may read and change them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator.errors import ConfigError
from edge_sdk.program.control import ControlCommand
from edge_sdk.program.settings.reader import nearest


class RunView(Protocol):
    """Answers about a run from any thread, without waiting for the loop that serves it."""

    @property
    def sequence(self) -> int:
        """Number that grows with every change."""

    def status(self) -> dict[str, Any]:
        """State of the run and its totals."""

    def devices(self, since: int = 0) -> list[dict[str, Any]]:
        """Rows of the devices that changed after sequence `since`; 0: of all."""

    def device(self, name: str) -> dict[str, Any]:
        """Row of a device, with its last rounds. Raises `ConfigError` for an unknown name."""

    def rounds(self, since: int = 0) -> list[dict[str, Any]]:
        """Rounds above `since`."""

    def blocks(self) -> dict[str, Any]:
        """Map of the model's blocks."""

    def strip(self, rounds: int = 60) -> dict[str, Any]:
        """One character per device and round, for the last `rounds`."""

    def wait(self, sequence: int, timeout_s: float) -> int:
        """Block until `sequence` is exceeded or time is up; return the present one."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run that this process serves."""

    task: str
    folder: Path
    overview: RunView
    commands: Mapping[str, ControlCommand]
    """The commands of its control socket, by name."""


class ServedRuns:
    """The runs of this process, by task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, ServedRun] = {}

    def all(self) -> list[ServedRun]:
        """Return all runs, in the order of their tasks' names."""
        with self._lock:
            return [run for _, run in sorted(self._runs.items())]

    def get(self, task: str) -> ServedRun:
        """Return the run of a task. Raises `ConfigError` if there is none."""
        with self._lock:
            run = self._runs.get(task)
            names = sorted(self._runs)
        if run is None:
            known = nearest(task, names) if names else ""
            raise ConfigError(f"no run of task {task!r} is served here{known}")
        return run

    def add(self, run: ServedRun) -> None:
        """Add a run. Raises `ConfigError` if its task is served already."""
        with self._lock:
            if run.task in self._runs:
                raise ConfigError(
                    f"task {run.task!r} is served already, from {self._runs[run.task].folder}: "
                    "give one of the two another task.name"
                )
            self._runs[run.task] = run

    def remove(self, task: str) -> None:
        """Forget a run that is served no more; does nothing if there is none."""
        with self._lock:
            self._runs.pop(task, None)
