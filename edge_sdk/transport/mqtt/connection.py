"""One MQTT connection, maintained by its own thread.

Only that thread touches paho, through the calls meant for an external loop (`loop_read`,
`loop_write`, `loop_misc`). So threads share nothing of paho's, two writers can never tear a
message, and no lock is held while the owner is notified. Each connection gets a new paho client:
whatever must survive a connection (the outbox, the filters) is ours, and paho's own queue never
holds more than the window.

MQTT 5 is tried first. A broker that closes the connection or refuses this version is asked again
at once in 3.1.1; one that does not answer is asked in turns.
"""

from __future__ import annotations

import logging
import selectors
import socket
import ssl
import sys
import time
from collections import deque
from random import SystemRandom
from threading import Event, Lock, Thread, current_thread
from typing import Any, Protocol

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = termios = None  # type: ignore[assignment]

import paho.mqtt.client as paho

from edge_sdk.program.logs import Seldom, fact
from edge_sdk.protocol.chunks import MAX_CHUNK_BYTES
from edge_sdk.protocol.messages.topics import MAX_TOPIC_CHARACTERS
from edge_sdk.protocol.messages.wire import MAX_CONTROL_BYTES
from edge_sdk.transport.filters import matches
from edge_sdk.transport.link import LinkEvent, Received, Refused, Will, Writable
from edge_sdk.transport.mqtt import reasons
from edge_sdk.transport.mqtt.client import NEWEST, OLDEST, GatedClient, receive_maximum
from edge_sdk.transport.outbox import TRIES, WINDOW, Outbox, Publication
from edge_sdk.transport.settings import BrokerSettings

CONNECT_TIMEOUT_S = 10.0
"""Limit for the socket, for the TLS handshake, and for the broker's first answer, each."""

GOODBYE_S = 1.0
"""Limit for the last packet of a connection that is closed on purpose."""

STABLE_S = 10.0
"""A connection that lasted this long was good: the next attempt comes soon."""

PACKET_ROOM_BYTES = 2**12
"""Bytes of a packet besides the message or chunk that it carries, at most: topic, ids, header."""

MAX_ASKED = 8
"""Most filters in one packet, for chunks, which come and go by the dozen; some brokers take no
more. Filters of messages are asked for one by one: what a broker retains comes in their order."""

READS = 32
"""Packets that are taken one after the other, at most, before anything else is done."""

LOOK_AFTER_S = 0.25
"""Seconds between two looks at keepalive and the network, at most."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0

_chance = SystemRandom().random
_log = logging.getLogger(__name__)


def pause_s(failures: int, chance: float) -> float:
    """Seconds to wait after this many failures in a row; `chance` is from 0 to 1.

    Grows to half a minute, and varies widely so that a fleet does not return all at once.
    """
    most = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
    return most * (0.1 + 0.9 * chance)


def unsent_bytes(connected: socket.socket) -> int:
    """Bytes sent by us that the system still holds; 0 if it does not say."""
    if not hasattr(termios, "TIOCOUTQ"):
        return 0
    try:
        answer = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):  # it was closed
        return 0
    return int.from_bytes(answer, sys.byteorder)


class Owner(Protocol):
    """Receives notifications, from the connection's thread."""

    def up(self, connection: Connection) -> None:
        """Note that the broker accepted us and every subscription is in place."""

    def down(self, connection: Connection, reason: str) -> None:
        """Note that there is no connection, or no longer."""

    def deliver(self, event: LinkEvent) -> None:
        """Deliver an event to the user of the link."""


