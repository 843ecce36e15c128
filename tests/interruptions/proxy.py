"""A TCP proxy between programs and their broker that does to a connection what networks do.

It reads MQTT as it passes, so that a test can wait for a message, or do something to one:

    proxy.cut()                        connections end, as if the network had reset them
    proxy.refuse(), proxy.accept()     nobody gets through; as before
    proxy.delay_s = 0.2                everything takes so long, each way
    proxy.bytes_per_s = 20_000         everything is so slow, each way and connection; to be set
                                       before programs connect, and not with holds and tampers
    proxy.blackhole()                  connections stay open, and nothing passes any more, not even
                                       on new ones; the old ones never work again
    hold = proxy.hold(match)           messages that match wait until `hold.release()`
    proxy.tamper = function            what becomes of a message: see `Tamper`

A `Packet` that is no message (a ping, a subscription) is passed on untouched by holds and tampers.
Every method may be called from any thread; the proxy has one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.waiting import HANGS_S

HOST = "127.0.0.1"
CONNECT, PUBLISH, PUBACK = 1, 3, 4
READ_BYTES = 65_536
BUFFER_BYTES = 4096

Direction = Literal["up", "down"]
"""To the broker, or from it."""


@dataclass(frozen=True, slots=True)
class Packet:
    """An MQTT packet. `client` is the id of the connection's program; `topic` empty: no message."""

    direction: Direction
    client: str
    data: bytes = field(repr=False)
    topic: str = ""
    payload: bytes = field(default=b"", repr=False)
    id: int | None = None
    """Of a message with QoS 1."""
    retain: bool = False
    properties: bytes = field(default=b"", repr=False)
    """Of a message in MQTT 5, with their length."""

    @property
    def kind(self) -> int:
        """The type of packet that MQTT gives it."""
        return self.data[0] >> 4

    def with_payload(self, payload: bytes) -> Packet:
        """The same message with another content."""
        name = self.topic.encode()
        body = len(name).to_bytes(2, "big") + name
        body += b"" if self.id is None else self.id.to_bytes(2, "big")
        body += self.properties + payload
        return replace(self, data=self.data[:1] + _length(len(body)) + body, payload=payload)


Match = Callable[[Packet], bool]
Tamper = Callable[[Packet], Sequence[Packet] | None]
"""The messages that go on in the place of one; None: nobody gets it, and its sender believes that
it arrived, as when a broker drops what it has acknowledged."""


def publish_packet(topic: str, payload: bytes, *, level: int = 5) -> bytes:
    """A message of QoS 0 in MQTT 5; at level 4, in 3.1.1."""
    name = topic.encode()
    body = len(name).to_bytes(2, "big") + name + (b"" if level < 5 else b"\0") + payload
    return bytes([PUBLISH << 4]) + _length(len(body)) + body


def topic_ends(*ends: str, direction: Direction | None = None) -> Match:
    """Messages whose topic ends so."""

    def match(packet: Packet) -> bool:
        return packet.topic.endswith(ends) and direction in (None, packet.direction)

    return match


class Hold:
    """Messages that wait. Those for connections that have ended meanwhile are lost."""

    def __init__(self, proxy: Proxy, match: Match, after: int) -> None:
        self._proxy = proxy
        self._match = match
        self._after = after
        self._waiting: list[tuple[_Pipe, Packet]] = []
        self._held = threading.Event()
        self.packets: list[Packet] = []
        """All that waited at some time."""

    def takes(self, pipe: _Pipe, packet: Packet) -> bool:
        """Whether a packet waits from now on."""
        if not self._match(packet):
            return False
        if self._after:
            self._after -= 1
            return False
        self._waiting.append((pipe, packet))
        self.packets.append(packet)
        self._held.set()
        return True

    def wait(self) -> None:
        """Return when something is held."""
        assert self._held.wait(HANGS_S), "nothing came that is to be held"

    def release(self, *, newest_first: bool = False) -> None:
        """Let them pass, and all that comes later."""

        def let_go() -> None:
            self._proxy.holds.remove(self)
            for pipe, packet in reversed(self._waiting) if newest_first else self._waiting:
                pipe.send(packet.data)
            self._waiting.clear()

        self._proxy.do(let_go)


