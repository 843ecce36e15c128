"""Arrived messages that wait for the coordinator's loop: bounded, whatever anybody sends.

The link's threads put, and never wait: a connection that is not served dies. What is too large, too
often, or too much of one device at a time is dropped there, before it is queued or decoded; every
transfer bears a loss. What the link itself has to say is never dropped.

| of one device | at most |
|---|---|
| control messages | 4 KiB each, `limits.CONTROL`, and 64 waiting |
| presence | `limits.PRESENCE` |
| chunks | as many bytes waiting as its credits can ask for |

Together, 64 MiB of control messages and 256 MiB of chunks wait. Names that are not known share what
there is for strangers; they are not listened to when as many are known as may be.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

from coordinator.service.admission.limits import CONTROL, PRESENCE, STRANGERS, Buckets, Rate
from edge_sdk.protocol.chunks import MAX_CHUNK_BYTES
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import Topic, TopicKind, parse_topic
from edge_sdk.protocol.messages.transfer import UPLOAD_BYTES
from edge_sdk.transport.link import LinkEvent, Received

MAX_MESSAGE_BYTES = 2**12
"""Of a control message of a device: the largest has half as many."""
MAX_WAITING = 64
"""Control messages of one device."""
MAX_CONTROLS_BYTES = 2**26
MAX_CHUNKS_BYTES = 2**28
OVERHEAD_BYTES = 512
"""Size of a waiting message besides its payload."""
MAX_TOLD = 1000
"""Devices of which it is remembered, until somebody asks, that something was dropped."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that arrived, its topic taken apart."""

    topic: Topic
    payload: bytes


class Inbox:
    """A queue of link events. `put` from any thread, the rest from one."""

    def __init__(self, *, clock: Callable[[], float], max_devices: int, device_bytes: int) -> None:
        """`device_bytes`: chunks of one device that may wait."""
        self.known: set[str] = set()
        """Names that are listened to. This and `full` are set by whoever reads the queue."""
        self.full = False
        """True if no other names will be admitted."""
        self._strangers = Buckets(Rate(STRANGERS.per_s, STRANGERS.burst + 2 * max_devices), 1)
        self._clock = clock
        self._device_bytes = device_bytes
        self._rates = {
            TopicKind.UP_CONTROL: Buckets(CONTROL, max_devices),
            TopicKind.PRESENCE: Buckets(PRESENCE, max_devices),
        }
        self._ready = Condition()
        self._queue: deque[LinkEvent | Letter] = deque()
        self._waiting: Counter[str] = Counter()
        """Control messages by device; without those that have none. `_bytes` likewise: chunks."""
        self._bytes: Counter[str] = Counter()
        self._total = [0, 0]
        """Bytes of control messages, and of chunks."""
        self._muted: dict[str, float] = {}
        """Until when chunks of a device are dropped."""
        self._dropped: dict[str, str] = {}

    def put(self, event: LinkEvent) -> None:
        """Queue an event, or drop it; never waits."""
        if not isinstance(event, Received):
            with self._ready:
                self._queue.append(event)
                self._ready.notify()
            return
        try:
            topic = parse_topic(event.topic)
        except MessageError:
            return  # nobody who keeps to the rules writes there
        device, kind = topic.device or "", topic.kind
        with self._ready:
            if device not in self.known and not self._admits_stranger(kind):
                return
            if kind is TopicKind.UP_CHUNK:
                objection = self._objection_to_chunk(device, len(event.payload))
            else:
                objection = self._objection_to_control(kind, device, len(event.payload))
            if objection is None:
                letter = Letter(topic, event.payload)
                self._count(letter, 1)
                self._queue.append(letter)
                self._ready.notify()
            elif len(self._dropped) < MAX_TOLD:
                self._dropped.setdefault(device, objection)

    def get(self, wait_s: float = 0.0) -> LinkEvent | Letter | None:
        """The oldest event, a message as a `Letter`; None: there is none, also after so many
        seconds."""
        with self._ready:
            if not self._queue and wait_s > 0:
                self._ready.wait(wait_s)
            if not self._queue:
                return None
            event = self._queue.popleft()
            if isinstance(event, Letter):
                self._count(event, -1)
            return event

    def mute(self, device: str, seconds: float) -> None:
        """Look at no chunks of a device for so long."""
        with self._ready:
            now = self._clock()
            self._muted = {name: until for name, until in self._muted.items() if until > now}
            self._muted[device] = now + seconds

    def take_dropped(self) -> dict[str, str]:
        """The devices of which something was dropped since this was last asked, and why."""
        if not self._dropped:
            return {}
        with self._ready:
            dropped, self._dropped = self._dropped, {}
            return dropped

    def _admits_stranger(self, kind: TopicKind) -> bool:
        """True if a message of an unknown name is accepted. Nobody waits for chunks."""
        if kind is TopicKind.UP_CHUNK:
            return False
        return not self.full and self._strangers.take("", self._clock())

    def _objection_to_control(self, kind: TopicKind, device: str, size: int) -> str | None:
        if size > MAX_MESSAGE_BYTES:
            return f"a message of {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed"
        if self._waiting[device] >= MAX_WAITING:
            return f"more than {MAX_WAITING} messages at a time"
        if self._total[0] + size > MAX_CONTROLS_BYTES:
            return "more messages than the coordinator can deal with"
        rate = self._rates.get(kind)
        if rate is not None and not rate.take(device, self._clock(), 1 + size // 1024):
            return f"too many messages on {kind.value}"
        return None

    def _objection_to_chunk(self, device: str, size: int) -> str | None:
        if size > UPLOAD_BYTES + 4 + MAX_CHUNK_BYTES:
            return f"a chunk of {size} bytes; at most {MAX_CHUNK_BYTES} are allowed"
        taken = self._bytes[device]
        if taken and taken + size + OVERHEAD_BYTES > self._device_bytes:
            return "more chunks at a time than were asked for"
        if self._total[1] + size > MAX_CHUNKS_BYTES:
            return "more chunks than the coordinator can deal with"
        if self._muted.get(device, 0.0) > self._clock():
            return "too many chunks that nobody asked for"
        return None

    def _count(self, letter: Letter, sign: int) -> None:
        device, chunk = letter.topic.device or "", letter.topic.kind is TopicKind.UP_CHUNK
        size = len(letter.payload) + OVERHEAD_BYTES
        self._total[chunk] += sign * size
        counter = self._bytes if chunk else self._waiting
        counter[device] += sign * (size if chunk else 1)
        if not counter[device]:
            del counter[device]  # names are many, those that wait are few
