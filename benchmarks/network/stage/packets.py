"""MQTT packets in a byte stream, as far as needed to count them.

    packet = type and flags (1 byte) ‖ length of the rest (1 to 4 bytes, 7 bits each) ‖ rest

A PUBLISH begins its rest with the topic (length as uint16, big-endian, then UTF-8) and, above QoS
0, a packet id of 2 bytes; in MQTT 5, properties follow. What is left is the payload. The first
packet of a direction tells the version: a CONNECT names it (5 is MQTT 5), and a CONNACK has
properties, so more than 2 bytes, only in MQTT 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.report.figures import FigureError

CONNECT, CONNACK, PUBLISH = 1, 2, 3
_MAX_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet, the time it had passed, and its direction. Sizes in bytes."""

    at_s: float
    up: bool
    """True towards the broker."""
    size: int
    """Size of the whole packet."""
    topic: str | None = None
    """Topic of a PUBLISH; None: any other packet."""
    payload_size: int = 0
    """Payload of a PUBLISH."""


class PacketReader:
    """Cuts one direction of a connection into packets."""

    def __init__(self, *, up: bool) -> None:
        self._up = up
        self._held = bytearray()
        self._has_properties = False

    def feed(self, data: bytes, at_s: float) -> Iterator[Packet]:
        """Return the packets that these bytes complete. Raises `FigureError` for non-MQTT bytes."""
        self._held += data
        while (size := _packet_size(self._held)) is not None and size <= len(self._held):
            yield self._packet(bytes(self._held[:size]), at_s)
            del self._held[:size]

    def _packet(self, raw: bytes, at_s: float) -> Packet:
        start, kind = _header_size(raw), raw[0] >> 4
        behind = start + 2 + int.from_bytes(raw[start : start + 2], "big")
        if kind == CONNECT:
            self._has_properties = raw[behind] >= 5
        elif kind == CONNACK:
            self._has_properties = len(raw) - start > 2
        if kind != PUBLISH:
            return Packet(at_s, self._up, len(raw))
        topic = raw[start + 2 : behind].decode()
        behind += 2 if raw[0] & 0b110 else 0
        if self._has_properties:
            size = _packet_size(bytearray(raw[behind - 1 :]))  # a length, as of a packet
            behind += 0 if size is None else size - 1
        return Packet(at_s, self._up, len(raw), topic, len(raw) - behind)


def _header_size(raw: bytes | bytearray) -> int:
    """Bytes of type and length."""
    return 2 + next(at for at in range(_MAX_LENGTH_BYTES) if raw[1 + at] < 128)


def _packet_size(held: bytearray) -> int | None:
    """Bytes of the first packet; None while its length is not known."""
    length = 0
    for at in range(_MAX_LENGTH_BYTES):
        if len(held) < at + 2:
            return None
        length |= (held[at + 1] & 127) << 7 * at
        if held[at + 1] < 128:
            return at + 2 + length
    raise FigureError("a connection through the forwarder does not speak MQTT")
