"""Work side by side in threads, for a thread that waits until all of it is done.

Some of it writes files. A thread of a pool that finds no room on the disk waits as the thread that
began the work would (`waiting_for_room`), and lets that one do the waiting: what waits may be for
its thread alone, as the coordinator's loop is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import TypeVar

from edge_sdk.program.files import DiskFull, WaitForRoom, room_wait, waiting_for_room

T = TypeVar("T")
_Lack = tuple[DiskFull, Future[None]]


def side_by_side(pool: Executor, works: Iterable[Callable[[], T]]) -> list[T]:
    """Do all works in the pool's threads; return their results in order.

    Raises the first error that comes, once no work is being done any more; what was not begun is
    left out.
    """
    wait = room_wait()
    news: SimpleQueue[_Lack | Future[T]] = SimpleQueue()

    def ask(full: DiskFull) -> None:
        """Let the thread that began the work wait."""
        answer: Future[None] = Future()
        news.put((full, answer))
        answer.result()

    def do(work: Callable[[], T]) -> T:
        with waiting_for_room(None if wait is None else ask):
            return work()

    futures = [pool.submit(do, work) for work in works]
    for each in futures:
        each.add_done_callback(news.put)
    left, failed = len(futures), None
    while left:
        found = news.get()
        if isinstance(found, tuple):
            _answer(wait, *found)
            continue
        left -= 1
        if failed is None and not found.cancelled() and found.exception() is not None:
            failed = found
            for each in futures:
                each.cancel()
    if failed is not None:
        failed.result()
    return [each.result() for each in futures]


def _answer(wait: WaitForRoom | None, full: DiskFull, answer: Future[None]) -> None:
    """Wait for room; whoever asked goes on, or ends with what the waiting raises."""
    try:
        if wait is not None:
            wait(full)
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(None)
