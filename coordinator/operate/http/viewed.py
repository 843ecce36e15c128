"""The needs of the page, the API and the metrics: runs, as any thread may see and command them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from edge_sdk.program.control import ControlCommand


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


class ViewedRun(Protocol):
    """A run that is served: its view and its commands."""

    @property
    def task(self) -> str:
        """Name of its task."""

    @property
    def folder(self) -> Path:
        """Folder of the run."""

    @property
    def overview(self) -> RunView:
        """Its view."""

    @property
    def commands(self) -> Mapping[str, ControlCommand]:
        """The commands of its control socket, by name."""

    def silent_s(self) -> float:
        """Seconds since its loop last gave a sign of life."""


class ViewedRuns(Protocol):
    """All runs of a process."""

    def all(self) -> Sequence[ViewedRun]:
        """Return all runs."""

    def get(self, task: str) -> ViewedRun:
        """Return the run of a task. Raises `ConfigError` if there is none."""
