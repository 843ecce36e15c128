"""The server: uvicorn in a thread of its own, on a socket that is bound before.

It takes no signals, logs through the program's log, and believes no headers of proxies. Connections
are bounded in number, and in the seconds that they may take to send a request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.errors import ConfigError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
REQUEST_S = 15.0
"""Seconds from a connection's start, or the end of an answer, to a whole request."""
MAX_HEAD_BYTES = 16_384
STOP_S = 5.0
TICK_S = 1.0
RENEWAL_S = 60.0
"""Seconds between two looks at the certificate's file."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 with limits: on connections, and on the time that a request takes to arrive."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """End a connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what arrived; the clock stops when a request is complete."""
        super().handle_events()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request of this connection."""
        super().on_response_complete()
        if not self.transport.is_closing() and self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._stop_waiting()
            self._wait()

    def _wait(self) -> None:
        self._due = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


class QuietServer(uvicorn.Server):
    """A server that wakes once a second for its date, and at once to stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        """Go on until it stops."""
        while not await self.on_tick(0):
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), TICK_S)


class HttpServer:
    """Serves an app on a socket, from `start` to `close`."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        tls: tuple[Path, Path] | None = None,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """`tls`: files of certificate and key. `ending` is called in the server's loop before it
        stops, to end answers that go on. Raises `ConfigError` if the files cannot be used."""
        self._socket, self._ending = sock, ending
        self._context = None if tls is None else TlsFiles(*tls)
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level="error",  # it warns of every request that is none
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=int(STOP_S) - 1,
        )
        config.load()
        if self._context is not None:
            config.ssl = self._context.context
        self._server = QuietServer(config)
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Start to answer; returns when it does."""
        self._thread.start()
        self._started.wait(STOP_S)

    def close(self) -> None:
        """Stop answering, and end all connections."""
        self._server.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._end)
        self._thread.join(STOP_S)
        self._socket.close()

    def _end(self) -> None:
        self._ending()
        self._server.stopping.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            # The outermost loop of this thread: the run goes on without a page.
            log.exception("the page is not served any more; restart serve to get it back")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    async def _watch(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0.01)
        self._started.set()
        while self._context is not None:
            await asyncio.sleep(RENEWAL_S)
            self._context.renew()


class TlsFiles:
    """Certificate and key in files, read again when they change."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises `ConfigError` if they cannot be used."""
        self._files = certificate, key
        self._seen = self._look()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """Takes the files' newest content for new connections."""
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self.context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"http.certificate and http.key: {certificate} and {key} cannot be used: {error}"
            ) from error

    def renew(self) -> None:
        """Read the files if they have changed; old ones stay if the new ones cannot be used."""
        if (seen := self._look()) == self._seen:
            return
        self._seen = seen
        try:
            self.context.load_cert_chain(*self._files)
        except (OSError, ssl.SSLError) as error:
            log.warning("the renewed certificate of the page cannot be used: %s", error)
        else:
            log.info("the page has a renewed certificate")

    def _look(self) -> tuple[Any, ...]:
        return tuple(_look(path) for path in self._files)


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
