"""Counts the traffic between programs and a broker: a TCP forwarder between them.

    program ──▶ 127.0.0.1:<port of its name> ──▶ broker

Every name has its own port, which identifies a program's connections. Bytes are passed on as they
come; the packets in them are recorded. There is a thread for each direction of each connection:
there are few, and only the kernel decides who waits for whom.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial

from benchmarks.network.stage.packets import Packet, PacketReader
from benchmarks.report.figures import FigureError
from edge_sdk.transport.settings import BrokerSettings

HOST = "127.0.0.1"
READ_BYTES = 2**18
CLOSE_S = 10.0


class Forwarder:
    """Forwards while the context lasts; its end raises `FigureError` for non-MQTT bytes."""

    def __init__(self, broker: BrokerSettings, names: Sequence[str]) -> None:
        self._broker = broker
        self._packets: dict[str, list[Packet]] = {name: [] for name in names}
        self._ports: dict[str, int] = {}
        self._sockets: list[socket.socket] = []
        self._pumps: list[threading.Thread] = []
        self._failure: FigureError | None = None
        self._accepting = threading.Thread(target=self._accept, name="forwarder", daemon=True)

    def __enter__(self) -> Forwarder:
        with ExitStack() as stack:
            alarm, self._bell = socket.socketpair()
            self._selector = selectors.DefaultSelector()
            for each in (alarm, self._bell, self._selector):
                stack.callback(each.close)
            self._selector.register(alarm, selectors.EVENT_READ)
            for name in self._packets:
                listener = stack.enter_context(socket.create_server((HOST, 0)))
                self._ports[name] = listener.getsockname()[1]
                self._selector.register(listener, selectors.EVENT_READ, name)
            self._accepting.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._stack:
            self._bell.send(b"x")
            self._accepting.join(CLOSE_S)
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for pump in self._pumps:
                pump.join(CLOSE_S)
            for each in self._sockets:
                each.close()
        if self._failure is not None and error is None:
            raise self._failure

    def settings(self, name: str) -> BrokerSettings:
        """Return the settings with which the program of this name reaches the broker."""
        return replace(self._broker, host=HOST, port=self._ports[name])

    def packets(self, name: str) -> list[Packet]:
        """Return what has passed for this name so far, in order per direction and connection."""
        return list(self._packets[name])

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                listener = key.fileobj
                assert isinstance(listener, socket.socket)  # noqa: S101  for the type checker
                self._connect(key.data, listener.accept()[0])

    def _connect(self, name: str, program: socket.socket) -> None:
        self._sockets.append(program)
        try:
            broker = socket.create_connection((self._broker.host, self._broker.port))
        except OSError:
            program.shutdown(socket.SHUT_RDWR)  # as the broker would: the program tries again
            return
        self._sockets.append(broker)
        for each in (program, broker):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink, up in ((program, broker, True), (broker, program, False)):
            work = partial(self._pump, source, sink, PacketReader(up=up), self._packets[name])
            pump = threading.Thread(target=work, daemon=True)
            self._pumps.append(pump)
            pump.start()

    def _pump(
        self,
        source: socket.socket,
        sink: socket.socket,
        reader: PacketReader,
        passed: list[Packet],
    ) -> None:
        with suppress(OSError):  # either side is gone: the other is told below
            while data := source.recv(READ_BYTES):
                # Recorded before it is passed on: its effects are recorded later.
                try:
                    passed.extend(reader.feed(data, time.monotonic()))
                except FigureError as error:
                    self._failure = error
                    break
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