class _Pipe:
    """One direction of one connection: what comes in leaves in order, later, slower, or never."""

    def __init__(self, proxy: Proxy, direction: Direction, reader: asyncio.StreamReader) -> None:
        self.client = ""
        self.level = 4
        self.dead = False
        self.other: _Pipe = self
        self.writer: asyncio.StreamWriter | None = None
        self._proxy = proxy
        self.direction = direction
        self._reader = reader
        self._queue: deque[tuple[float, bytes]] = deque()
        self._more = asyncio.Event()
        self._buffer = bytearray()

    def send(self, data: bytes) -> None:
        """Let bytes leave by this pipe."""
        if not self.dead:
            due = asyncio.get_running_loop().time() + self._proxy.delay_s
            self._queue.append((due, data))
            self._more.set()

    async def read(self) -> None:
        """Take in what comes until the connection ends."""
        while data := await self._taken():
            self._proxy.count(self.direction, len(data))
            if self.dead:
                continue
            self._buffer += data
            # A slow network passes on every byte it has; messages are then only looked at.
            slow = self._proxy.bytes_per_s is not None
            if slow:
                self.send(data)
            for packet in self._packets():
                self._proxy.handle(self, packet, seen_only=slow)
        if self.dead and self.direction == "down":
            await asyncio.Event().wait()  # nor does it hear that the broker gave it up

    async def _taken(self) -> bytes:
        """What comes next, no faster than it may; empty at the end."""
        rate = self._proxy.bytes_per_s
        if rate is None:
            return await self._reader.read(READ_BYTES)
        data = await self._reader.read(max(1, int(rate / 20)))
        await asyncio.sleep(len(data) / rate)
        return data

    async def write(self) -> None:
        """Send on what is due."""
        loop = asyncio.get_running_loop()
        while self.writer is not None:
            while not self._queue:
                self._more.clear()
                await self._more.wait()
            due, data = self._queue.popleft()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            if not self.dead:
                self.writer.write(data)
                await self.writer.drain()

    def _packets(self) -> Iterator[Packet]:
        while (end := _packet_end(self._buffer)) is not None:
            data = bytes(self._buffer[:end])
            del self._buffer[:end]
            if data[0] >> 4 == CONNECT:
                self.level = self.other.level = _level(data)
            packet = _parse(self.direction, self.client, self.level, data)
            if packet.kind == CONNECT:
                self.client = self.other.client = packet.client
            yield packet


