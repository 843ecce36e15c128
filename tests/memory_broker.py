"""A broker in this process with the same links, for tests: no sockets, no threads.

Everything happens in `step` and `run`, in an order that depends only on the calls. Connections end,
return and lose messages on command. Where brokers differ, it behaves as Mosquitto does with clean
sessions; a link that lost its connection returns only through `restore` or `start`.
`publish` and `subscribe` may be called from any thread, everything else from one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from threading import Lock
from types import MappingProxyType
from typing import TypeAlias

from edge_sdk.protocol.errors import StateError
from edge_sdk.transport.filters import check_filter, check_topic, matches
from edge_sdk.transport.link import (
    Connected,
    Deliver,
    Disconnected,
    Link,
    LinkEvent,
    Received,
    Refused,
    Will,
    Writable,
    check_name,
)
from edge_sdk.transport.outbox import BULK_BYTES, CONTROL_BYTES, Outbox, Publication

LARGEST = 268_435_455
"""Largest payload MQTT allows."""

Tamper: TypeAlias = Callable[[str, Received], Sequence[int]]
"""Decides the fate of a message on its way to the link of that name: one copy for every number,
which is the number of steps it is delayed. `[0]` leaves it alone, `[]` loses it, `[0, 0]`
duplicates it, `[3]` lets others overtake it."""


class MemoryBroker:
    """The broker. `retained` holds messages by topic; `tamper` is called for every delivery.

    Messages over `max_payload` bytes are rejected; retained ones over `max_retained` are passed on
    but not kept (0: none are); `wildcard_retained`: filters with wildcards receive retained ones.
    """

    def __init__(
        self,
        *,
        max_payload: int = LARGEST,
        max_retained: int = LARGEST,
        wildcard_retained: bool = True,
    ) -> None:
        self.tamper: Tamper | None = None
        self._max_payload = max_payload
        self._max_retained = max_retained
        self._wildcard_retained = wildcard_retained
        self._retained: dict[str, bytes] = {}
        self._links: list[BrokeredLink] = []
        self._running = True
        self._lock = Lock()
        self._order = count()
        self._now = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []

    @property
    def retained(self) -> Mapping[str, bytes]:
        """Retained messages, by topic."""
        return MappingProxyType(self._retained)

    def open_link(self, *, name: str, deliver: Deliver, will: Will | None = None) -> BrokeredLink:
        """Open a link, as `open_link` does; it connects at the next step."""
        check_name(name)
        if will is not None:
            check_topic(will.topic)
        link = BrokeredLink(self, name, deliver, will)
        self._links.append(link)
        self._later(lambda: self._connect(link))
        return link

    def step(self) -> bool:
        """Let one thing happen; False if there is nothing to do."""
        with self._lock:
            if not self._queue:
                return False
            due, _, action = heapq.heappop(self._queue)
            self._now = max(self._now + 1, due)
        action()
        return True

    def run(self, most: int = 1_000_000) -> int:
        """Step until nothing is left to do; returns the number of steps.

        Raises StateError after `most` steps: something answers itself for ever.
        """
        for steps in range(most):
            if not self.step():
                return steps
        raise StateError(f"still busy after {most} steps")

    def cut(self, link: Link, reason: str = "the connection was cut") -> None:
        """Break a link's connection as a network would; the broker sends its will."""
        mine = self._own(link)
        if mine.connected:
            self._disconnect(mine, reason, will=True)

    def restore(self, link: Link) -> None:
        """Let a link that was cut reconnect at the next step."""
        mine = self._own(link)
        self._later(lambda: self._connect(mine))

    def stop(self) -> None:
        """Stop the broker and end every connection; no wills are sent."""
        self._running = False
        for link in self._links:
            if link.connected:
                self._disconnect(link, "the broker stopped", will=False)

    def start(self, *, keep_retained: bool = True) -> None:
        """Start again after `stop`, with or without the retained messages; all links return."""
        self._running = True
        if not keep_retained:
            self._retained.clear()
        for link in list(self._links):
            self.restore(link)

    def _own(self, link: Link) -> BrokeredLink:
        if not isinstance(link, BrokeredLink) or link not in self._links:
            raise StateError("the link is not one of this broker's, or was closed")
        return link

    def _later(self, action: Callable[[], None], steps: int = 0) -> None:
        with self._lock:
            heapq.heappush(self._queue, (self._now + steps, next(self._order), action))

    def _connect(self, link: BrokeredLink) -> None:
        if link.connected or link not in self._links:
            return
        if not self._running:
            link.tell(Disconnected("the broker is not running"))
            return
        for other in self._links:
            if other.name == link.name and other.connected:
                self._disconnect(other, "another connection uses the same name", will=True)
        link.connection += 1
        link.connected = True
        link.subscribed = set(link.wanted)
        link.tell(Connected(first=link.connection == 1))
        for bulk, topic_filter in link.wanted:
            self._send_retained(link, bulk, topic_filter)
        for bulk in (False, True):
            self._later(lambda bulk=bulk: self._drain(link, bulk))  # type: ignore[misc]

    def _disconnect(self, link: BrokeredLink, reason: str, *, will: bool) -> None:
        link.connected = False
        link.subscribed = set()
        if will and link.will is not None:
            self._accept(Publication(link.will.topic, link.will.payload, link.will.retain))
        link.tell(Disconnected(reason))

    def _drain(self, link: BrokeredLink, bulk: bool) -> None:
        """Take the oldest message of a link's outbox, and schedule the next."""
        outbox = link.outboxes[bulk]
        message = outbox.next() if link.connected else None
        if message is None:
            return
        outbox.sent(0)
        outbox.acknowledged(0)
        if outbox.take_room():
            link.tell(Writable(bulk))
        if len(message.payload) > self._max_payload:
            link.tell(Refused(message.topic, f"the broker takes {self._max_payload} bytes at most"))
        else:
            self._accept(message)
        self._later(lambda: self._drain(link, bulk))

    def _accept(self, message: Publication) -> None:
        if message.retain and not message.payload:
            self._retained.pop(message.topic, None)
        elif message.retain and len(message.payload) <= self._max_retained:
            self._retained[message.topic] = message.payload
        for link in self._links:
            for bulk in (False, True):
                if any(matches(message.topic, f) for f in _of(bulk, link.subscribed)):
                    self._send(link, bulk, Received(message.topic, message.payload, False))

    def _send_retained(self, link: BrokeredLink, bulk: bool, topic_filter: str) -> None:
        if not self._wildcard_retained and ("+" in topic_filter or "#" in topic_filter):
            return
        for topic, payload in self._retained.items():
            if matches(topic, topic_filter):
                self._send(link, bulk, Received(topic, payload, True))

    def _send(self, link: BrokeredLink, bulk: bool, event: Received) -> None:
        connection = link.connection

        def arrive() -> None:
            wanted = any(matches(event.topic, f) for f in _of(bulk, link.wanted))
            if wanted and link.connected and link.connection == connection:
                link.tell(event)

        for steps in self.tamper(link.name, event) if self.tamper else (0,):
            self._later(arrive, steps)

    def _subscribe(self, link: BrokeredLink, bulk: bool, topic_filter: str) -> None:
        if link.connected and (bulk, topic_filter) in link.wanted:
            link.subscribed.add((bulk, topic_filter))
            self._send_retained(link, bulk, topic_filter)

    def _renew(self, link: BrokeredLink, will: Will | None) -> None:
        if link.connected:
            self._disconnect(link, "connecting anew", will=True)
        link.will = will or link.will
        self._connect(link)

    def _close(self, link: BrokeredLink, *, goodbye: bool) -> None:
        if link.closed:
            return
        link.closed = True
        for bulk in (False, True) if goodbye else ():
            while link.connected and not link.outboxes[bulk].empty:
                self._drain(link, bulk)
        if link.connected:
            self._disconnect(link, "closed", will=not goodbye)
        self._links.remove(link)


