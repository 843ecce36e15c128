"""Bytes are counted as they pass: against packets made by hand, and a server that counts too."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.network.stage.forwarder import Forwarder
from benchmarks.network.stage.packets import Packet, PacketReader
from benchmarks.report.figures import FigureError
from edge_sdk.transport.settings import BrokerSettings
from tests.waiting import HANGS_S


def packet(first: int, rest: bytes) -> bytes:
    """An MQTT packet, by the book: 7 bits of the length at a time, lowest first."""
    length, digits = len(rest), b""
    while True:
        length, digit = divmod(length, 128)
        digits += bytes([digit | (128 if length else 0)])
        if not length:
            return bytes([first]) + digits + rest


def publish(topic: str, payload: bytes, qos: int = 1, properties: bytes = b"") -> bytes:
    name = topic.encode()
    number = (b"\x00\x07" if qos else b"") + properties
    return packet(0x30 | qos << 1, len(name).to_bytes(2, "big") + name + number + payload)


PUBLISHES = st.tuples(
    st.text(min_size=1, max_size=20), st.sampled_from([0, 1, 120, 128, 16_384]), st.booleans()
)
OTHERS = st.tuples(st.sampled_from([0x40, 0x82, 0xC0, 0xE0]), st.binary(max_size=200))


FIRST = {
    "CONNECT 3.1.1": (packet(0x10, b"\x00\x04MQTT\x04\x02\x00\x1e\x00\x01a"), b""),
    "CONNECT 5": (packet(0x10, b"\x00\x04MQTT\x05\x02\x00\x1e\x00\x00\x01a"), b"\x05\x02abcd"),
    "CONNACK 3.1.1": (packet(0x20, b"\x00\x00"), b""),
    "CONNACK 5": (packet(0x20, b"\x00\x00\x00"), b"\x00"),
}
"""The first packet of a direction, and properties that messages then have."""


@given(
    st.sampled_from(list(FIRST)),
    st.lists(st.one_of(PUBLISHES, OTHERS), max_size=5),
    st.lists(st.integers(1, 5000), max_size=10),
)
def test_stream_is_cut_into_its_packets_however_it_comes(
    first: str,
    sent: list[tuple[str, int, bool] | tuple[int, bytes]],
    cuts: list[int],
) -> None:
    head, properties = FIRST[first]
    raw, wanted = [head], [Packet(3.0, True, len(head))]
    for each in sent:
        if isinstance(each[0], str):
            topic, size, qos = each[0], int(each[1]), bool(each[-1])
            raw.append(publish(topic, bytes(size), int(qos), properties))
            wanted.append(Packet(3.0, True, len(raw[-1]), topic, size))
        else:
            raw.append(packet(each[0], bytes(each[1])))
            wanted.append(Packet(3.0, True, len(raw[-1])))
    stream, reader = b"".join(raw), PacketReader(up=True)
    found: list[Packet] = []
    for cut in cuts:
        found += reader.feed(stream[:cut], 3.0)
        stream = stream[cut:]
    found += reader.feed(stream, 3.0)
    assert found == wanted
    assert sum(each.size for each in found) == len(b"".join(raw))


def test_stream_that_is_not_mqtt_is_refused() -> None:
    with pytest.raises(FigureError, match="does not speak MQTT"):
        list(PacketReader(up=True).feed(b"\x30\xff\xff\xff\xff\x01", 0.0))


@contextmanager
def counting_server(answer: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A port, and all that was sent to it; answers once, when the first bytes have come."""
    got: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(4096):
                if not got:
                    connection.sendall(answer)
                got.append(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], got
        thread.join(HANGS_S)
        assert not thread.is_alive()


def test_forwarder_counts_what_the_other_side_gets() -> None:
    sent = [publish("a/b", bytes(300_000)), packet(0xC0, b""), publish("c", b"xyz", qos=0)]
    answer = publish("d", bytes(1000)) + packet(0x40, b"\x00\x07")
    before = threading.active_count()
    with counting_server(answer) as (port, got):
        with Forwarder(BrokerSettings(port=port), ["one", "other"]) as forwarder:
            own = forwarder.settings("one")
            assert own.port not in (port, forwarder.settings("other").port)
            with socket.create_connection((own.host, own.port), HANGS_S) as program:
                for each in sent:
                    program.sendall(each)
                back = b""
                while len(back) < len(answer):
                    back += program.recv(4096)
                program.shutdown(socket.SHUT_WR)
                assert program.recv(1) == b""  # the end of one is the end of the other
        assert back == answer
    assert b"".join(got) == b"".join(sent)
    passed = forwarder.packets("one")
    assert [(p.size, p.topic, p.payload_size) for p in passed if p.up] == [
        (len(sent[0]), "a/b", 300_000),
        (2, None, 0),
        (len(sent[2]), "c", 3),
    ]
    assert [(p.size, p.topic) for p in passed if not p.up] == [(len(answer) - 4, "d"), (4, None)]
    assert forwarder.packets("other") == []
    assert threading.active_count() == before


def test_forwarder_without_a_broker_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Forwarder(BrokerSettings(port=port), ["one"]) as forwarder:
        own = forwarder.settings("one")
        with socket.create_connection((own.host, own.port), HANGS_S) as program:
            assert program.recv(1) == b""


def test_forwarder_says_that_something_else_than_mqtt_passed() -> None:
    with counting_server(b"") as (port, _):
        forwarder = Forwarder(BrokerSettings(port=port), ["one"])
        with pytest.raises(FigureError, match="does not speak MQTT"), forwarder:  # noqa: PT012
            own = forwarder.settings("one")
            with socket.create_connection((own.host, own.port), HANGS_S) as program:
                program.sendall(b"\x30" + b"\xff" * 8)
                assert program.recv(1) == b""
