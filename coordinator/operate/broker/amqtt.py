"""amqtt in a thread of this process, with its own event loop. Needs the extra `broker`.

Works around four problems of amqtt 0.12.1. It treats anonymous clients differently, so there is
one named user. It sends to every new connection the messages retained for anybody's subscriptions,
iterating over a table that others change meanwhile, which can leave a connection unserved; that
replay is disabled, which loses nothing because links use clean sessions. It does not close the
sockets of clients that vanished. And it speaks MQTT 3.1.1 only, but waits for more instead of
refusing another version.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from dataclasses import dataclass
from typing import Any

from amqtt.broker import Broker
from amqtt.contexts import BrokerConfig, ListenerConfig
from amqtt.mqtt.constants import QOS_0
from amqtt.plugins.base import BaseAuthPlugin

from edge_sdk.transport.settings import BrokerSettings

_log = logging.getLogger(__name__)

_LEVEL = 4
"""Protocol level of MQTT 3.1.1."""
_TO_LEVEL = 2 + len("MQTT") + 1
"""Bytes from the protocol's name to its level."""
_OTHER_LEVEL = b"\x20\x02\x00\x01"
"""Answer to a connection with another protocol level."""


class OneUserPlugin(BaseAuthPlugin):  # type: ignore[misc]
    """Lets in one user with one password. amqtt loads it by the path of this class."""

    @dataclass
    class Config:
        """Options that amqtt passes to the plugin."""

        username: str
        password: str

    async def authenticate(self, *, session: Any) -> bool:
        """True if the session has the right user and password."""
        given = f"{session.username}:{session.password}"
        wanted = f"{self.config.username}:{self.config.password}"
        return hmac.compare_digest(given.encode(), wanted.encode())


class _ReadAgain:
    """A stream whose first bytes were read already, as far as amqtt reads it."""

    def __init__(self, first: bytes, rest: asyncio.StreamReader) -> None:
        self._first = first
        self._rest = rest

    async def read(self, size: int = -1) -> bytes:
        """Read at most so many bytes; all that come, if negative."""
        if not self._first:
            return await self._rest.read(size)
        if size < 0:
            size = len(self._first)
        data, self._first = self._first[:size], self._first[size:]
        return data

    async def readexactly(self, size: int) -> bytes:
        """Read so many bytes. Raises `IncompleteReadError` if fewer come."""
        data = await self.read(size) if self._first else b""
        return data + await self._rest.readexactly(size - len(data))

    def feed_eof(self) -> None:
        """End the stream."""
        self._rest.feed_eof()


class _CleanBroker(Broker):  # type: ignore[misc]
    async def stream_connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener_name: str
    ) -> None:
        try:
            first = await reader.readexactly(2)
            while first[-1] & 128:  # the length of the packet goes on
                first += await reader.readexactly(1)
            first += await reader.readexactly(_TO_LEVEL)
            if first[-1] == _LEVEL:
                await super().stream_connected(_ReadAgain(first, reader), writer, listener_name)
            else:
                writer.write(_OTHER_LEVEL)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            _log.debug("a connection broke off")
        finally:
            writer.close()

    async def _publish_retained_messages_for_subscription(
        self, subscription: tuple[str, int], session: Any
    ) -> None:
        # Only the replay for new connections asks with QoS 0; links subscribe with QoS 1.
        if subscription[1] != QOS_0:
            await super()._publish_retained_messages_for_subscription(subscription, session)


class AmqttThread:
    """The broker and its thread. `listens` is set once it listens; `failure` says why it cannot."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.listens = threading.Event()
        self.failure: str | None = None
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="amqtt", daemon=True)

    def start(self) -> None:
        """Start the thread without waiting for the broker to listen."""
        # It reports every lost connection as an error; the links report what matters to users.
        for name in ("amqtt", "transitions"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._thread.start()

    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Stop the broker and close all its connections."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("amqtt did not stop within %s s", timeout_s)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            # The outermost loop of this thread; its starter reports the failure.
            _log.debug("amqtt failed", exc_info=True)
            self.failure = str(error) or type(error).__name__

    async def _serve(self) -> None:
        settings = self._settings
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        config = BrokerConfig(
            listeners={"default": ListenerConfig(bind=f"{settings.host}:{settings.port}")},
            plugins={
                f"{OneUserPlugin.__module__}.{OneUserPlugin.__qualname__}": {
                    "username": settings.username,
                    "password": settings.password,
                }
            },
        )
        broker = _CleanBroker(config)
        await broker.start()
        self.listens.set()
        try:
            await self._stop.wait()
        finally:
            await broker.shutdown()