class Connection:
    """A connection under one client id; see the module."""

    def __init__(
        self,
        settings: BrokerSettings,
        context: ssl.SSLContext | None,
        owner: Owner,
        *,
        client_id: str,
        will: Will | None,
        max_bytes: int,
        bulk: bool,
    ) -> None:
        self.outbox = Outbox(max_bytes)
        self.heard_s = float("-inf")
        """Monotonic time of the last bytes received."""
        self.denials = 0
        """Times in a row that the broker refused our identity."""
        self._settings = settings
        self._context = context
        self._owner = owner
        self._client_id = client_id
        self._will = will
        self._bulk = bulk
        self._lock = Lock()
        self._filters: dict[str, None] = {}
        self._orders: deque[tuple[bool, str]] = deque()
        self._woken = False
        self._alarm, self._bell = socket.socketpair()
        self._alarm.setblocking(False)
        self._bell.setblocking(False)
        self._ending = Event()
        self._hurried = Event()
        """Set to cut a pause short: at the end, or because the other connection works."""
        self._killed = False
        self._renewing = False
        self._finish_by = float("inf")
        self._version = NEWEST
        self._packet_bytes = (MAX_CHUNK_BYTES if bulk else MAX_CONTROL_BYTES) + PACKET_ROOM_BYTES
        self._skipped = Seldom()
        self._thread = Thread(target=self._run, name=f"mqtt {client_id}", daemon=True)

    def start(self) -> None:
        """Start connecting."""
        self._thread.start()

    def publish(self, publication: Publication) -> bool:
        """See `Link.publish`."""
        if self._ending.is_set() or not self.outbox.offer(publication):
            return False
        self._wake()
        return True

    def subscribe(self, topic_filter: str) -> None:
        """See `Link.subscribe`."""
        with self._lock:
            self._filters = {**self._filters, topic_filter: None}
            self._orders.append((True, topic_filter))
        self._wake()

    def unsubscribe(self, topic_filter: str) -> None:
        """See `Link.unsubscribe`."""
        with self._lock:
            if topic_filter not in self._filters:
                return
            self._filters = {f: None for f in self._filters if f != topic_filter}
            self._orders.append((False, topic_filter))
        self._wake()

    def renew(self, will: Will | None) -> None:
        """See `Link.reconnect`."""
        with self._lock:
            self._will = will or self._will
            self._renewing = True
        self._wake()

    def finish(self, by: float) -> None:
        """Send queued messages until then (monotonic clock), say goodbye and end."""
        self._finish_by = by
        self._end()

    def kill(self) -> None:
        """End at once, without a goodbye."""
        self._killed = True
        self._end()

    def hurry(self) -> None:
        """Try again now instead of after the pause: the broker has just accepted somebody.

        Once, until a connection has lasted for `STABLE_S`: where one connection ends the other,
        they would else take turns without a pause.
        """
        self._hurried.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end; a connection still being made may outlive this a little."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, timeout_s))

    @property
    def is_current_thread(self) -> bool:
        """True if the caller is this connection's own thread."""
        return current_thread() is self._thread

    def _end(self) -> None:
        self._ending.set()
        self._hurried.set()
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._woken:
                return
            self._woken = True
        try:
            self._bell.send(b"\0")
        except OSError:
            _log.debug("%s: has ended", self._client_id)

    def _run(self) -> None:
        failures, may_hurry = 0, True
        while not self._ending.is_set():
            begun = time.monotonic()
            with self._lock:
                self._renewing = False
            session = _Session(self)
            try:
                reason = session.run()
                unwelcome = session.turned_away and not session.may_be_old
                if unwelcome and self._welcomes_only_without_will():
                    reason = reasons.will_refused(self._settings)
            except Exception:
                # The outermost loop of this thread. paho raises many things on bytes that are not
                # MQTT, and a link that ends silently would be worse than one that tries again.
                level = logging.DEBUG if session.may_be_old else logging.ERROR
                _log.log(level, "%s: the connection failed", self._client_id, exc_info=True)
                reason = f"{self._settings.address}: the answer is not MQTT; see the log"
            if not session.answered:
                self._version = OLDEST if self._version is NEWEST else NEWEST
                if session.may_be_old and not isinstance(reason, reasons.Denial):
                    continue
            self.denials = self.denials + 1 if isinstance(reason, reasons.Denial) else 0
            stable = time.monotonic() - begun >= STABLE_S
            if stable:
                may_hurry = True
                self._hurried.clear()  # that was for an earlier pause
            if not self._ending.is_set():
                self._owner.down(self, reason)
                # The search for a message that breaks connections takes a few tries, then ends.
                harmless = stable or self.outbox.searching or self._renewing
                failures = 0 if harmless else failures + 1
                rest_s = pause_s(max(0, failures - 1), _chance())
                if not may_hurry:
                    self._ending.wait(rest_s)
                elif self._hurried.wait(rest_s):
                    may_hurry = False
                    self._hurried.clear()
        self._alarm.close()
        self._bell.close()

    def _note_skipped(self, topic: str, size: int) -> None:
        """Log a message that was too large, once in a while."""
        number = self._skipped.note()
        if not number:
            return
        _log.warning(
            "%s: threw away %d message(s) over the limit of %d bytes, the last one with %d bytes "
            "on %r; somebody who may write to that topic sends them",
            self._client_id,
            number,
            self._packet_bytes,
            size,
            topic[:MAX_TOPIC_CHARACTERS],
            extra=fact("oversized", topic=topic[:MAX_TOPIC_CHARACTERS], size_bytes=size),
        )

    def _welcomes_only_without_will(self) -> bool:
        """True if the broker, which just turned us away, would not without our retained will."""
        if self._will is None or not self._will.retain:
            return False
        return _Session(self, only_greets=True).is_welcomed()


