"""Links against sockets that misbehave: each says why, in words, and goes on trying."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from edge_sdk.protocol.messages.topics import BULK
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent
from edge_sdk.transport.mqtt import connection
from edge_sdk.transport.mqtt.connection import LONGEST_PAUSE_S, pause_s, unsent_bytes
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.waiting import HANGS_S, free_port, until

CONNACK = b"\x20\x02\x00"


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port at which every connection is handled by a function, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        done = threading.Event()
        accepted: list[socket.socket] = []

        def accept() -> None:
            while not done.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                accepted.append(connection)
                with suppress(OSError):  # the other side may hang up first
                    serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            done.set()
            thread.join()
            for connection in accepted:
                connection.close()


def first_reason(settings: BrokerSettings) -> str:
    events: list[LinkEvent] = []
    link = open_link(settings, name="test", deliver=events.append)
    try:
        until(lambda: any(isinstance(event, Disconnected) for event in events))
    finally:
        link.kill()
    return next(event.reason for event in events if isinstance(event, Disconnected))


def answer(code: int) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(1_024)
        connection.sendall(CONNACK + bytes([code]))

    return serve


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "does not speak MQTT 3.1.1"),
        (2, "client id"),
        (3, "not ready"),
        (4, "user name or password (user 'me')"),
        (5, "does not let this user connect"),
    ],
)
def test_refusal_of_the_broker_is_explained(code: int, words: str) -> None:
    with listening(answer(code)) as port:
        settings = BrokerSettings(port=port, username="me", password="x")
        assert words in first_reason(settings)


def test_port_without_a_listener_is_explained() -> None:
    assert "is the broker running" in first_reason(BrokerSettings(port=free_port()))


def test_unknown_host_is_explained() -> None:
    settings = BrokerSettings(host="no-such-host.invalid", allow_plaintext=True)
    assert "was not found" in first_reason(settings)


def test_listener_that_closes_is_explained() -> None:
    with listening(lambda connection: connection.close()) as port:
        assert "TLS" in first_reason(BrokerSettings(port=port))


def test_listener_without_tls_is_explained() -> None:
    with listening(lambda connection: connection.sendall(b"220 mail\r\n")) as port:
        assert "does not speak TLS" in first_reason(BrokerSettings(port=port, tls=True))


@pytest.mark.parametrize("noise", [b"\xff" * 400, b"HTTP/1.1 400 Bad Request\r\n" * 20, b"\x20\0"])
def test_bytes_that_are_not_mqtt_are_explained(noise: bytes) -> None:
    def serve(connection: socket.socket) -> None:
        connection.recv(1_024)
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)

    with listening(serve) as port:
        assert first_reason(BrokerSettings(port=port)).startswith(f"127.0.0.1:{port}: ")


def test_broker_that_falls_silent_is_noticed_and_tried_again() -> None:
    connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        connection.recv(1_024)
        connection.sendall(CONNACK + b"\0")
        connections.append(connection)

    events: list[LinkEvent] = []
    with listening(serve) as port:
        settings = BrokerSettings(port=port, keepalive_s=1)
        link = open_link(settings, name="test", deliver=events.append)
        until(lambda: sum(isinstance(event, Connected) for event in events) >= 2)
        link.kill()
    up = next(at for at, event in enumerate(events) if isinstance(event, Connected))
    lost = events[up + 1]
    assert isinstance(lost, Disconnected)
    assert "no sign of life" in lost.reason


def events_of(code: int, attempts: int, told: int = 1) -> list[LinkEvent]:
    """What a link says of a broker that answers so to so many attempts of its connections.

    It has said at least `told` things by then; the last attempts may not have been told of.
    """
    tried: list[socket.socket] = []
    events: list[LinkEvent] = []

    def serve(connection: socket.socket) -> None:
        tried.append(connection)
        answer(code)(connection)

    with listening(serve) as port:
        link = open_link(BrokerSettings(port=port), name="test", deliver=events.append)
        until(lambda: len(tried) >= attempts and len(events) >= told)
        link.kill()
    return events


def test_same_reason_is_said_once() -> None:
    assert len(events_of(3, attempts=5)) == 1


@pytest.mark.parametrize("code", [2, 4, 5])
def test_denials_are_counted_aloud_and_each_count_told_once(code: int) -> None:
    events = events_of(code, attempts=7, told=2)
    counts = [event.denials for event in events if isinstance(event, Disconnected)]
    assert counts == list(range(1, len(counts) + 1))
    assert len(counts) >= 2


@pytest.mark.parametrize("code", [1, 3])
def test_broker_that_cannot_now_denies_nobody(code: int) -> None:
    (event,) = events_of(code, attempts=3)
    assert isinstance(event, Disconnected)
    assert event.denials == 0


def test_close_without_a_broker_does_not_wait_for_one() -> None:
    events: list[LinkEvent] = []
    link = open_link(BrokerSettings(port=free_port()), name="test", deliver=events.append)
    assert link.publish("t", b"never sent")
    until(lambda: events)
    link.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "mqtt test"]


def test_link_survives_a_deliver_that_raises() -> None:
    told: list[LinkEvent] = []

    def deliver(event: LinkEvent) -> None:
        told.append(event)
        raise RuntimeError("not the link's fault")

    def serve(connection: socket.socket) -> None:
        connection.recv(1_024)
        connection.sendall(CONNACK + b"\0")

    with listening(serve) as port:
        link = open_link(BrokerSettings(port=port), name="test", deliver=deliver)
        until(lambda: told)
        link.close()
    assert told == [Connected(first=True)]


class Doors:
    """A broker that lets the two connections of a link in, or not, each as it is told to.

    The bulk connection pauses for ever after a failure, and the other one hardly.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens = {"control": False, "bulk": False}
        self.stays = True
        """False: a connection that was let in is closed at once."""
        self.welcomed: list[str] = []
        self.pauses: list[str] = []
        """The connections that began a pause."""
        monkeypatch.setattr(connection, "pause_s", self._pause_s)

    def _pause_s(self, *_: float) -> float:
        bulk = threading.current_thread().name.endswith(BULK)
        self.pauses.append("bulk" if bulk else "control")
        return 1e6 if bulk else 0.01

    def serve(self, accepted: socket.socket) -> None:
        who = "bulk" if BULK.encode() in accepted.recv(1_024) else "control"
        if not self.opens[who]:
            accepted.close()
            return
        accepted.sendall(CONNACK + b"\0")
        self.welcomed.append(who)
        if not self.stays:
            accepted.close()


