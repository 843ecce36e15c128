"""Test what a broker can really do.

Brokers grant subscriptions that deliver nothing and acknowledge messages they drop, so nothing
here trusts an acknowledgement: a message counts when it comes back. Everything happens under
`tessera/v1/probe-…`, a task name like any other, and is cleared afterwards. Only one link is open
at a time: a broker that binds client ids to certificates would end the first for the second.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
    Will,
)
from edge_sdk.transport.mqtt.reasons import NO_RETAINED, TURN_ON
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import (
    MIN_CHUNK_BYTES,
    BrokerSettings,
    DeniedError,
    LinkError,
)

ROOM_BYTES = 1_024
"""Bytes a message may have besides its chunk."""

CHUNKS = (196_608, 131_072, 98_304, 65_536, 32_768, 16_384, 4_096, MIN_CHUNK_BYTES)
"""Sizes tried, starting below the configured one, if that one does not come through."""

CONNECT_S = 15.0
ANSWER_S = 3.0
QUIET_S = 0.3
"""Wait for a connection; for a message that should come; for one that should not."""

Wait: TypeAlias = Callable[[Callable[[], bool], float], bool]
"""Waits until a condition holds, for at most some seconds; returns True if it does."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact and its meaning: `good`, `advice` (it works, but), or `refused` (it cannot)."""

    name: str
    value: str
    verdict: Literal["good", "advice", "refused"]
    text: str


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Results of the probe.

    `chunk_bytes`: the largest chunk that came back, at most the configured one; 0 if none did.
    `retained`: a later subscriber gets a small retained message; `retained_chunk`: also one of
    `chunk_bytes`; `wildcard_retained`: also through a filter with a wildcard. `clears_retained`: an
    empty message removes it. `will`: sent when a connection breaks. `duplicates`: a message came
    twice.
    """

    chunk_bytes: int
    configured_chunk_bytes: int
    retained: bool
    retained_chunk: bool
    wildcard_retained: bool
    clears_retained: bool
    will: bool
    duplicates: bool

    @property
    def retained_chunks(self) -> bool:
        """True if devices can pull chunks from the broker; otherwise the coordinator sends them."""
        return self.retained_chunk and self.clears_retained

    @property
    def refusal(self) -> str | None:
        """Reason why a run cannot work over this broker; None if it can."""
        texts = [finding.text for finding in self.findings() if finding.verdict == "refused"]
        return "; ".join(texts) or None

    def findings(self) -> tuple[Finding, ...]:
        """Return every fact with its consequence."""
        return (
            self._size(),
            _finding(
                "retained messages",
                self.retained,
                "late devices find the task and the round",
                "refused",
                f"{NO_RETAINED}, so a device that starts later finds no task; {TURN_ON}",
            ),
            _finding(
                "retained chunks",
                self.retained_chunk,
                "devices pull the model from the broker",
                "advice",
                f"the broker does not keep retained messages of {self.chunk_bytes} bytes; the "
                "coordinator sends chunks to each device itself, which costs it a model per device",
            ),
            _finding(
                "retained messages by wildcard",
                self.wildcard_retained,
                "a restarted coordinator finds out which devices are present",
                "advice",
                "wildcard subscriptions get no retained messages; after a restart the coordinator "
                "learns of devices only when they send something",
            ),
            _finding(
                "clearing retained messages",
                self.clears_retained,
                "old chunks are removed from the broker",
                "advice",
                "an empty message does not clear a retained one, so chunks would pile up in the "
                "broker; the coordinator sends chunks to each device itself",
            ),
            _finding(
                "last will",
                self.will,
                "vanished devices are noticed",
                "advice",
                "no retained last will came; vanished devices are noticed only by their silence, "
                "at deadlines",
            ),
            _finding(
                "single delivery",
                not self.duplicates,
                "no message came twice",
                "advice",
                "messages came twice; that is allowed and harmless, but costs bytes",
            ),
        )

    def _size(self) -> Finding:
        value = f"{self.chunk_bytes} bytes"
        if not self.chunk_bytes:
            text = (
                "no published message came back; allow this user to publish and subscribe "
                "below tessera/v1/#"
            )
            return Finding("chunk size", "none", "refused", text)
        if self.chunk_bytes < self.configured_chunk_bytes:
            text = (
                f"chunks of {self.configured_chunk_bytes} bytes do not come through; using "
                f"{self.chunk_bytes} bytes. Raise the broker's limit on message size "
                "(max_packet_size in Mosquitto), or set chunk_bytes to avoid this search"
            )
            return Finding("chunk size", value, "advice", text)
        return Finding("chunk size", value, "good", "as configured")


def probe_broker(settings: BrokerSettings, *, name: str = "tessera-probe") -> BrokerFacts:
    """Test a broker; takes a second or two on a good one, up to a minute on a poor one.

    Opens links named `<name>-1`, `<name>-2` … Raises LinkError when there is no connection, and
    DeniedError at once when the broker refuses us.
    """
    return probe_links(
        partial(open_link, settings), _poll, name=name, chunk_bytes=settings.chunk_bytes
    )


def probe_links(open_link: OpenLink, wait: Wait, *, name: str, chunk_bytes: int) -> BrokerFacts:
    """Run `probe_broker` over any kind of link."""
    return _Probe(open_link, wait, name, chunk_bytes).run()


class _Probe:
    def __init__(self, open_link: OpenLink, wait: Wait, name: str, chunk_bytes: int) -> None:
        self._open_link = open_link
        self._wait = wait
        self._name = name
        self._configured = chunk_bytes
        self._root = f"tessera/v1/probe-{secrets.token_hex(6)}"
        self._opened = 0
        self._markers = 0
        self._duplicates = False

    def run(self) -> BrokerFacts:
        chunk_bytes = self._largest_chunk()
        retained = chunk = wildcard = clears = will = False
        if chunk_bytes:
            retained, chunk, wildcard, clears = self._retained(chunk_bytes)
            # A broker without retained messages may refuse everybody whose will is to be retained.
            will = retained and self._will()
        return BrokerFacts(
            chunk_bytes=chunk_bytes,
            configured_chunk_bytes=self._configured,
            retained=retained,
            retained_chunk=chunk,
            wildcard_retained=wildcard,
            clears_retained=clears,
            will=will,
            duplicates=self._duplicates,
        )

    def _largest_chunk(self) -> int:
        with self._ear() as ear:
            if not self._mark(ear):
                return 0
        for size in (self._configured, *(s for s in CHUNKS if s < self._configured)):
            # The broker may close the connection because of it: each size gets a new one.
            with self._ear() as ear:
                topic = f"{self._root}/size"
                ear.link.subscribe(topic, bulk=True)
                ear.link.publish(topic, bytes(size + ROOM_BYTES), bulk=True)
                self._wait(lambda: ear.got(topic) or ear.in_trouble, ANSWER_S)  # noqa: B023
                if ear.got(topic):
                    return size
        return 0

    def _retained(self, chunk_bytes: int) -> tuple[bool, bool, bool, bool]:
        small, large = f"{self._root}/small", f"{self._root}/large"
        among, filter_ = f"{self._root}/among/one", f"{self._root}/among/+"
        with self._ear() as writer:
            for topic, size in ((small, 4), (large, chunk_bytes + ROOM_BYTES), (among, 4)):
                writer.link.publish(topic, b"\1" * size, retain=True, bulk=True)
            self._mark(writer, or_trouble=True)  # some brokers close the connection
        with self._ear() as reader:
            for topic in (small, large, filter_):
                reader.link.subscribe(topic, bulk=True)
            self._wait(lambda: all(map(reader.kept, (small, large, among))), ANSWER_S)
            found = reader.kept(small), reader.kept(large), reader.kept(among)
            if not any(found):
                return False, False, False, False
            for topic in (small, large, among):
                reader.link.publish(topic, b"", retain=True, bulk=True)
            self._mark(reader)
        with self._ear() as late:
            late.link.subscribe(small, bulk=True)
            self._mark(late)
            self._wait(lambda: late.kept(small), QUIET_S)
            return (*found, found[0] and not late.kept(small))

    def _will(self) -> bool:
        """True if a later subscriber gets a will, as for participants."""
        topic = f"{self._root}/will"
        with self._ear(Will(topic, b"gone")) as victim:
            victim.link.kill()
        with self._ear() as ear:
            ear.link.subscribe(topic, bulk=True)
            came = self._wait(lambda: ear.got(topic), ANSWER_S)
            ear.link.publish(topic, b"", retain=True, bulk=True)
            self._mark(ear)
            return came

    def _mark(self, ear: _Ear, *, or_trouble: bool = False) -> bool:
        """True if a message comes back; all bulk sent before it has then been handled.

        `or_trouble`: or if it cannot, because the connection was lost.
        """
        self._markers += 1
        topic = f"{self._root}/marker/{self._markers}"
        ear.link.subscribe(topic, bulk=True)
        ear.link.publish(topic, b"here", bulk=True)
        return self._wait(lambda: ear.got(topic) or (or_trouble and ear.in_trouble), ANSWER_S)

    @contextmanager
    def _ear(self, will: Will | None = None) -> Iterator[_Ear]:
        self._opened += 1
        ear = _Ear(self._open_link, f"{self._name}-{self._opened}", will)
        try:
            self._wait(lambda: ear.connected or ear.denied, CONNECT_S)
            if not ear.connected:
                kind = DeniedError if ear.denied else LinkError
                raise kind(f"the broker cannot be probed: {ear.last_reason}")
            yield ear
            self._duplicates |= ear.heard_twice
        finally:
            ear.link.kill() if ear.in_trouble else ear.link.close()


class _Ear:
    """A link and everything it received."""

    def __init__(self, open_link: OpenLink, name: str, will: Will | None) -> None:
        self.events: list[LinkEvent] = []
        self.link = open_link(name=name, deliver=self.events.append, will=will)

    @property
    def connected(self) -> bool:
        return any(isinstance(event, Connected) for event in self.events)

    @property
    def denied(self) -> bool:
        return any(isinstance(event, Disconnected) and event.denials for event in self.events)

    @property
    def in_trouble(self) -> bool:
        return any(isinstance(event, Disconnected | Refused) for event in self.events)

    @property
    def last_reason(self) -> str:
        reasons = [event.reason for event in self.events if isinstance(event, Disconnected)]
        return reasons[-1] if reasons else "it did not answer"

    def got(self, topic: str) -> bool:
        return any(isinstance(e, Received) and e.topic == topic for e in self.events)

    def kept(self, topic: str) -> bool:
        return any(isinstance(e, Received) and e.topic == topic and e.retained for e in self.events)

    @property
    def heard_twice(self) -> bool:
        messages = [event for event in self.events if isinstance(event, Received)]
        return len(set(messages)) < len(messages)


def _finding(
    name: str, good: bool, meaning: str, verdict: Literal["advice", "refused"], text: str
) -> Finding:
    if good:
        return Finding(name, "yes", "good", meaning)
    return Finding(name, "no", verdict, text)


def _poll(holds: Callable[[], bool], most_s: float) -> bool:
    by = time.monotonic() + most_s
    while not holds():
        if time.monotonic() >= by:
            return False
        time.sleep(0.005)
    return True