class _Session:
    """The lifetime of one paho client, from connecting to the end."""

    def __init__(self, connection: Connection, *, only_greets: bool = False) -> None:
        """`only_greets`: without a will, and only until the broker has accepted us."""
        self.answered = False
        """True once the broker accepted or refused us, in our version of MQTT."""
        self._version = connection._version
        self._of = connection
        self._only_greets = only_greets
        self._settings = connection._settings
        self._reached = False
        self._welcomed = False
        self._announced = False
        self._reason: str | None = None
        self._silent = False
        self._given_up = False
        self._served = False
        self._moved_s = 0.0
        self._looked_s = 0.0
        self._unsent = 0
        self._network_said = ""
        self._asked: dict[int, list[str]] = {}
        self._first_asked: set[int] = set()
        self._client = self._make_client()

    def run(self) -> str:
        """Connect and serve until the end; returns why the connection ended."""
        settings = self._settings
        try:
            self._client.open(settings.host, settings.port, settings.keepalive_s)
        except (OSError, ValueError) as error:
            return reasons.connect_failure(settings, error)
        connected = self._client.socket()
        if not isinstance(connected, socket.socket):
            return self._why()
        self._reached = True
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._served = True
            self._serve(connected)
        finally:
            connected.close()
            closed = self._welcomed and not (self._silent or self._given_up)
            given_up = self._of.outbox.lost(closed=closed)
        if given_up is not None:
            self._refused(
                given_up.topic,
                f"the broker closed the connection {TRIES} times over this message of "
                f"{len(given_up.payload)} bytes: it is larger than the broker accepts, or "
                "publishing to this topic is not allowed",
            )
        return self._why()

    @property
    def may_be_old(self) -> bool:
        """True if the broker may have ended this session because it speaks only MQTT 3.1.1."""
        tried = self._version is NEWEST and self._reached and not self._of._ending.is_set()
        return tried and not (self.answered or self._silent or self._given_up)

    @property
    def turned_away(self) -> bool:
        """True if the broker closed the connection in place of an answer."""
        return self._served and not (self._welcomed or self._silent or self._reason)

    def is_welcomed(self) -> bool:
        """Connect and leave at once; True if the broker would have let us stay."""
        self.run()
        return self._welcomed

    def _make_client(self) -> GatedClient:
        of, settings = self._of, self._settings
        client = GatedClient(of._client_id, self._version, of._packet_bytes)
        client.connect_timeout = CONNECT_TIMEOUT_S
        if of._context is not None:
            client.tls_set_context(of._context)
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        if of._will is not None and not self._only_greets:
            client.will_set(of._will.topic, of._will.payload, qos=1, retain=of._will.retain)
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_publish = self._on_publish
        client.on_message = self._on_message
        client.on_log = self._on_log
        return client

    def _serve(self, connected: socket.socket) -> None:
        client, of = self._client, self._of
        answer_by = time.monotonic() + CONNECT_TIMEOUT_S
        leave_by: float | None = None
        # poll if available: select cannot watch descriptors above 1023.
        with getattr(selectors, "PollSelector", selectors.SelectSelector)() as selector:
            selector.register(of._alarm, selectors.EVENT_READ)
            selector.register(connected, selectors.EVENT_READ)
            while not of._killed:
                if of._renewing:
                    self._given_up = True
                    self._reason = f"{self._settings.address}: connecting anew"
                    return
                if self._welcomed and self._only_greets:
                    return
                if self._welcomed:
                    self._send()
                elif time.monotonic() >= answer_by:
                    self._silent = True
                    return
                if leave_by is None and of._ending.is_set() and self._is_done():
                    client.disconnect()
                    leave_by = time.monotonic() + GOODBYE_S
                gone = leave_by is not None and time.monotonic() >= leave_by
                if gone or client.socket() is None:
                    return
                self._wait_and_handle(selector, connected)

    def _wait_and_handle(self, selector: selectors.BaseSelector, connected: socket.socket) -> None:
        client, of = self._client, self._of
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE * client.want_write())
        if selector.get_key(connected).events != interest:
            selector.modify(connected, interest)
        timeout_s = 0.1 if of._ending.is_set() else min(5.0, self._settings.keepalive_s / 8)
        # TLS may hold bytes that the selector cannot see.
        held = client.holds or (isinstance(connected, ssl.SSLSocket) and connected.pending() > 0)
        ready = {key.fileobj: mask for key, mask in selector.select(0 if held else timeout_s)}
        if of._alarm in ready:
            self._hear_alarm()
        if held or ready.get(connected, 0) & selectors.EVENT_READ:
            of.heard_s = time.monotonic()
            result = client.loop_read()
            for _ in range(READS):
                if not client.holds or client.socket() is None:
                    break
                client.loop_read()
            if result == paho.MQTT_ERR_PROTOCOL and not (self._welcomed or self._reason):
                # paho reports this for a refused version, and for anything it cannot read.
                self._reason = reasons.refusal(self._settings, reasons.OTHER_VERSION)
        if ready.get(connected, 0) & selectors.EVENT_WRITE:
            self._moved_s = time.monotonic()
            client.loop_write()
        now = time.monotonic()
        if now - self._looked_s < min(LOOK_AFTER_S, timeout_s):
            return
        self._looked_s = now
        if not self._is_sending(connected) and not self._is_skipping():
            client.loop_misc()

    def _is_sending(self, connected: socket.socket) -> bool:
        """True if the network accepts what we send. A ping would wait behind that, and a slow link
        would look dead.
        """
        before, self._unsent = self._unsent, unsent_bytes(connected)
        if self._unsent < before:
            self._moved_s = time.monotonic()
        waits = self._unsent > 0 or self._client.want_write()
        return waits and time.monotonic() - self._moved_s < self._settings.keepalive_s

    def _is_skipping(self) -> bool:
        """True while a message that is too large comes in. An answer to a ping waits behind it."""
        arrives = time.monotonic() - self._of.heard_s < self._settings.keepalive_s
        return self._client.gate.skipping and arrives

    def _is_done(self) -> bool:
        return self._of.outbox.empty or time.monotonic() >= self._of._finish_by

    def _hear_alarm(self) -> None:
        # In this order: a bell rung in between is handled by the loop's next turn.
        self._of._alarm.recv(64)
        with self._of._lock:
            self._of._woken = False

    def _send(self) -> None:
        """Send orders and messages, as far as the window allows."""
        client, of = self._client, self._of
        if not self._announced:
            self._restore()
        while client.socket() is not None:
            message = of.outbox.next()
            # After taking a message, before sending it: a caller that subscribes and then publishes
            # must not see the publication overtake the subscription.
            self._obey_orders()
            if message is None:
                return
            sent = client.publish(message.topic, message.payload, qos=1, retain=message.retain)
            of.outbox.sent(sent.mid)

    def _obey_orders(self) -> None:
        orders, most = self._of._orders, MAX_ASKED if self._of._bulk else 1
        while orders:
            subscribe, filters = orders[0][0], list[str]()
            while orders and orders[0][0] is subscribe and len(filters) < most:
                filters.append(orders.popleft()[1])
            if subscribe:
                self._ask(filters)
            else:
                self._client.unsubscribe(filters)

    def _restore(self) -> None:
        """Request all subscriptions again; the session is a clean one."""
        if self._first_asked:
            return
        with self._of._lock:
            self._of._orders.clear()
            filters = list(self._of._filters)
        self._first_asked = {mid for f in filters if (mid := self._ask([f])) is not None}
        self._announce()

    def _ask(self, filters: list[str]) -> int | None:
        """Subscribe to filters with one packet."""
        _, mid = self._client.subscribe([(each, 1) for each in filters])
        if mid is not None:
            self._asked[mid] = filters
        return mid

    def _announce(self) -> None:
        if not self._announced and not self._first_asked and self._client.socket() is not None:
            self._announced = True
            self._of._owner.up(self._of)

    def _refused(self, topic: str, reason: str) -> None:
        self._of._owner.deliver(Refused(topic, reason))

    def _why(self) -> str:
        return self._reason or reasons.lost(
            self._settings,
            welcomed=self._welcomed,
            silent=self._silent,
            detail=self._network_said,
        )

    # paho calls these from inside loop_read, loop_write and loop_misc: on our own thread. They
    # record what happened; the loop does the sending and waiting.

    def _on_connect(self, _client: Any, _data: Any, _flags: Any, code: Any, rest: Any) -> None:
        if code.is_failure:
            self._reason = reasons.refusal(self._settings, str(code))
            self.answered = str(code) != reasons.OTHER_VERSION
        else:
            self.answered = self._welcomed = True
            self._of.outbox.window = min(WINDOW, receive_maximum(rest))

    def _on_disconnect(self, _client: Any, _data: Any, _flags: Any, code: Any, _rest: Any) -> None:
        self._silent = str(code) == "Keep alive timeout"

    def _on_subscribe(self, _client: Any, _data: Any, mid: int, codes: Any, _rest: Any) -> None:
        for topic_filter, code in zip(self._asked.pop(mid, ()), codes, strict=False):
            if code.is_failure:
                self._refused(topic_filter, "the broker does not let this user subscribe to it")
        self._first_asked.discard(mid)
        self._announce()

    def _on_publish(self, _client: Any, _data: Any, mid: int, _code: Any, _rest: Any) -> None:
        self._of.outbox.acknowledged(mid)
        if self._of.outbox.take_room():
            self._of._owner.deliver(Writable(self._of._bulk))

    def _on_message(self, _client: Any, _data: Any, message: Any) -> None:
        topic, filters = str(message.topic), self._of._filters
        if (size := self._client.gate.take_cut()) is not None:
            self._of._note_skipped(topic, size)
            return
        # Some brokers send messages nobody asked for, and all send some we no longer want.
        if topic in filters or any(matches(topic, f) for f in filters):
            self._of._owner.deliver(Received(topic, bytes(message.payload), bool(message.retain)))

    def _on_log(self, _client: Any, _data: Any, level: int, text: str) -> None:
        if level == paho.MQTT_LOG_ERR:
            self._network_said = text
