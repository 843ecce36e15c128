"""The runs that a process serves, as the page, the API and the metrics see them.

Any thread may read and change them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.errors import ConfigError
from coordinator.operate.http.viewed import RunView
from coordinator.operate.serve.down import DownView
from edge_sdk.program.control import ControlCommand
from edge_sdk.program.settings.reader import nearest

WITHOUT_LOOP = frozenset({"audit", "status", "devices", "device", "rounds", "blocks", "strip"})
"""Commands that only look, and answer also when no loop runs."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run that this process serves."""

    task: str
    folder: Path
    overview: RunView
    commands: Mapping[str, ControlCommand]
    """The commands of its control socket, by name."""
    silent_s: Callable[[], float] = lambda: 0.0
    """Seconds since its loop last gave a sign of life."""


class ServedRuns:
    """The runs of this process, by task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, ServedRun] = {}
        self._retired: set[str] = set()
        """Tasks whose run is served no more."""
        self._down: dict[str, tuple[Path, DownView]] = {}
        """Folders and views of runs that are down, by the name of their files."""

    def all(self) -> list[ServedRun]:
        """Return all runs, those that are down included, in the order of their tasks' names."""
        with self._lock:
            return [run for _, run in sorted(self._known().items())]

    def _known(self) -> dict[str, ServedRun]:
        """Return all runs by their names.

        A run that is down beside one of the same task has that of its file.
        """
        found = dict(self._runs)
        for file, (folder, view) in self._down.items():
            taken = view.task in self._runs and view.task not in self._retired
            name = file if taken else view.task
            found[name] = ServedRun(name, folder, replace(view, task=name), {})
        return found

    def get(self, task: str) -> ServedRun:
        """Return the run of a task. Raises `ConfigError` if there is none."""
        with self._lock:
            known = self._known()
            run, names = known.get(task), sorted(known)
        if run is None:
            hint = nearest(task, names) if names else ""
            raise ConfigError(f"no run of task {task!r} is served here{hint}")
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

    def retire(self, task: str) -> None:
        """Note that a run is served no more: it can still be looked at, but not changed."""
        with self._lock:
            if (run := self._runs.get(task)) is not None:
                kept = {name: each for name, each in run.commands.items() if name in WITHOUT_LOOP}
                self._runs[task] = replace(run, commands=kept, silent_s=lambda: 0.0)
                self._retired.add(task)

    def remove(self, task: str) -> None:
        """Forget a run that is served no more; does nothing if there is none."""
        with self._lock:
            self._runs.pop(task, None)
            self._retired.discard(task)

    def show_down(self, file: str, task: str, folder: Path, why: str) -> None:
        """Show that the run of a file is down, and why, until `hide_down`."""
        with self._lock:
            before = self._runs[task].overview if task in self._retired else None
            self._down[file] = folder, DownView(task, why, before)

    def hide_down(self, file: str) -> None:
        """Note that the run of a file is down no more, or that its file is gone."""
        with self._lock:
            self._down.pop(file, None)
