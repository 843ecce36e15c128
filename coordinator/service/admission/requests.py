"""Requests about a run from other threads, answered by its loop.

The state machines and the model belong to the loop's thread. A command on the control socket hands
its work over here and waits for the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from coordinator.errors import CoordinatorError

ANSWER_S = 25.0
"""Seconds that a request waits for the loop, which other requests may hold up, or a full disk."""

ENDING = "the process that serves the run is ending: start it again"

S = TypeVar("S")
T = TypeVar("T")


class BusyError(CoordinatorError):
    """A loop that did not get to a request in time. The work is not done; it may be tried again."""


class Requests(Generic[S]):
    """A queue of work on `S`, what the loop serves. Any thread may `ask`."""

    def __init__(self, wait_s: float = ANSWER_S) -> None:
        self._wait_s = wait_s
        self.wake: Callable[[], object] = lambda: None
        """Called by threads that ask, so that the loop notices; the loop sets it."""
        self._closed = False
        self._queue: SimpleQueue[tuple[Callable[[S], Any], Future[Any]]] = SimpleQueue()

    def ask(self, work: Callable[[S], T]) -> T:
        """Let the loop do the work; return its result, or raise what it raises.

        Raises `BusyError` if the loop does not get to it in time; it is then not done.
        """
        answer: Future[T] = Future()
        self._queue.put((work, answer))
        self.wake()
        if self._closed:
            self.close()
        try:
            return answer.result(self._wait_s)
        except Late as error:
            if not answer.cancel():
                return answer.result()
            raise BusyError(
                f"the run is busy and has not answered for {self._wait_s:g} s: try again"
            ) from error

    def close(self) -> None:
        """Refuse what waits and what comes: the loop has ended."""
        self._closed = True
        with suppress(Empty):
            while True:
                _, answer = self._queue.get_nowait()
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(CoordinatorError(ENDING))

    def serve(self, served: S) -> None:
        """Do all the work that waits; for the loop."""
        with suppress(Empty):
            while True:
                work, answer = self._queue.get_nowait()
                if not answer.set_running_or_notify_cancel():
                    continue
                try:
                    result = work(served)
                except Exception as error:
                    answer.set_exception(error)
                else:
                    with suppress(InvalidStateError):
                        answer.set_result(result)
