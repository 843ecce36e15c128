"""One face for every transport under test: open links, let things happen, restart the broker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import pytest

from coordinator.operate.broker.embedded import available, embedded_broker
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    Link,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
    Will,
    Writable,
)
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.memory_broker import MemoryBroker
from tests.waiting import HANGS_S

Kind = Literal["memory", "mosquitto", "amqtt"]

MARKER = "marker-"


class Server(Protocol):
    """A broker of some kind."""

    kind: Kind
    open_link: OpenLink

    def wait(self, holds: Callable[[], bool]) -> bool:
        """Let things happen until something holds; whether it does."""

    def stop(self) -> None:
        """End the broker as its operator would."""

    def start(self) -> None:
        """Start it again at the same place, empty."""


class MemoryServer:
    def __init__(self) -> None:
        self.kind: Kind = "memory"
        self.broker = MemoryBroker()
        self.open_link: OpenLink = self.broker.open_link

    def wait(self, holds: Callable[[], bool]) -> bool:
        self.broker.run()
        return holds()

    def stop(self) -> None:
        self.broker.stop()

    def start(self) -> None:
        self.broker.start(keep_retained=False)


class RealServer:
    def __init__(self, kind: Literal["mosquitto", "amqtt"], folder: Path) -> None:
        self.kind: Kind = kind
        self._program = kind
        self._folder = folder
        self._stack = ExitStack()
        self.settings: BrokerSettings = self._stack.enter_context(
            embedded_broker(folder, kind=kind)
        )
        self.open_link: OpenLink = partial(open_link, self.settings)

    def wait(self, holds: Callable[[], bool]) -> bool:
        by = time.monotonic() + HANGS_S
        while not holds():
            if time.monotonic() > by:
                return False
            time.sleep(0.002)
        return True

    def stop(self) -> None:
        self._stack.close()

    def start(self) -> None:
        again = embedded_broker(
            self._folder,
            kind=self._program,
            port=self.settings.port,
            password=self.settings.password,
        )
        self._stack.enter_context(again)


def serve(kind: Kind, folder: Path) -> Iterator[Server]:
    """Run a broker of a kind, or skip."""
    if kind == "memory":
        yield MemoryServer()
        return
    if kind not in available():
        pytest.skip(f"{kind} is not installed")
    server = RealServer(kind, folder)
    try:
        yield server
    finally:
        server.stop()


class Peer:
    """A link and everything it was told."""

    def __init__(self, server: Server, name: str, will: Will | None) -> None:
        self.events: list[LinkEvent] = []
        self.link: Link = server.open_link(name=name, deliver=self.events.append, will=will)

    @property
    def received(self) -> list[Received]:
        """The messages, without the markers of `Bench.settle`."""
        messages = [event for event in self.events if isinstance(event, Received)]
        return [event for event in messages if MARKER not in event.topic]

    def heard(self, topic: str) -> bool:
        return any(isinstance(event, Received) and event.topic == topic for event in self.events)

    @property
    def connections(self) -> list[Connected]:
        return [event for event in self.events if isinstance(event, Connected)]

    @property
    def disconnections(self) -> list[Disconnected]:
        return [event for event in self.events if isinstance(event, Disconnected)]

    @property
    def refusals(self) -> list[Refused]:
        return [event for event in self.events if isinstance(event, Refused)]

    @property
    def rooms(self) -> list[Writable]:
        return [event for event in self.events if isinstance(event, Writable)]

    def payloads(self, topic: str) -> list[bytes]:
        return [event.payload for event in self.received if event.topic == topic]


class Bench:
    """What a test works with: a broker, topics of its own, links that are closed at the end."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.root = f"tessera/v1/test-{secrets.token_hex(4)}"
        self._peers: list[Peer] = []

    def topic(self, rest: str) -> str:
        return f"{self.root}/{rest}"

    def open(self, name: str | None = None, *, will: Will | None = None) -> Peer:
        """A connected link."""
        peer = Peer(self.server, name or f"test-{secrets.token_hex(4)}", will)
        self._peers.append(peer)
        self.until(lambda: bool(peer.connections))
        return peer

    def until(self, holds: Callable[[], bool]) -> None:
        """Let things happen until something holds; fail if it never does."""
        assert self.server.wait(holds)

    def listen(self, peer: Peer, topic_filter: str, *, bulk: bool = False) -> None:
        """Subscribe, and return when the broker has taken note."""
        peer.link.subscribe(topic_filter, bulk=bulk)
        self.settle(peer, bulk=bulk)

    def settle(self, peer: Peer, *, bulk: bool = False) -> None:
        """Let everything that a link sent before on this connection be handled."""
        marker = self.topic(f"{MARKER}{secrets.token_hex(4)}")
        peer.link.subscribe(marker, bulk=bulk)
        peer.link.publish(marker, b"here", bulk=bulk)
        self.until(lambda: peer.heard(marker))
        peer.link.unsubscribe(marker, bulk=bulk)

    def close(self) -> None:
        for peer in self._peers:
            peer.link.close()
