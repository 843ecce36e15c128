"""Keeps messages that are too large out of memory, between the socket and paho.

paho reads a packet of any size into memory. This gate reads the fixed header first: a message over
the limit is read and thrown away piece by piece, and paho gets the same message without its
payload. So the broker gets its acknowledgement, the connection lives on, and a large retained
message costs bytes on the network but neither memory nor an endless series of reconnections.

    packet = type and flags (1 byte) ‖ length of the rest (1 to 4 bytes, 7 bits each) ‖ rest

The rest of a PUBLISH begins with the topic (its length as uint16, big-endian, then UTF-8), above
QoS 0 a packet id of 2 bytes and, in MQTT 5, properties.
"""

from __future__ import annotations

from collections.abc import Callable

Receive = Callable[[int], bytes]
"""Receives at most so many bytes; none: the connection was closed. May raise `OSError`, of which
`BlockingIOError` means that nothing has come yet."""

SKIP_BYTES = 2**16
"""Most bytes of a message that are thrown away at once."""
SKIPS = 64
"""Most such pieces in one call, so that the connection's other work goes on."""

_PUBLISH = 3
_MAX_LENGTH_BYTES = 4
_MAX_START_BYTES = 2 + 2**16 + 2
"""Bytes of a PUBLISH up to its properties or payload, at most."""


class PacketGate:
    """The packets of one connection, in the order they come."""

    def __init__(self, max_bytes: int, *, has_properties: bool) -> None:
        """`max_bytes` limits a packet's rest. `has_properties`: the protocol is MQTT 5."""
        self._max_bytes = max_bytes
        self._has_properties = has_properties
        self._head = bytearray()
        """Fixed header of the next packet, as far as it has come."""
        self._ready = b""
        """Bytes for the reader."""
        self._through = 0
        """Bytes of the current packet that go to the reader as they come."""
        self._skipped = 0
        """Bytes read of the packet that is being thrown away."""
        self._skips = 0
        """Bytes that this packet's rest has; 0: none is being thrown away."""
        self._start = bytearray()
        """Its first bytes, with the topic and the packet id."""
        self._cut: int | None = None

    @property
    def skipping(self) -> bool:
        """True while a message is thrown away that has not come to its end."""
        return self._skips > 0

    def whole(self, data: bytes) -> tuple[int, bytes, int] | None:
        """Return the packet that begins these bytes: its first byte, its rest, and its size.

        None: it is not whole, is to be thrown away, or the reader has begun another; `read` it.
        """
        if self._head or self._ready or self._through or self._skips:
            return None
        rest, at = 0, 1
        while True:
            if at >= len(data) or at > _MAX_LENGTH_BYTES:
                return None
            rest += (data[at] & 127) << 7 * (at - 1)
            at += 1
            if data[at - 1] < 128:
                break
        if rest > self._max_bytes or at + rest > len(data):
            return None
        return data[0], data[at : at + rest], at + rest

    def take_cut(self) -> int | None:
        """Return how many bytes the message had that was handed over last, once, if it was cut."""
        cut, self._cut = self._cut, None
        return cut

    def read(self, size: int, receive: Receive) -> bytes:
        """Return the next bytes for the reader, at most `size`; none: the connection was closed.

        Raises `ConnectionError` for bytes that are not MQTT, and what `receive` raises.
        """
        if not self._ready and not self._through:
            self._next_packet(receive)
        if self._ready:
            data, self._ready = self._ready[:size], self._ready[size:]
            return data
        if not self._through:
            return b""
        data = receive(min(size, self._through))
        self._through -= len(data)
        return data

    def _next_packet(self, receive: Receive) -> None:
        if not self._skips:
            rest = self._read_head(receive)
            if rest is None:
                return
            if rest <= self._max_bytes:
                self._ready, self._through = bytes(self._head), rest
                self._head.clear()
                return
            if self._head[0] >> 4 != _PUBLISH or self._quality > 1:
                raise ConnectionError(
                    f"the broker sent a packet of {rest} bytes that is no message"
                )
            self._skips, self._skipped = rest, 0
        self._skip(receive)

    def _read_head(self, receive: Receive) -> int | None:
        """Return the length of the rest of a packet; None: the connection was closed."""
        while len(self._head) < 2 or self._head[-1] & 128:
            if len(self._head) > _MAX_LENGTH_BYTES:
                raise ConnectionError("the length of a packet has too many bytes")
            byte = receive(1)
            if not byte:
                return None
            self._head += byte
        return sum((each & 127) << 7 * at for at, each in enumerate(self._head[1:]))

    @property
    def _quality(self) -> int:
        """The QoS of a PUBLISH."""
        return (self._head[0] >> 1) & 3

    def _skip(self, receive: Receive) -> None:
        for _ in range(SKIPS):
            data = receive(min(SKIP_BYTES, self._skips - self._skipped))
            if not data:
                return
            self._skipped += len(data)
            self._start += data[: _MAX_START_BYTES - len(self._start)]
            if self._skipped == self._skips:
                self._hand_over()
                return
        raise BlockingIOError

    def _hand_over(self) -> None:
        """Let the reader have the message without its payload."""
        size = 2 + int.from_bytes(self._start[:2], "big") + (2 if self._quality else 0)
        if size > len(self._start):
            raise ConnectionError("the topic of a message is longer than the message")
        rest = bytes(self._start[:size]) + (b"\0" if self._has_properties else b"")
        self._ready = bytes([self._head[0]]) + _length(len(rest)) + rest
        self._cut, self._skips = self._skips, 0
        self._head.clear()
        self._start.clear()


def _length(number: int) -> bytes:
    """Return a packet's length as MQTT writes it."""
    out = bytearray()
    while True:
        number, digit = divmod(number, 128)
        out.append(digit | (128 if number else 0))
        if not number:
            return bytes(out)
