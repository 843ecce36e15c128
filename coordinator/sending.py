"""What waits for room in the link: control messages in order, chunks in order."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.protocol.wire import ControlMessage, encode_message
from edge_sdk.transport.link import Link


@dataclass(frozen=True, slots=True)
class _Control:
    topic: str
    payload: bytes
    retain: bool


@dataclass(frozen=True, slots=True)
class _Bulk:
    hash: bytes | None
    """None: the topic is cleared."""
    retain: bool


class Sending:
    """Publishes as the link takes it. `load` gives a chunk's bytes, None when it is gone.

    Chunks wait as hashes: what is queued costs no memory. A topic waits once; saying something
    else on it replaces what waited.
    """

    def __init__(self, link: Link, load: Callable[[bytes], bytes | None]) -> None:
        self._link = link
        self._load = load
        self._controls: deque[_Control] = deque()
        self._bulk: OrderedDict[str, _Bulk] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Chunks that the link has not taken yet."""
        return len(self._bulk)

    def say(self, topic: str, message: ControlMessage | None, *, retain: bool = False) -> None:
        """Send a control message; None, retained, clears the topic."""
        payload = b"" if message is None else encode_message(message)
        self._controls.append(_Control(topic, payload, retain))
        self._pump_controls()

    def chunk(self, topic: str, hash: bytes | None, *, retain: bool = False) -> None:
        """Send a chunk when there is room; None clears the topic."""
        self._bulk[topic] = _Bulk(hash, retain)
        self._bulk.move_to_end(topic)

    def pump(self) -> None:
        """Send what the link takes."""
        self._pump_controls()
        while self._bulk:
            topic, job = next(iter(self._bulk.items()))
            payload = b"" if job.hash is None else self._load(job.hash)
            if payload is not None and not self._link.publish(
                topic, payload, retain=job.retain, bulk=True
            ):
                return
            del self._bulk[topic]

    def _pump_controls(self) -> None:
        while self._controls:
            control = self._controls[0]
            if not self._link.publish(control.topic, control.payload, retain=control.retain):
                return
            self._controls.popleft()