class BrokeredLink:
    """A `Link` of a MemoryBroker. Only the methods of `Link` are for users."""

    def __init__(
        self, broker: MemoryBroker, name: str, deliver: Deliver, will: Will | None
    ) -> None:
        self.name = name
        self.will = will
        self.connected = False
        self.closed = False
        self.connection = 0
        self.wanted: dict[tuple[bool, str], None] = {}
        self.subscribed: set[tuple[bool, str]] = set()
        self.outboxes = {False: Outbox(CONTROL_BYTES), True: Outbox(BULK_BYTES)}
        self._broker = broker
        self._deliver = deliver

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """See `Link.publish`."""
        check_topic(topic)
        if self.closed or not self.outboxes[bulk].offer(Publication(topic, bytes(payload), retain)):
            return False
        self._broker._later(lambda: self._broker._drain(self, bulk))
        return True

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.subscribe`."""
        check_filter(topic_filter)
        self.wanted = {**self.wanted, (bulk, topic_filter): None}
        self._broker._later(lambda: self._broker._subscribe(self, bulk, topic_filter))

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.unsubscribe`."""
        gone = (bulk, topic_filter)
        self.wanted = {key: None for key in self.wanted if key != gone}
        self._broker._later(lambda: self.subscribed.discard(gone))

    def acknowledged(self, *, bulk: bool = False) -> bool:
        """See `Link.acknowledged`."""
        return self.outboxes[bulk].empty

    def silence_s(self, *, bulk: bool = False) -> float:
        """See `Link.silence_s`; messages arrive whole here, so none is ever partly received."""
        return math.inf

    def reconnect(self, will: Will | None = None) -> None:
        """See `Link.reconnect`."""
        self._broker._later(lambda: self._broker._renew(self, will))

    def close(self, *, flush: bool = True) -> None:
        """See `Link.close`."""
        for outbox in () if flush else self.outboxes.values():
            outbox.drop()
        self._broker._close(self, goodbye=True)

    def kill(self) -> None:
        """See `Link.kill`."""
        self._broker._close(self, goodbye=False)

    def tell(self, event: LinkEvent) -> None:
        """Deliver an event, unless the link is closed."""
        if not self.closed:
            self._deliver(event)


def _of(bulk: bool, filters: Iterable[tuple[bool, str]]) -> Iterator[str]:
    return (topic_filter for of_bulk, topic_filter in filters if of_bulk is bulk)