def test_connection_does_not_wait_when_the_other_one_works_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doors = Doors(monkeypatch)
    events: list[LinkEvent] = []
    with listening(doors.serve) as port:
        link = open_link(BrokerSettings(port=port), name="test", deliver=events.append)
        until(lambda: "bulk" in doors.pauses)
        doors.opens = {"control": True, "bulk": True}
        until(lambda: Connected(first=True) in events)
        link.close()


def test_connections_that_end_again_and_again_do_not_hurry_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doors = Doors(monkeypatch)
    doors.stays = False
    with listening(doors.serve) as port:
        link = open_link(BrokerSettings(port=port), name="test", deliver=lambda _: None)
        until(lambda: "bulk" in doors.pauses)
        doors.opens["control"] = True
        until(lambda: doors.welcomed.count("control") >= 5 and doors.pauses.count("bulk") == 2)
        tried = doors.welcomed.count("control")
        until(lambda: doors.welcomed.count("control") >= tried + 5)
        link.kill()
    assert doors.pauses.count("bulk") == 2


@pytest.mark.parametrize("failures", [0, 1, 2, 5, 10, 10_000])
def test_pause_grows_to_a_limit_and_is_spread(failures: int) -> None:
    longest = min(LONGEST_PAUSE_S, 2.0 ** min(failures, 5))
    assert pause_s(failures, 1.0) == longest
    assert pause_s(failures, 0.0) == pytest.approx(longest / 10)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is sure to say")
def test_what_the_other_end_does_not_take_is_unsent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            with receiver:
                assert unsent_bytes(sender) == 0
                sender.setblocking(False)
                sent = sender.send(bytes(1 << 20))
                before = unsent_bytes(sender)
                assert 0 < before <= sent
                receiver.settimeout(HANGS_S)
                taken = 0
                while taken < sent:
                    taken += len(receiver.recv(65_536))
                until(lambda: unsent_bytes(sender) == 0)
    assert unsent_bytes(sender) == 0  # closed
