"""Messages far over the limit, through a broker that allows them: they take no memory, the
connection lives on, and everything else arrives."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_sdk.protocol.messages.wire import MAX_CONTROL_BYTES
from edge_sdk.transport.link import Connected, Received
from edge_sdk.transport.mqtt import connection
from edge_sdk.transport.mqtt.client import OLDEST
from edge_sdk.transport.settings import BrokerSettings
from tests.contract.transport.test_mosquitto import mosquitto, peer
from tests.waiting import HANGS_S

TOO_LARGE_BYTES = 2 * MAX_CONTROL_BYTES
LARGE_BYTES = 64 << 20
GROWTH_MB = 40.0

LISTENER = """
import queue, sys
from pathlib import Path
from edge_sdk.protocol.messages.wire import MAX_CONTROL_BYTES
from edge_sdk.transport.link import Connected, Received
from edge_sdk.transport.mqtt import connection
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings

def peak_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

if sys.argv[2] == "3.1.1":
    connection.NEWEST = connection.OLDEST
events = queue.Queue()
link = open_link(BrokerSettings(port=int(sys.argv[1])), name="listener", deliver=events.put)
link.subscribe("control/#")
link.subscribe("bulk/#", bulk=True)
while not isinstance(events.get(), Connected):
    pass
before = peak_kb()
print("ready", flush=True)
heard = []
while len(heard) < 2:
    event = events.get()
    assert not isinstance(event, Connected), "it had to connect again"
    if isinstance(event, Received):
        heard.append(event)
print((peak_kb() - before) / 1024, sorted(event.topic for event in heard), flush=True)
link.close()
"""


class Sender:
    """A client of MQTT 3.1.1 that sends messages of any size, without copies of them."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._send(0x10, b"\x00\x04MQTT\x04\x02\x00\x00\x00\x06sender")
        assert self._socket.recv(4) == b"\x20\x02\x00\x00"

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        name = topic.encode()
        head = len(name).to_bytes(2, "big") + name + b"\x00\x01"
        self._send(0x32 | retain, head, payload)
        assert self._socket.recv(4) == b"\x40\x02\x00\x01"

    def _send(self, first: int, head: bytes, payload: bytes = b"") -> None:
        length, digits = len(head) + len(payload), b""
        while length or not digits:
            length, digit = divmod(length, 128)
            digits += bytes([digit | (128 if length else 0)])
        self._socket.sendall(bytes([first]) + digits + head)
        self._socket.sendall(payload)


@contextmanager
def sending(port: int) -> Iterator[Sender]:
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as connected:
        yield Sender(connected)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_large_messages_take_no_memory(tmp_path: Path, version: str) -> None:
    with (
        mosquitto(tmp_path, "allow_anonymous true", "max_queued_bytes 0") as port,
        sending(port) as sender,
        subprocess.Popen(
            [sys.executable, "-c", LISTENER, str(port), version], stdout=subprocess.PIPE, text=True
        ) as listener,
    ):
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "ready\n"
            for topic in ("control/large", "bulk/large", "control/large", "bulk/large"):
                sender.publish(topic, bytes(LARGE_BYTES))
            sender.publish("control/small", b"x")
            sender.publish("bulk/small", b"x")
            grown_mb, _, topics = listener.stdout.readline().partition(" ")
        finally:
            listener.kill()
    assert topics == "['bulk/small', 'control/small']\n"
    assert float(grown_mb) < GROWTH_MB


def test_large_retained_message_does_not_end_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "NEWEST", OLDEST)
    with mosquitto(tmp_path, "allow_anonymous true") as port:
        with sending(port) as sender:
            for number in range(30):  # more than a broker sends without an acknowledgement
                sender.publish(f"t/{number}/large", bytes(TOO_LARGE_BYTES), retain=True)
            sender.publish("t/small", b"x", retain=True)
        with peer(BrokerSettings(port=port)) as one:
            one.link.subscribe("t/#")
            one.until(lambda event: event == Received("t/small", b"x", True))
            one.link.publish("t/later", b"y")
            one.until(lambda event: event == Received("t/later", b"y", False))
            heard = [event.topic for event in one.events if isinstance(event, Received)]
            assert heard == ["t/small", "t/later"]
            assert sum(isinstance(event, Connected) for event in one.events) == 1
    (told,) = [record for record in caplog.records if "over the limit" in record.getMessage()]
    assert "t/0/large" in told.getMessage()
