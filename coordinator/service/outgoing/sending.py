"""Messages waiting for room in the link: a queue of control messages and a queue of chunks."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from edge_sdk.protocol.messages.epoch import Epoch
from edge_sdk.protocol.messages.wire import ControlMessage, encode_message
from edge_sdk.transport.link import Link

MAX_CONTROLS = 2**16
"""Most control messages waiting for the link."""


@dataclass(frozen=True, slots=True)
class _Control:
    topic: str
    payload: bytes
    retain: bool


@dataclass(frozen=True, slots=True)
class _Bulk:
    hash: bytes | None
    """None clears the topic."""
    retain: bool
    asked_by: str
    """Device that asked for the chunk; empty if none did."""


class ChunkSending:
    """Publishes at the pace of the link. `load` returns a chunk's bytes, or None if it is gone.

    Chunks wait as hashes, so a long queue takes little memory. A topic is queued once; a new
    message on it replaces the one that is waiting. While it is shut, everything waits.
    """

    def __init__(
        self, link: Link, load: Callable[[bytes], bytes | None], *, epoch: Epoch | None = None
    ) -> None:
        """`epoch` is stamped on all control messages; None: they carry no stamp."""
        self.shut = False
        self._epoch = epoch
        self._link = link
        self._load = load
        self._controls: deque[_Control] = deque()
        self._bulk: OrderedDict[str, _Bulk] = OrderedDict()
        self._asked: Counter[str] = Counter()
        """Number of waiting chunks, by the device that asked for them."""

    @property
    def waiting(self) -> int:
        """Number of chunks that the link has not accepted yet."""
        return len(self._bulk)

    def say(self, topic: str, message: ControlMessage | None, *, retain: bool = False) -> None:
        """Send a control message; None with `retain` clears the topic.

        Drops messages that are not retained when the queue is full: devices ask again.
        """
        if len(self._controls) > MAX_CONTROLS and not retain:
            return
        payload = b"" if message is None else encode_message(message, self._epoch)
        self._controls.append(_Control(topic, payload, retain))
        self._pump_controls()

    def chunk(
        self, topic: str, hash: bytes | None, *, retain: bool = False, asked_by: str = ""
    ) -> None:
        """Send a chunk when there is room; None clears the topic."""
        if (job := self._bulk.get(topic)) is not None:
            self._done(job)
        self._bulk[topic] = _Bulk(hash, retain, asked_by)
        self._bulk.move_to_end(topic)
        self._asked[asked_by] += 1

    def waiting_for(self, device: str) -> int:
        """Number of chunks waiting because this device asked for them; "" for unrequested ones."""
        return self._asked[device]

    def pump(self) -> None:
        """Send as much as the link accepts."""
        self._pump_controls()
        while self._bulk and not self.shut:
            topic, job = next(iter(self._bulk.items()))
            payload = b"" if job.hash is None else self._load(job.hash)
            if payload is not None and not self._link.publish(
                topic, payload, retain=job.retain, bulk=True
            ):
                return
            del self._bulk[topic]
            self._done(job)

    def _done(self, job: _Bulk) -> None:
        self._asked[job.asked_by] -= 1
        if not self._asked[job.asked_by]:
            del self._asked[job.asked_by]

    def _pump_controls(self) -> None:
        while self._controls and not self.shut:
            control = self._controls[0]
            if not self._link.publish(control.topic, control.payload, retain=control.retain):
                return
            self._controls.popleft()
