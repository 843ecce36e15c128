"""Presence of devices over time, as the broker publishes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from benchmarks.network.stage.files import TASK
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import TopicKind, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import decode_received
from edge_sdk.transport.link import LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings

OBSERVER = "observer"

Count = tuple[float, int]
"""(wall-clock time, number of devices present from then on)."""


class Presences:
    """Listens for the duration of a context."""

    def __init__(self, broker: BrokerSettings) -> None:
        self.coordinator = False
        """True while the coordinator is present."""
        self._broker = broker
        self._there: set[str] = set()
        self._counts: list[Count] = [(time.time(), 0)]
        self._lock = Lock()

    def __enter__(self) -> Presences:
        topics = Topics(TASK)
        self._link = open_link(self._broker, name=OBSERVER, deliver=self._deliver)
        self._link.subscribe(topics.coordinator)
        self._link.subscribe(topics.presences)
        return self

    def __exit__(self, *_: object) -> None:
        self._link.kill()

    @property
    def counts(self) -> list[Count]:
        """Return all changes, oldest first."""
        with self._lock:
            return list(self._counts)

    @property
    def number(self) -> int:
        """Number of devices present now."""
        with self._lock:
            return self._counts[-1][1]

    def _deliver(self, event: LinkEvent) -> None:
        if not isinstance(event, Received) or not event.payload:
            return
        with suppress(MessageError):  # not for us to judge
            topic = parse_topic(event.topic)
            message = decode_received(topic, event.payload)
            if not isinstance(message, Presence):
                return
            if topic.kind is TopicKind.COORDINATOR:
                self.coordinator = message.online
            else:
                self._note(message)

    def _note(self, presence: Presence) -> None:
        with self._lock:
            if presence.online:
                self._there.add(presence.name)
            else:
                self._there.discard(presence.name)
            if len(self._there) != self._counts[-1][1]:
                self._counts.append((time.time(), len(self._there)))


def reached_at(counts: Sequence[Count], number: int) -> float | None:
    """Return when this many devices were first present; None: never."""
    return next((at for at, there in counts if there >= number), None)


def least_between(counts: Sequence[Count], since: float, until: float) -> int:
    """Return the fewest devices present at any time in between."""
    before = [there for at, there in counts if at <= since]
    within = [there for at, there in counts if since < at <= until]
    return min([*before[-1:], *within], default=0)
