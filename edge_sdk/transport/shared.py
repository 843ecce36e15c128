"""One link for several users in a program: a broker may let each certificate connect once.

    task a ──port──▶ ┐
                     ├─ one `Link`: two connections
    task b ──port──▶ ┘

A port is a `Link` to its user. Messages go to the ports whose filters match, everything else that
happens to the link to all of them. The link opens with the first port and closes with the last.

A connection has one will, so it is that of the first port: what the others wanted to be said of
them when the program vanishes remains unsaid.
"""

from __future__ import annotations

import logging
from collections import Counter
from threading import Event, RLock

from edge_sdk.transport.filters import matches
from edge_sdk.transport.link import (
    Connected,
    Deliver,
    Disconnected,
    Link,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
    Will,
)

log = logging.getLogger(__name__)


class SharedLink:
    """A link and its ports. `open_link` is what users take for their own `OpenLink`."""

    def __init__(self, opener: OpenLink) -> None:
        self._opener = opener
        self._lock = RLock()
        self._link: Link | None = None
        self._ports: list[LinkPort] = []
        self._filters: Counter[tuple[bool, str]] = Counter()
        self._state: Connected | Disconnected | None = None
        self.asked = Event()
        """Set when the first port was asked for: the link has its will."""

    def open_link(self, *, name: str, deliver: Deliver, will: Will | None = None) -> LinkPort:
        """Open a port; the first one opens the link, under its name and with its will."""
        with self._lock:
            self.asked.set()
            port = LinkPort(self, deliver)
            self._ports.append(port)
            if self._link is None:
                port.has_will = True
                try:
                    self._link = self._opener(name=name, deliver=self._deliver, will=will)
                except BaseException:
                    self._ports.remove(port)
                    raise
            elif self._state is not None:
                port.tell(self._state)
            return port

    @property
    def link(self) -> Link:
        """The one link; it is there while a port is open."""
        if self._link is None:
            raise RuntimeError("no port is open")
        return self._link

    def subscribe(self, port: LinkPort, bulk: bool, topic_filter: str) -> None:
        """Subscribe for a port; the broker sends what it retains, also to others with the filter.

        Raises LinkError for a malformed filter.
        """
        with self._lock:
            self.link.subscribe(topic_filter, bulk=bulk)
            if (bulk, topic_filter) not in port.filters:
                port.filters |= {(bulk, topic_filter)}
                self._filters[bulk, topic_filter] += 1

    def unsubscribe(self, port: LinkPort, bulk: bool, topic_filter: str) -> None:
        """Unsubscribe for a port; the link does so when nobody else wants it."""
        with self._lock:
            if (bulk, topic_filter) not in port.filters:
                return
            port.filters -= {(bulk, topic_filter)}
            self._filters[bulk, topic_filter] -= 1
            if not self._filters[bulk, topic_filter]:
                del self._filters[bulk, topic_filter]
                self.link.unsubscribe(topic_filter, bulk=bulk)

    def leave(self, port: LinkPort, *, flush: bool, kill: bool) -> None:
        """Close a port, and the link if it was the last one."""
        with self._lock:
            if port not in self._ports:
                return
            port.closed = True
            self._ports.remove(port)
            for bulk, topic_filter in list(port.filters):
                self.unsubscribe(port, bulk, topic_filter)
            if self._ports:
                return
            link, self._link, self._state = self.link, None, None
        # Not under the lock: the link may be delivering, and waits for that.
        if kill:
            link.kill()
        else:
            link.close(flush=flush)

    def _deliver(self, event: LinkEvent) -> None:
        with self._lock:
            if isinstance(event, Connected | Disconnected):
                self._state = event
            ports = list(self._ports)
        for port in ports:
            if port.wants(event):
                port.tell(event)


class LinkPort:
    """A user's side of a shared link; see `Link` for its methods."""

    def __init__(self, shared: SharedLink, deliver: Deliver) -> None:
        self._shared = shared
        self._deliver = deliver
        self._ever = False
        self._published: set[str] = set()
        self.has_will = False
        self.closed = False
        self.filters: frozenset[tuple[bool, str]] = frozenset()
        """Replaced, never changed: other threads read it."""

    def wants(self, event: LinkEvent) -> bool:
        """True if an event of the link concerns this port."""
        match event:
            case Received(topic):
                return any(matches(topic, each) for _, each in self.filters)
            case Refused(topic):
                mine = {each for _, each in self.filters}
                return topic in self._published or topic in mine
        return True

    def tell(self, event: LinkEvent) -> None:
        """Deliver an event; the link may have worked before this port did."""
        if self.closed:
            return
        if isinstance(event, Connected):
            event, self._ever = Connected(first=not self._ever), True
        try:
            self._deliver(event)
        except Exception:
            # Raised in here, it would keep the event from the other ports.
            log.exception("deliver failed; %s is lost", type(event).__name__)

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """See `Link.publish`."""
        if self.closed:
            return False
        self._published.add(topic)
        return self._shared.link.publish(topic, payload, retain=retain, bulk=bulk)

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.subscribe`."""
        if not self.closed:
            self._shared.subscribe(self, bulk, topic_filter)

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.unsubscribe`."""
        if not self.closed:
            self._shared.unsubscribe(self, bulk, topic_filter)

    def acknowledged(self, *, bulk: bool = False) -> bool:
        """See `Link.acknowledged`; it means the messages of all ports."""
        return self.closed or self._shared.link.acknowledged(bulk=bulk)

    def silence_s(self, *, bulk: bool = False) -> float:
        """See `Link.silence_s`; it means the messages of all ports."""
        return float("inf") if self.closed else self._shared.link.silence_s(bulk=bulk)

    def reconnect(self, will: Will | None = None) -> None:
        """See `Link.reconnect`; it ends the connections of all ports for a moment."""
        if not self.closed:
            self._shared.link.reconnect(will if self.has_will else None)

    def close(self, *, flush: bool = True) -> None:
        """See `Link.close`; the link goes on while others use it."""
        self._shared.leave(self, flush=flush, kill=False)

    def kill(self) -> None:
        """See `Link.kill`; the link goes on while others use it."""
        self._shared.leave(self, flush=False, kill=True)
