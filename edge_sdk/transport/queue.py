"""The in-memory link: messages between endpoints of one process, in the order they were sent."""

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
            raise StateError(f"there is an endpoint {name!r} already")
        self._endpoints[name] = receive

    def send(self, to: str, message: M) -> None:
        """Queue a message for one endpoint; for one that is not there, it is lost."""
        self._queue.append((to, message))

    def broadcast(self, sender: str, message: M) -> None:
        """Queue a message for everybody but the sender, in the order they were attached."""
        for name in self._endpoints:
            if name != sender:
                self.send(name, message)

    def take(self, *, alone: str) -> list[Callable[[], None]]:
        """The oldest messages, as deliveries that may happen at the same time; empty if none.

        They are for endpoints that all differ; one for `alone` comes by itself.
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
        """Whether nothing is waiting."""
        return not self._queue


def _delivery(receive: Callable[[M], None], message: M) -> Callable[[], None]:
    return lambda: receive(message)
