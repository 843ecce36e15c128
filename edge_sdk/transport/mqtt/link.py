"""The link over MQTT: two connections that act as one.

When one of them is accepted, the other tries at once: a broker that comes back does so for both.
"""

from __future__ import annotations

import logging
import time
from threading import Lock

from edge_sdk.protocol.errors import StateError
from edge_sdk.protocol.messages.topics import BULK
from edge_sdk.transport.filters import check_filter, check_topic
from edge_sdk.transport.link import Connected, Deliver, Disconnected, LinkEvent, Will
from edge_sdk.transport.mqtt.connection import GOODBYE_S, Connection
from edge_sdk.transport.outbox import BULK_BYTES, CONTROL_BYTES, Publication
from edge_sdk.transport.settings import BrokerSettings, tls_context

FLUSH_S = 5.0
"""Seconds `close` tries to send queued messages."""

_log = logging.getLogger(__name__)


class MqttLink:
    """`Link` over MQTT 5 or 3.1.1; `open_link` makes and starts it."""

    def __init__(
        self, settings: BrokerSettings, *, name: str, deliver: Deliver, will: Will | None
    ) -> None:
        bulk_settings = settings.for_bulk()
        context, bulk_context = tls_context(settings), tls_context(bulk_settings)
        if will is not None:
            check_topic(will.topic)
        self._deliver = deliver
        self._lock = Lock()
        self._up: set[Connection] = set()
        self._ever = False
        self._closed = False
        self._last_reason: str | None = None
        self._denials = 0
        self._control = Connection(
            settings,
            context,
            self,
            client_id=name,
            will=will,
            max_bytes=CONTROL_BYTES,
            bulk=False,
        )
        self._bulk = Connection(
            bulk_settings,
            bulk_context,
            self,
            client_id=name + BULK,
            will=None,
            max_bytes=BULK_BYTES,
            bulk=True,
        )

    def start(self) -> None:
        """Start connecting."""
        self._control.start()
        self._bulk.start()

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """See `Link.publish`."""
        check_topic(topic)
        # Copy anything that is not bytes: its owner may change it before it is sent.
        return self._at(bulk).publish(Publication(topic, bytes(payload), retain))

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.subscribe`."""
        check_filter(topic_filter)
        self._at(bulk).subscribe(topic_filter)

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.unsubscribe`."""
        self._at(bulk).unsubscribe(topic_filter)

    def acknowledged(self, *, bulk: bool = False) -> bool:
        """See `Link.acknowledged`."""
        return self._at(bulk).outbox.empty

    def silence_s(self, *, bulk: bool = False) -> float:
        """See `Link.silence_s`."""
        return time.monotonic() - self._at(bulk).heard_s

    def reconnect(self, will: Will | None = None) -> None:
        """See `Link.reconnect`."""
        self._control.renew(will)
        self._bulk.renew(None)

    def close(self, *, flush: bool = True) -> None:
        """See `Link.close`."""
        connections = (self._control, self._bulk)
        if any(connection.is_current_thread for connection in connections):
            raise StateError("a link cannot be closed from inside deliver")
        by = time.monotonic() + (FLUSH_S if flush else 0.0)
        for connection in connections:
            if not flush:
                connection.outbox.drop()
            connection.finish(by)
        for connection in connections:
            connection.join(by + GOODBYE_S - time.monotonic())
        with self._lock:
            self._closed = True

    def kill(self) -> None:
        """See `Link.kill`."""
        with self._lock:
            self._closed = True
        for connection in (self._control, self._bulk):
            connection.kill()
            if not connection.is_current_thread:
                connection.join(GOODBYE_S)

    def up(self, connection: Connection) -> None:
        """Note that a connection works."""
        with self._lock:
            self._up.add(connection)
            if len(self._up) == 2:
                self._tell(Connected(first=not self._ever))
                self._ever = True
                self._last_reason, self._denials = None, 0
            else:
                (self._bulk if connection is self._control else self._control).hurry()

    def down(self, connection: Connection, reason: str) -> None:
        """Note that a connection does not work."""
        with self._lock:
            worked = len(self._up) == 2
            self._up.discard(connection)
            denials = connection.denials
            # Usually both connections are denied, each for its own certificate: report a count
            # once.
            news = denials > self._denials if denials else reason != self._last_reason
            if worked or news:
                self._last_reason, self._denials = reason, denials
                self._tell(Disconnected(reason, denials))

    def deliver(self, event: LinkEvent) -> None:
        """Pass an event to the user of the link."""
        self._tell(event)

    def _tell(self, event: LinkEvent) -> None:
        if self._closed:
            return
        try:
            self._deliver(event)
        except Exception:
            # Raised in here, it would end the connection, which is not at fault.
            _log.exception("deliver failed; %s is lost", type(event).__name__)

    def _at(self, bulk: bool) -> Connection:
        return self._bulk if bulk else self._control
