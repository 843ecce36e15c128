"""The in-memory link: messages between endpoints of one process, in the order they were sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from edge_sdk.protocol.errors import StateError

M = TypeVar("M")


class MemoryLink(Generic[M]):
    """A queue that delivers to named endpoints. Delivery happens only in `deliver`."""

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

    def deliver(self) -> bool:
        """Deliver the oldest message; False if there is none."""
        if not self._queue:
            return False
        to, message = self._queue.popleft()
        if to in self._endpoints:
            self._endpoints[to](message)
        return True
