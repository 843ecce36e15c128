"""Messages a connection has yet to send, and sent ones that are not acknowledged.

Laws: messages waiting and under way never exceed the limit (a single message may); messages leave
in the order they were offered, and after a lost connection the unacknowledged ones leave again
first, in the same order.

A broker that rejects a message (too large, not allowed) closes the connection, and resending it
would go on for ever. After the broker closed a connection without any acknowledgement, messages go
out one at a time until those then under way are through; a message at which the connection ends
`TRIES` times is given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from threading import Lock

CONTROL_BYTES = 8 << 20
BULK_BYTES = 4 << 20
"""Most bytes that may wait and be under way, on each connection of a link."""

WINDOW = 16
"""Most messages under way without an acknowledgement."""

TRIES = 3
"""Connections a message may cost before it is given up."""

OVERHEAD_BYTES = 256
"""Size of a queued message besides its payload, so that empty ones are bounded too."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A message to be sent."""

    topic: str
    payload: bytes
    retain: bool

    @property
    def size(self) -> int:
        """Bytes it counts for in a queue."""
        return len(self.payload) + OVERHEAD_BYTES


class Outbox:
    """The queue of one connection. Safe to use from several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.window = WINDOW
        """Most messages under way without an acknowledgement; a broker may allow fewer."""
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._waiting: deque[Publication] = deque()
        self._under_way: dict[int, Publication] = {}
        self._bytes = 0
        self._turned_away = False
        self._acknowledged = False
        self._one_by_one = 0
        self._suspicion = 0

    def offer(self, publication: Publication) -> bool:
        """Queue a message; False if there is no room."""
        with self._lock:
            if self._bytes and self._bytes + publication.size > self._max_bytes:
                self._turned_away = True
                return False
            self._bytes += publication.size
            self._waiting.append(publication)
            return True

    def next(self) -> Publication | None:
        """Return the message to send now; None if there is none or enough are under way.

        `sent` must be called before the next call.
        """
        with self._lock:
            window = 1 if self._one_by_one else self.window
            if not self._waiting or len(self._under_way) >= window:
                return None
            return self._waiting[0]

    def sent(self, id: int) -> None:
        """Note that the message from `next` is under way, under this id."""
        with self._lock:
            self._under_way[id] = self._waiting.popleft()

    def acknowledged(self, id: int) -> None:
        """Note that the broker has the message."""
        with self._lock:
            publication = self._under_way.pop(id, None)
            if publication is None:
                return
            self._bytes -= publication.size
            self._acknowledged = True
            self._suspicion = 0
            self._one_by_one = max(0, self._one_by_one - 1)

    def lost(self, *, closed: bool) -> Publication | None:
        """Note that the connection is gone; everything under way waits again.

        `closed`: the broker ended it, rather than the network. Returns the message that is given
        up, if any.
        """
        with self._lock:
            given_up = None
            if closed and self._under_way and not self._acknowledged:
                self._suspicion += 1
                if self._suspicion >= TRIES and len(self._under_way) == 1:
                    _, given_up = self._under_way.popitem()
                    self._bytes -= given_up.size
                    self._suspicion = 0
                    self._one_by_one = max(0, self._one_by_one - 1)
                else:
                    self._one_by_one = max(self._one_by_one, len(self._under_way))
            self._waiting.extendleft(reversed(self._under_way.values()))
            self._under_way.clear()
            self._acknowledged = False
            return given_up

    def drop(self) -> None:
        """Drop the messages that are not under way."""
        with self._lock:
            self._bytes -= sum(each.size for each in self._waiting)
            self._waiting.clear()

    def take_room(self) -> bool:
        """True once after an offer was rejected, as soon as half the room is free again."""
        with self._lock:
            if self._turned_away and self._bytes <= self._max_bytes // 2:
                self._turned_away = False
                return True
            return False

    @property
    def searching(self) -> bool:
        """True while messages go one at a time, to find the one that ends connections."""
        with self._lock:
            return self._one_by_one > 0

    @property
    def empty(self) -> bool:
        """True if nothing is waiting or under way."""
        with self._lock:
            return not self._bytes
