"""Programs that know what no file shows: run in the background, with a timeout.

A command may take seconds or never end, so nobody waits for it: a snapshot takes the result of the
last run, with its age, and starts the next run when due. Nothing runs unless snapshots are taken.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.machine.snapshot import Snapshot

log = logging.getLogger(__name__)

KEPT_RUNS = 10
"""A value becomes unknown once this many runs in a row failed to renew it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program, the values it reports and their parser, which may raise on foreign output."""

    argv: tuple[str, ...]
    program: Callable[[str], str | None]
    """Path of a program by name; None: not installed."""
    parse: Callable[[str], Snapshot]
    fills: tuple[str, ...]
    """Paths of the values it reports; it runs only while one of them is otherwise unknown."""
    every_s: float = 30.0
    timeout_s: float = 10.0


class CommandFailed(Exception):
    """A run gave no result."""


class Background:
    """Runs one command repeatedly, as long as snapshots are taken. Never raises."""

    def __init__(self, command: Command, clock: Callable[[], float]) -> None:
        self._command = command
        self._clock = clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started: float | None = None
        self._last: tuple[float, Snapshot] | None = None
        self._told: set[str] = set()
        self._closed = False

    @property
    def fills(self) -> tuple[str, ...]:
        """Paths of the values the command reports."""
        return self._command.fills

    def latest(self) -> Snapshot:
        """Return the result of the last good run, aged; start another run when due."""
        with self._lock:
            now = self._clock()
            due = self._started is None or now - self._started >= self._command.every_s
            if due and not self._closed and (self._thread is None or not self._thread.is_alive()):
                self._started = now
                self._thread = threading.Thread(
                    target=self._run, name=f"profile-{self._command.argv[0]}", daemon=True
                )
                self._thread.start()
            if self._last is None:
                return Snapshot()
            then, said = self._last
        return said.aged(now - then).no_older_than(KEPT_RUNS * self._command.every_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait for the current run, if any; False: it is still running."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def close(self) -> None:
        """Kill the current run and start no other."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)
        self.settle(self._command.timeout_s)

    def _run(self) -> None:
        try:
            said = self._command.parse(self._output())
        except CommandFailed as error:
            self._tell(str(error), str(error), logging.INFO)
        except Exception as error:
            # Whatever a parser stumbles over in foreign output costs only this value.
            why = f"prints unexpected output ({error!r:.200})"
            self._tell("nonsense", why, logging.WARNING)
        else:
            with self._lock:
                self._last = (self._clock(), said)

    def _output(self) -> str:
        name, *arguments = self._command.argv
        if (program := self._command.program(name)) is None:
            raise CommandFailed("is not installed")
        try:
            process = _start([program, *arguments])
        except OSError as error:
            raise CommandFailed(f"cannot be run ({error})") from error
        with self._lock:
            self._process = process
            if self._closed:
                _kill(process)
        try:
            output, _ = process.communicate(timeout=self._command.timeout_s)
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"does not answer within {self._command.timeout_s:g} s") from error
        finally:
            with self._lock:
                self._process = None
            _end(process)
        if process.returncode != 0:
            raise CommandFailed(f"fails with exit code {process.returncode}")
        return output.decode("utf-8", "replace")

    def _tell(self, kind: str, why: str, level: int) -> None:
        """Log why a value is unknown, once for each kind of failure."""
        if kind not in self._told:
            self._told.add(kind)
            fills = ", ".join(self.fills)
            log.log(level, "%s %s; unknown: %s", self._command.argv[0], why, fills)


# -- processes -----------------------------------------------------------------------------------

_running: set[subprocess.Popen[bytes]] = set()
"""Processes to kill at exit, when the threads that wait for them are gone."""


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - system programs, no shell, no foreign text
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
        # Its own process group: scripts leave children behind that must be killed with them.
        start_new_session=True,
    )
    _running.add(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap the process, without waiting for children that hold its output."""
    _kill(process)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
    _running.discard(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return  # Reaped: its number may belong to another process by now.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


@atexit.register
def _kill_running() -> None:
    for process in list(_running):
        _kill(process)
