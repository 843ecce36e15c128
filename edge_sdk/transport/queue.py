"""The in-memory link: a queue of messages between endpoints of one process, in sending order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from edge_sdk.protocol.errors import StateError

M = TypeVar("M")


class MemoryLink(Generic[M]):
    """A queue that delivers to named endpoints. Delivery happens only through `take`."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Callable[[M], None]] = {}
        self._queue: deque[tuple[str, M]] = deque()

    def attach(self, name: str, receive: Callable[[M], None]) -> None:
        """Add an endpoint. Names are unique."""
        if name in self._endpoints:
            raise StateError(f"endpoint {name!r} already exists")
        self._endpoints[name] = receive

    def send(self, to: str, message: M) -> None:
        """Queue a message for one endpoint; it is lost if there is no such endpoint."""
        self._queue.append((to, message))

    def broadcast(self, sender: str, message: M) -> None:
        """Queue a message for everybody except the sender, in the order of attachment."""
        for name in self._endpoints:
            if name != sender:
                self.send(name, message)

    def take(self, *, alone: str) -> list[Callable[[], None]]:
        """Take the oldest messages, as deliveries that may run at the same time; empty if none.

        Their endpoints all differ; a message for `alone` comes by itself.
        """
        taken: dict[str, Callable[[], None]] = {}
        while self._queue:
            to, message = self._queue[0]
            if to in taken or (to == alone and taken):
                break
            self._queue.popleft()
            if to in self._endpoints:
                taken[to] = _delivery(self._endpoints[to], message)
            if to == alone:
                break
        return list(taken.values())

    @property
    def empty(self) -> bool:
        """True if nothing is waiting."""
        return not self._queue


def _delivery(receive: Callable[[M], None], message: M) -> Callable[[], None]:
    return lambda: receive(message)
