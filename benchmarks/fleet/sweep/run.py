"""Runs the cases of a sweep in processes of their own, and adds what they find to its rows.

A process takes one case after the other. One that dies takes only its case with it, which is
recorded as failed. Ctrl-C stops the processes; rows of cases that they were at are removed when the
sweep goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.fleet.sweep.grid import SweepCase
from benchmarks.fleet.sweep.rows import FAILED, FINISHED, SweepRows
from benchmarks.report.progress import Begin
from edge_sdk.program.processes import start_piped

LAST_WORDS = 5
"""Lines of a process that died which the record of its case has."""
STOP_S = 10.0
"""Seconds that a process may take to end when asked; then it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlaces:
    """Where cases find their files: the sweep's folder, the data sets, TensorBoard's folder."""

    base: Path
    data: Path | None = None
    tensorboard: Path | None = None

    def order(self, case: SweepCase) -> str:
        """Return the line that a process gets for a case."""
        folder = f"{case.slug}-{case.id[:6]}"
        board = None if self.tensorboard is None else str(self.tensorboard / folder)
        return json.dumps(
            {
                "settings": case.settings,
                "base": str(self.base),
                "data": None if self.data is None else str(self.data),
                "tensorboard": board,
            }
        )


def run_cases(
    cases: Sequence[SweepCase], rows: SweepRows, places: SweepPlaces, jobs: int, begin: Begin
) -> None:
    """Run cases, `jobs` at a time, until all have ended. Raises `KeyboardInterrupt`."""
    waiting: SimpleQueue[SweepCase] = SimpleQueue()
    for case in cases:
        waiting.put(case)
    said: SimpleQueue[_Said] = SimpleQueue()
    workers = [_Worker(waiting, said, places) for _ in range(min(jobs, len(cases)))]
    ticks: dict[str, Callable[[], None]] = {}
    try:
        for worker in workers:
            worker.start()
        left = len(cases)
        while left:
            case, answer = _next(said)
            if case.id not in ticks:
                ticks[case.id] = begin(str(case))
            if answer.get("tick"):
                ticks[case.id]()
            elif "row" in answer:
                row = answer["row"]
                rows.add({**case.row, **row})
                left -= row["state"] in (FINISHED, FAILED)
            elif "broken" in answer:
                raise answer["broken"]
    finally:
        for worker in workers:
            worker.stop()


_Said = tuple[SweepCase, Mapping[str, Any]]


def _next(said: SimpleQueue[_Said]) -> _Said:
    while True:  # so that Ctrl-C is heard on every system
        with suppress(Empty):
            return said.get(timeout=1.0)


class _Worker:
    """A thread that hands cases to a process; it makes another where one dies."""

    def __init__(
        self, waiting: SimpleQueue[SweepCase], said: SimpleQueue[_Said], places: SweepPlaces
    ) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._waiting, self._said, self._places = waiting, said, places
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._words: deque[str] = deque(maxlen=LAST_WORDS)

    def start(self) -> None:
        """Begin with the first case."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            try:
                case = self._waiting.get_nowait()
            except Empty:
                break
            try:
                self._hand_over(case)
            except Exception as error:  # this thread is the outermost loop
                self._said.put((case, {"broken": error}))
        self.stop()

    def stop(self) -> None:
        """End the process, and take no more cases."""
        self._stopped = True
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process)

    def _hand_over(self, case: SweepCase) -> None:
        self._said.put((case, {}))
        process = self._begun()
        if process is None or process.stdin is None or process.stdout is None:
            return
        with suppress(BrokenPipeError):
            process.stdin.write(self._places.order(case) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            answer = json.loads(line)
            self._said.put((case, answer))
            if "row" in answer and answer["row"]["state"] in (FINISHED, FAILED):
                return
        if not self._stopped:
            code = process.wait()
            with self._lock:
                self._process = None
            _close(process)
            words = f"its process ended with code {code}, perhaps for want of memory"
            said = "; ".join([words, *self._words])
            self._said.put((case, {"row": {"state": FAILED, "error": said}}))

    def _begun(self) -> subprocess.Popen[str] | None:
        with self._lock:
            if self._stopped:
                return None
            if self._process is None:
                command = [sys.executable, "-m", "benchmarks.fleet.sweep.worker"]
                self._process = start_piped(command)
                hear = threading.Thread(target=self._hear, args=(self._process,), daemon=True)
                hear.start()
            return self._process

    def _hear(self, process: subprocess.Popen[str]) -> None:
        """Keep the last words of a process; unread ones would stop it."""
        if process.stderr is not None:
            with suppress(ValueError):  # the pipe was closed
                for line in process.stderr:
                    self._words.append(line.strip())


def _close(process: subprocess.Popen[str]) -> None:
    """Close the pipes of a process that has ended."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