class Proxy:
    """See the module. `port` is where programs connect; `to_port` is the broker's, on loopback."""

    def __init__(self, to_port: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.tamper: Tamper | None = None
        self.holds: list[Hold] = []
        self.passed: list[Packet] = []
        """All messages that came by, before anything was done to them."""
        self.connections = 0
        """How many were made."""
        self.bytes = {"up": 0, "down": 0}
        self._to_port = to_port
        self._refusing = False
        self._silent = False
        self._pairs: set[tuple[_Pipe, _Pipe]] = set()
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        self._server = started.result(HANGS_S)
        self.port: int = self._server.sockets[0].getsockname()[1]

    # -- for tests --------------------------------------------------------------------------

    def cut(self, client: str | None = None) -> None:
        """End all connections, or those of one client id."""
        self.do(lambda: self._abort(client))

    def refuse(self) -> None:
        """End all connections and let nobody connect."""
        self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Let programs connect, and what they send pass."""
        self._refusing = self._silent = False

    def blackhole(self, *, new_ones: bool = True) -> None:
        """Let nothing pass any more on the connections there are; `new_ones`: nor on later ones."""

        def swallow() -> None:
            self._silent = new_ones
            for pair in self._pairs:
                for pipe in pair:
                    pipe.dead = True

        self.do(swallow)

    def hold(self, match: Match, *, after: int = 0) -> Hold:
        """Let messages that match wait, but for the first `after`."""
        hold = Hold(self, match, after)
        self.do(lambda: self.holds.append(hold))
        return hold

    def inject(self, client: str, direction: Direction, data: bytes) -> None:
        """Send bytes on a client's connection as if its peer had."""

        def send() -> None:
            for pair in self._pairs:
                for pipe in pair:
                    if pipe.client == client and pipe.direction == direction:
                        pipe.send(data)

        self.do(send)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at whenever a message passes."""
        with self._changed:
            assert self._changed.wait_for(holds, HANGS_S), "the messages never came"

    def seen(self, match: Match) -> int:
        """How many messages that match came by."""
        return sum(map(match, tuple(self.passed)))

    def close(self) -> None:
        """End it, with all connections."""

        async def finish() -> None:
            self._server.close()
            self._abort(None)
            for task in asyncio.all_tasks():
                if task is not asyncio.current_task():
                    task.cancel()
            await asyncio.sleep(0)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(finish(), self._loop).result(HANGS_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANGS_S)
        self._loop.close()

    def do(self, action: Callable[[], None]) -> None:
        """Do something in the proxy's thread, and return when it is done."""
        if threading.current_thread() is self._thread:
            action()
            return
        done = threading.Event()

        def act() -> None:
            try:
                action()
            finally:
                done.set()

        self._loop.call_soon_threadsafe(act)
        assert done.wait(HANGS_S)

    # -- in the proxy's thread --------------------------------------------------------------

    def count(self, direction: Direction, number: int) -> None:
        """So many bytes came."""
        self.bytes[direction] += number

    def handle(self, pipe: _Pipe, packet: Packet, *, seen_only: bool) -> None:
        """Let a packet go its way; `seen_only`: it has gone already."""
        if packet.topic:
            with self._changed:
                self.passed.append(packet)
                self._changed.notify_all()
        if seen_only:
            return
        if packet.topic:
            if any(hold.takes(pipe, packet) for hold in self.holds):
                return
            if self.tamper is not None:
                self._send_instead(pipe, packet, self.tamper(packet))
                return
        pipe.send(packet.data)

    def _send_instead(self, pipe: _Pipe, packet: Packet, instead: Sequence[Packet] | None) -> None:
        if instead is None:
            if packet.id is not None:
                pipe.other.send(bytes([PUBACK << 4, 2]) + packet.id.to_bytes(2, "big"))
            return
        for each in instead:
            pipe.send(each.data)

    def _abort(self, client: str | None) -> None:
        for pair in list(self._pairs):
            if client in (None, pair[0].client):
                for pipe in pair:
                    if pipe.writer is not None:
                        pipe.writer.transport.abort()

    async def _start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, HOST, 0, limit=BUFFER_BYTES)
        if server.sockets[0].getsockname()[1] != self._to_port:
            return server
        # A broker that is not up yet left its port free; the proxy would connect to itself.
        again = await self._start()
        server.close()
        return again

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        if self.bytes_per_s is not None:
            # So little that a program notices how slow the link is.
            own: socket.socket = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        try:
            to_reader, to_writer = await asyncio.open_connection(
                HOST, self._to_port, limit=BUFFER_BYTES
            )
        except OSError:
            writer.transport.abort()
            return
        up, down = _Pipe(self, "up", reader), _Pipe(self, "down", to_reader)
        up.writer, down.writer = to_writer, writer
        up.other, down.other = down, up
        up.dead = down.dead = self._silent
        self.connections += 1
        pair = (up, down)
        self._pairs.add(pair)
        tasks = [asyncio.ensure_future(work) for p in pair for work in (p.read(), p.write())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for each in (writer, to_writer):
                each.transport.abort()


# -- MQTT, as much of it as is needed ------------------------------------------------------------


def _packet_end(buffer: bytearray) -> int | None:
    """Where the first packet ends; None: not all of it is there."""
    length = shift = 0
    for at in range(1, min(5, len(buffer))):
        length |= (buffer[at] & 127) << shift
        shift += 7
        if not buffer[at] & 128:
            end = at + 1 + length
            return end if end <= len(buffer) else None
    return None


def _body(data: bytes) -> bytes:
    at = 1
    while data[at] & 128:
        at += 1
    return data[at + 1 :]


def _level(connect: bytes) -> int:
    """The version of MQTT: 4 for 3.1.1."""
    body = _body(connect)
    return body[2 + int.from_bytes(body[:2], "big")]


def _parse(direction: Direction, client: str, level: int, data: bytes) -> Packet:
    body = _body(data)
    kind = data[0] >> 4
    if kind == CONNECT:
        start = 2 + int.from_bytes(body[:2], "big") + 4  # protocol's name, level, flags, keepalive
        start += _properties_bytes(body[start:], level)
        length = int.from_bytes(body[start : start + 2], "big")
        return Packet(direction, body[start + 2 : start + 2 + length].decode(), data)
    if kind != PUBLISH:
        return Packet(direction, client, data)
    end = 2 + int.from_bytes(body[:2], "big")
    topic, id = body[2:end].decode(), None
    if data[0] & 0b110:
        id, end = int.from_bytes(body[end : end + 2], "big"), end + 2
    start, end = end, end + _properties_bytes(body[end:], level)
    return Packet(
        direction, client, data, topic, body[end:], id, bool(data[0] & 1), body[start:end]
    )


def _properties_bytes(rest: bytes, level: int) -> int:
    """The bytes of the properties that a packet's rest begins with, from MQTT 5 on."""
    if level < 5:
        return 0
    length = at = 0
    while rest[at] & 128:
        length |= (rest[at] & 127) << 7 * at
        at += 1
    return at + 1 + (length | rest[at] << 7 * at)


def _length(number: int) -> bytes:
    """A packet's length as MQTT writes it."""
    out = bytearray()
    while True:
        number, low = number >> 7, number & 127
        out.append(low | (128 if number else 0))
        if not number:
            return bytes(out)
