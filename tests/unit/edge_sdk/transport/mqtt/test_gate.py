"""The gate: packets pass unchanged, however they come; large messages lose their payload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.transport.mqtt.gate import SKIP_BYTES, SKIPS, PacketGate

LIMIT = 300


def packet(first: int, rest: bytes) -> bytes:
    """An MQTT packet, by the book: 7 bits of the length at a time, lowest first."""
    length, digits = len(rest), b""
    while True:
        length, digit = divmod(length, 128)
        digits += bytes([digit | (128 if length else 0)])
        if not length:
            return bytes([first]) + digits + rest


def publish(topic: bytes, payload: bytes, *, qos: int, properties: bytes = b"") -> bytes:
    number = b"\x00\x07" if qos else b""
    rest = len(topic).to_bytes(2, "big") + topic + number + properties + payload
    return packet(0x31 | qos << 1, rest)


@dataclass
class Wire:
    """A socket that has at most so many bytes at a time, and nothing yet in between."""

    data: bytes
    pieces: Iterator[int]
    largest: int = 0

    def receive(self, size: int) -> bytes:
        self.largest = max(self.largest, size)
        piece = next(self.pieces, 2**20)
        if piece == 0:
            raise BlockingIOError
        data, self.data = self.data[: min(size, piece)], self.data[min(size, piece) :]
        return data


def read_all(gate: PacketGate, wire: Wire, size: int) -> tuple[bytes, list[int]]:
    """Everything the reader gets, and the sizes of the messages that were cut."""
    read, cuts = b"", list[int]()
    while True:
        try:
            data = gate.read(size, wire.receive)
        except BlockingIOError:
            continue
        if not data:
            return read, cuts
        read += data
        if (cut := gate.take_cut()) is not None:
            cuts.append(cut)


MESSAGES = st.tuples(
    st.binary(min_size=1, max_size=40), st.sampled_from([0, 1, 200, 400, 5000]), st.integers(0, 1)
)
OTHERS = st.tuples(st.sampled_from([0x20, 0x40, 0x90, 0xD0]), st.binary(max_size=40))


@given(
    st.booleans(),
    st.lists(st.one_of(MESSAGES, OTHERS), max_size=5),
    st.lists(st.integers(0, 400), max_size=30),
    st.integers(1, 100),
)
def test_packets_pass_and_large_messages_lose_their_payload(
    has_properties: bool,
    sent: list[tuple[bytes, int, int] | tuple[int, bytes]],
    pieces: list[int],
    size: int,
) -> None:
    stream, wanted, cuts = b"", b"", []
    there, none = (b"\x03\x01\x02\x03", b"\0") if has_properties else (b"", b"")
    for each in sent:
        if isinstance(each[0], int):
            stream += (one := packet(each[0], bytes(each[1])))
            wanted += one
            continue
        topic, length, qos = each[0], int(each[1]), int(each[-1])
        stream += (one := publish(topic, bytes(length), qos=qos, properties=there))
        rest = len(one) - (2 if len(one) < 130 else 3)
        if rest > LIMIT:
            cuts.append(rest)
            one = publish(topic, b"", qos=qos, properties=none)
        wanted += one
    wire = Wire(stream, iter(pieces))
    assert read_all(PacketGate(LIMIT, has_properties=has_properties), wire, size) == (wanted, cuts)


@given(st.lists(OTHERS, min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 300))
def test_whole_packets_are_those_that_a_reader_gets(
    sent: list[tuple[int, bytes]], missing: int, more: int
) -> None:
    packets = [packet(first, rest + bytes(more)) for first, rest in sent]
    data = b"".join(packets)[: -missing or None]
    gate, got = PacketGate(LIMIT, has_properties=True), list[bytes]()
    while found := gate.whole(data):
        first, rest, size = found
        assert data[:size] == packet(first, rest)
        got.append(data[:size])
        data = data[size:]
    before = packets[: len(got)]
    assert got == before
    if len(got) < len(packets):  # the next one is cut short, or too long for this gate
        left = len(sent[len(got)][1]) + more
        assert left > LIMIT or len(data) < len(packets[len(got)])


def test_packet_that_a_reader_has_begun_is_not_whole() -> None:
    gate = PacketGate(LIMIT, has_properties=True)
    stream = packet(0x40, b"\0\x07") + packet(0x40, b"\0\x08")
    wire = Wire(stream, iter(()))
    assert gate.read(1, wire.receive) == b"\x40"
    assert gate.whole(wire.data) is None
    assert gate.whole(b"") is None
    assert PacketGate(LIMIT, has_properties=True).whole(b"\x30\xff\xff\xff\xff\x01") is None


def test_message_is_never_asked_for_as_a_whole() -> None:
    size = 3 * SKIPS * SKIP_BYTES
    wire = Wire(publish(b"t", bytes(size), qos=1), iter(()))
    gate, turns = PacketGate(LIMIT, has_properties=False), 0
    while True:
        try:
            data = gate.read(1000, wire.receive)
            break
        except BlockingIOError:
            turns += 1
            assert gate.skipping
    assert turns == 3  # others had their turn
    assert data == publish(b"t", b"", qos=1)
    assert gate.take_cut() == size + 5
    assert not gate.skipping
    assert wire.largest <= SKIP_BYTES


@pytest.mark.parametrize(
    "stream",
    [
        b"\x30\xff\xff\xff\xff\x01",
        packet(0x40, bytes(LIMIT + 1)),
        packet(0x34, bytes(LIMIT + 1)),
        packet(0x32, b"\xff\xff" + bytes(LIMIT)),
    ],
    ids=["length", "no message", "QoS 2", "topic"],
)
def test_bytes_that_are_not_mqtt_end_the_connection(stream: bytes) -> None:
    gate = PacketGate(LIMIT, has_properties=False)
    with pytest.raises(ConnectionError):
        gate.read(1000, Wire(stream, iter(())).receive)


@pytest.mark.parametrize("at", [1, 2, 100, 399])
def test_connection_that_ends_within_a_large_message_is_over(at: int) -> None:
    stream = publish(b"t", bytes(400), qos=0)[:at]
    gate = PacketGate(LIMIT, has_properties=False)
    assert gate.read(1000, Wire(stream, iter(())).receive) == b""
