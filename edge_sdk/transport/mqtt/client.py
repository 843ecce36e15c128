"""paho's client for one connection: its version of MQTT, and the largest packet it takes.

In MQTT 5 the broker is told the largest packet that we take, and keeps larger ones to itself. In
3.1.1 it cannot be told, and not every broker of version 5 obeys: so there is always a `PacketGate`.
"""

from __future__ import annotations

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edge_sdk.transport.mqtt.gate import PacketGate

NEWEST, OLDEST = MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311
"""Version to try first, and the one that every broker speaks."""

_HEADER_BYTES = 5
_MAX_RECEIVE = 65_535


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

    def _sock_recv(self, bufsize: int) -> bytes:
        # The one place through which paho reads. It takes `OSError` for a lost connection, and
        # `BlockingIOError` for nothing to read yet.
        return self.gate.read(bufsize, super()._sock_recv)


def receive_maximum(properties: Properties | None) -> int:
    """Most unacknowledged messages that the broker takes, from the properties of its welcome."""
    return int(getattr(properties, "ReceiveMaximum", _MAX_RECEIVE))
