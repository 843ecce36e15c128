"""Long work: in threads beside the loop, or at once where nobody waits for an answer.

A commit takes as long as its model is large. The loop hands its parts over here and goes on
answering; what belongs to the loop (the state machine, the link, the history) stays with it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, Protocol, TypeVar

from edge_sdk.program.files import WaitForRoom, waiting_for_room

T = TypeVar("T")


class Aside(Protocol):
    """Does work that was begun, some time."""

    def attend(self, done: Callable[[], object], wait: WaitForRoom) -> None:
        """Set what is called, perhaps by other threads, when work is done, and when the disk is
        full (`waiting_for_room`). Threads of a work let it do the waiting (`side_by_side`)."""

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Begin some work. Works may be done side by side, and in any order."""


class AtOnce:
    """Does all work at once, in the caller's thread."""

    def attend(self, done: Callable[[], object], wait: WaitForRoom) -> None:
        """Do nothing: the caller sees what is done, and has set how to wait."""

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Do it. Raises what it raises."""
        future: Future[T] = Future()
        future.set_result(work())
        return future


class InThreads:
    """Does every work in a thread of its own, so that an idle run has none."""

    def __init__(self) -> None:
        self._done: Callable[[], object] = _nothing
        self._wait: WaitForRoom | None = None

    def attend(self, done: Callable[[], object], wait: WaitForRoom) -> None:
        """See `Aside`."""
        self._done, self._wait = done, wait

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """See `Aside`."""
        future: Future[T] = Future()
        Thread(target=self._work, args=(work, future), name="aside").start()
        return future

    def _work(self, work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            with waiting_for_room(self._wait):
                result = work()
        except BaseException as error:  # whoever waits for the result raises it
            future.set_exception(error)
        else:
            future.set_result(result)
        self._done()


def _nothing() -> None:
    """Do nothing."""
