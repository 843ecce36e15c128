"""paho's client for one connection: its version of MQTT, and the largest packet it takes.

In MQTT 5 the broker is told the largest packet that we take, and keeps larger ones to itself. In
3.1.1 it cannot be told, and not every broker of version 5 obeys: so there is always a `PacketGate`.

paho builds tables of properties for every packet of MQTT 5, formats log lines that nobody reads,
and copies payloads several times. Messages without properties, which is all that are sent to us,
take a shorter way here; any other goes through paho.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edge_sdk.transport.mqtt.gate import PacketGate

NEWEST, OLDEST = MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311
"""Version to try first, and the one that every broker speaks."""

_HEADER_BYTES = 5
_MAX_RECEIVE = 65_535
_AHEAD_BYTES = 2**14
_REFUSED = 128
"""Codes of answers to subscriptions, from which on they are refusals."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message that came, with the names that paho gives them."""

    topic: str
    payload: bytes
    retain: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """The broker's yes to a subscription, as far as anybody asks."""

    is_failure: bool = False


class GatedClient(paho.Client):
    """A client without a session of its own at the broker, behind a gate."""

    def __init__(self, client_id: str, version: MQTTProtocolVersion, max_bytes: int) -> None:
        """`max_bytes` limits the packets that come in."""
        super().__init__(
            CallbackAPIVersion.VERSION2,
            client_id=client_id,
            clean_session=None if version is NEWEST else True,
            protocol=version,
            reconnect_on_failure=False,
        )
        self.gate = PacketGate(max_bytes - _HEADER_BYTES, has_properties=version is NEWEST)
        self._ahead = b""
        """Bytes that came with the ones asked for."""
        self._version = version
        self._max_bytes = max_bytes

    def open(self, host: str, port: int, keepalive_s: int) -> None:
        """Connect the socket and send the first packet. Raises as `connect` of paho does."""
        if self._version is not NEWEST:
            self.connect(host, port, keepalive_s)
            return
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = self._max_bytes
        self.connect(host, port, keepalive_s, clean_start=True, properties=properties)

    @property
    def holds(self) -> bool:
        """True if there are bytes to read that no selector knows of."""
        return bool(self._ahead)

    def _sock_recv(self, bufsize: int) -> bytes:
        # The one place through which paho reads. It takes `OSError` for a lost connection, and
        # `BlockingIOError` for nothing to read yet.
        return self.gate.read(bufsize, self._receive)

    def _receive(self, size: int) -> bytes:
        """Receive; several short packets, or the first part of a long one, at once."""
        if not self._ahead:
            if size >= _AHEAD_BYTES:
                return super()._sock_recv(size)
            self._ahead = super()._sock_recv(_AHEAD_BYTES)
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def _packet_read(self) -> Any:
        """Handle the next packet. Most come whole, or several at once; paho reads the others, a few
        bytes at a time."""
        if not self._in_packet["command"]:
            if not self._ahead:
                try:
                    self._ahead = super()._sock_recv(_AHEAD_BYTES)
                except BlockingIOError:
                    return paho.MQTT_ERR_AGAIN
                except OSError as error:  # told once: a second look would find a mere end
                    super()._easy_log(paho.MQTT_LOG_ERR, "failed to receive: %s", error)
                    return paho.MQTT_ERR_CONN_LOST
                if not self._ahead:
                    return paho.MQTT_ERR_CONN_LOST
            packet = self.gate.whole(self._ahead)
            if packet is not None and packet[0]:
                head, rest, size = packet
                self._ahead = self._ahead[size:]
                came = self._in_packet  # as paho leaves it when it has read a packet
                came["command"], came["packet"] = head, bytearray(rest)
                came["have_remaining"], came["remaining_length"] = 1, len(rest)
        return super()._packet_read()

    def _packet_queue(self, command: int, packet: Any, *more: Any, **named: Any) -> Any:
        # paho sends `packet[sent:]`, which is no copy of a view.
        view: Any = memoryview(packet)
        return super()._packet_queue(command, view, *more, **named)

    def _easy_log(self, level: Any, fmt: Any, *arguments: Any) -> None:
        if level == paho.MQTT_LOG_ERR:
            super()._easy_log(level, fmt, *arguments)

    def _handle_publish(self) -> Any:
        """Hand over a message, and acknowledge it."""
        head, packet = self._in_packet["command"], self._in_packet["packet"]
        quality = (head >> 1) & 3
        topic_end = 2 + int.from_bytes(packet[:2], "big")
        start = topic_end + (2 if quality else 0)
        if self._version is NEWEST:
            start += 1
            plain = len(packet) >= start and packet[start - 1] == 0
        else:
            plain = len(packet) >= start
        if not plain or quality > 1 or self.on_message is None:
            return super()._handle_publish()
        try:
            topic = packet[2:topic_end].decode()
        except UnicodeDecodeError:
            return super()._handle_publish()
        with memoryview(packet) as view:
            message = Arrived(topic, bytes(view[start:]), bool(head & 1))
        with self._in_callback_mutex:  # nothing that is published meanwhile is sent from in here
            self.on_message(self, None, message)  # type: ignore[arg-type]
        if not quality:
            return paho.MQTT_ERR_SUCCESS
        return self._send_puback(int.from_bytes(packet[topic_end : topic_end + 2], "big"))

    def _handle_suback(self) -> None:
        """Hand over the answer to a subscription."""
        packet = self._in_packet["packet"]
        start = 3 if self._version is NEWEST else 2
        plain = len(packet) > start and (self._version is not NEWEST or packet[2] == 0)
        codes = packet[start:]
        if not plain or max(codes) >= _REFUSED or self.on_subscribe is None:
            super()._handle_suback()
            return
        granted: Any = [Granted()] * len(codes)
        with self._in_callback_mutex:
            self.on_subscribe(self, None, int.from_bytes(packet[:2], "big"), granted, None)  # type: ignore[call-arg,arg-type]

    def _handle_unsuback(self) -> Any:
        """Read the answer to an unsubscription only if somebody waits for it."""
        if self.on_unsubscribe is None:
            return paho.MQTT_ERR_SUCCESS
        return super()._handle_unsuback()


def receive_maximum(properties: Properties | None) -> int:
    """Most unacknowledged messages that the broker takes, from the properties of its welcome."""
    return int(getattr(properties, "ReceiveMaximum", _MAX_RECEIVE))
