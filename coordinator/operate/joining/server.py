"""The HTTPS server that devices join through: two requests, in a thread with its own event loop.

Everything is bounded before it is read: connections at a time, in all and by address; new
connections by second; bytes and seconds of a request; failed attempts by address. Nothing that a
stranger does here reaches the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol

from coordinator.errors import CoordinatorError
from coordinator.service.admission.limits import Buckets, Rate
from edge_sdk.join.code import AUTHORITY_PATH, JOIN_PATH, MAC_HEADER, MAX_REQUEST_BYTES

log = logging.getLogger(__name__)

MAX_CONNECTIONS, MAX_BY_ADDRESS = 64, 16
CONNECTIONS, BY_ADDRESS = Rate(20.0, 400.0), Rate(5.0, 100.0)
"""New connections of all addresses together, and of one. A device that joins makes two."""
ATTEMPTS = Rate(0.1, 20.0)
"""Failed attempts of one address."""
WARNINGS = Rate(0.2, 20.0)
MAX_ADDRESSES = 1_000
MAX_HEADER_BYTES = 4_096
REQUEST_S = 15.0
"""Seconds from a connection's start to its end."""
STOP_S = 5.0

_BAD_REQUEST, _NOT_FOUND, _FORBIDDEN = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.FORBIDDEN,
)


class Answers(Protocol):
    """Gives the answers: a `Desk`."""

    def welcome(self) -> dict[str, Any]:
        """Tell anybody who the authority is."""

    def admit(self, body: bytes, mac: str, address: str) -> dict[str, Any]:
        """Let a device in. Raises `CoordinatorError` with the reason to refuse."""


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class JoinServer:
    """Serves devices that join, on a bound socket, from `start` to `close`."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        answers: Answers,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._socket, self._context, self._answers, self._clock = sock, context, answers, clock
        self._open: Counter[str] = Counter()
        self._all = Buckets(CONNECTIONS, 1)
        self._each = Buckets(BY_ADDRESS, MAX_ADDRESSES)
        self._attempts = Buckets(ATTEMPTS, MAX_ADDRESSES)
        self._warnings = Buckets(WARNINGS, 1)
        self._pool = ThreadPoolExecutor(1, "join-desk")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="join", daemon=True)

    def start(self) -> None:
        """Start to accept connections."""
        self._socket.listen(MAX_CONNECTIONS)
        self._socket.setblocking(False)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and end all connections."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(STOP_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._socket.close()

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._accept())
        except asyncio.CancelledError:
            pass
        except Exception:
            # The outermost loop of this thread: the run goes on without new devices.
            log.exception("joining does not work any more; restart serve to let devices join")
        finally:
            with suppress(asyncio.CancelledError):
                rest = asyncio.all_tasks(self._loop)
                if rest:
                    self._loop.run_until_complete(asyncio.wait(rest, timeout=STOP_S))
            self._loop.close()

    async def _accept(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._socket)
            except OSError as error:
                log.warning("a device could not connect to join: %s", error)
                await asyncio.sleep(1.0)  # out of descriptors, say
                continue
            host = str(address[0])
            now = self._clock()
            if (
                len(tasks) >= MAX_CONNECTIONS
                or self._open[host] >= MAX_BY_ADDRESS
                or not self._each.take(host, now)
                or not self._all.take("", now)
            ):
                connection.close()
                continue
            self._open[host] += 1
            task = self._loop.create_task(self._serve(connection, host))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            await asyncio.wait_for(self._converse(connection, host), REQUEST_S)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, EOFError):
            pass  # it went away, is too slow, or does not speak TLS
        except Exception:
            log.exception("a request to join failed")
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]
            connection.close()

    async def _converse(self, connection: socket.socket, host: str) -> None:
        reader = asyncio.StreamReader(limit=MAX_HEADER_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=self._context, ssl_handshake_timeout=REQUEST_S
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
        try:
            try:
                status, content = HTTPStatus.OK, await self._answer(reader, host)
            except _RefusedError as refusal:
                status, content = refusal.status, {"v": 1, "error": str(refusal)}
            writer.write(_response(status, content))
            await writer.drain()
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        finally:
            transport.abort()  # nobody waits for a client that says nothing

    async def _answer(self, reader: asyncio.StreamReader, host: str) -> dict[str, Any]:
        method, path, headers = await _read_head(reader)
        if (method, path) == ("GET", AUTHORITY_PATH):
            return self._answers.welcome()
        if (method, path) != ("POST", JOIN_PATH):
            raise _RefusedError(_NOT_FOUND, "devices join here, and nothing else")
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= MAX_REQUEST_BYTES):
            raise _RefusedError(_BAD_REQUEST, f"a request has at most {MAX_REQUEST_BYTES} bytes")
        if not self._attempts.take(host, self._clock()):
            raise _RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many failed attempts from this address: wait a minute, then try again",
            )
        body = await reader.readexactly(int(length))
        mac = headers.get(MAC_HEADER.lower(), "")
        try:
            answer = await self._loop.run_in_executor(
                self._pool, self._answers.admit, body, mac, host
            )
        except CoordinatorError as error:
            if self._warnings.take("", self._clock()):
                log.warning("a device at %s was refused: %s", host, error)
            raise _RefusedError(_FORBIDDEN, str(error)) from error
        except OSError as error:
            log.error("a device could not join: %s", error)
            raise _RefusedError(
                HTTPStatus.INTERNAL_SERVER_ERROR, "the coordinator has a problem; see its log"
            ) from error
        self._attempts.take(host, self._clock(), -1.0)  # only failed attempts count
        return answer


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Read the request line and the headers. Raises `_RefusedError`."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("ascii").rstrip("\r\n").split("\r\n")
        method, path, version = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version)
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise _RefusedError(_BAD_REQUEST, "this is not a request of a device") from error
    pairs = (line.partition(":") for line in lines)
    return method, path, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _response(status: HTTPStatus, content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
