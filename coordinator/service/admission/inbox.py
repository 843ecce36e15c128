"""Queue of arrived messages for the coordinator's loop, bounded whatever devices send.

The link's threads put messages and never wait, because an unserved connection dies. Messages that
are too large, too frequent, or too many from one device are dropped there, before they are queued
or decoded; every transfer survives a loss. Events of the link itself are never dropped, and are
taken first.

Where a broker has no access rules, anybody can write to a device's topics. So bytes that cannot be
a message, and chunks that nobody asked for, are dropped first of all: they use up nothing that the
device may send. Each sender has a queue, and one message is taken from each in turn; all unknown
names share one. So a message waits for at most one of every other sender, and for one stranger's.

| from one device | at most |
|---|---|
| control messages | `max_bytes` each, `limits.CONTROL`, and 64 waiting |
| presence | `limits.PRESENCE` |
| chunks | as many bytes waiting as its credits can ask for |

Public messages, which only coordinators may write, wait at most 256 at a time.

In all, at most 64 MiB of control messages and 256 MiB of chunks wait. Unknown names share one rate
limit too; they are ignored once the largest allowed number of names is known.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

from coordinator.service.admission.limits import (
    CONTROL,
    PRESENCE,
    STRANGERS,
    USELESS,
    Buckets,
    Rate,
)
from edge_sdk.protocol.chunks import MAX_CHUNK_BYTES
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import Topic, TopicKind, parse_topic
from edge_sdk.protocol.messages.transfer import UPLOAD_BYTES
from edge_sdk.protocol.messages.wire import MAX_CONTROL_BYTES, may_be_message
from edge_sdk.transport.link import LinkEvent, Received

MAX_MESSAGE_BYTES = 2**12
"""Largest control message from a device, without a survey; the largest valid one is half this
size."""
MAX_WAITING = 64
"""Most control messages of one device that wait."""
MAX_PUBLIC = 256
"""Most public messages that wait."""
MAX_CONTROLS_BYTES = 2**26
MAX_CHUNKS_BYTES = 2**28
OVERHEAD_BYTES = 512
"""Memory taken by a waiting message besides its payload."""
MAX_TOLD = 1000
"""Most devices whose dropped messages are remembered until `take_dropped`."""

_GARBAGE = (
    "bytes that are no message; if the device did not send them, somebody else writes to its "
    "topics: does the broker have access rules?"
)
_STRANGERS = "?"
"""Queue of all unknown names; no device has this name."""
PUBLIC = "#"
"""Queue of public messages, and their name in counts; no device has it."""


@dataclass(frozen=True, slots=True)
class Letter:
    """An arrived message with its parsed topic."""

    topic: Topic
    payload: bytes
    retained: bool = False
    """True if the broker kept it from before we subscribed."""


class Inbox:
    """A queue of link events. Any thread may call `put` and `wake`; one thread calls the rest."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_devices: int,
        device_bytes: int,
        controls_bytes: int = MAX_CONTROLS_BYTES,
        chunks_bytes: int = MAX_CHUNKS_BYTES,
    ) -> None:
        """`device_bytes` limits the waiting chunks of one device, the last two those of all."""
        self.known: set[str] = set()
        """Names listened to. The reader of the queue sets this and `full`."""
        self.full = False
        """True if no further names will be admitted."""
        self.max_bytes = MAX_MESSAGE_BYTES
        """Largest control message of a device; findings of a survey may be larger than others."""
        self.expects: Callable[[str, bytes], bool] = _all_expected
        """Tells if a device was asked for a chunk; called from the link's threads."""
        self._strangers = Buckets(Rate(STRANGERS.per_s, STRANGERS.burst + 2 * max_devices), 1)
        self._clock = clock
        self._device_bytes = device_bytes
        self._controls_bytes, self._chunks_bytes = controls_bytes, chunks_bytes
        self._rates = {
            TopicKind.UP_CONTROL: Buckets(CONTROL, max_devices),
            TopicKind.PRESENCE: Buckets(PRESENCE, max_devices),
        }
        self._ready = Condition()
        self._woken = False
        self._useless = Buckets(USELESS, max_devices)
        self._events: deque[LinkEvent] = deque()
        self._queues: OrderedDict[str, deque[Letter]] = OrderedDict()
        """Waiting messages by sender, the next sender first. No empty ones."""
        self._waiting: Counter[str] = Counter()
        """Waiting control messages by device; `_bytes` likewise for chunks. No zero entries."""
        self._bytes: Counter[str] = Counter()
        self._total = [0, 0]
        """Waiting bytes of control messages and of chunks."""
        self._muted: dict[str, float] = {}
        """Time until which a device's chunks are dropped."""
        self._dropped: dict[str, str] = {}

    def put(self, event: LinkEvent) -> None:
        """Queue an event or drop it; never waits."""
        if not isinstance(event, Received):
            with self._ready:
                self._events.append(event)
                self._ready.notify()
            return
        try:
            topic = parse_topic(event.topic)
        except MessageError:
            return  # no well-behaved device writes there
        if topic.device is None:
            self._put_public(Letter(topic, event.payload, event.retained))
            return
        device, kind = topic.device, topic.kind
        with self._ready:
            known = device in self.known
            if not known and not self._admits_stranger(kind, event.payload):
                return
            if kind is TopicKind.UP_CHUNK:
                objection = self._objection_to_chunk(device, event.payload)
            else:
                objection = self._objection_to_control(kind, device, event.payload)
            if objection is None:
                self._append(Letter(topic, event.payload), device if known else _STRANGERS)
            elif objection and len(self._dropped) < MAX_TOLD:
                self._dropped.setdefault(device, objection)

    def _put_public(self, letter: Letter) -> None:
        with self._ready:
            if self._waiting[PUBLIC] < MAX_PUBLIC and len(letter.payload) <= MAX_CONTROL_BYTES:
                self._append(letter, PUBLIC)

    def get(self, wait_s: float = 0.0) -> LinkEvent | Letter | None:
        """Take the next event, a message as a `Letter`; None if none arrives within `wait_s`
        seconds."""
        with self._ready:
            if not self._events and not self._queues and wait_s > 0 and not self._woken:
                self._ready.wait(wait_s)
            self._woken = False
            if self._events:
                return self._events.popleft()
            if not self._queues:
                return None
            sender, queue = self._queues.popitem(last=False)
            letter = queue.popleft()
            if queue:
                self._queues[sender] = queue
            self._count(letter, -1)
            return letter

    def wake(self) -> None:
        """Let the reader go on, as if an event had arrived. Any thread may call it."""
        with self._ready:
            self._woken = True
            self._ready.notify()

    def mute(self, device: str, seconds: float) -> None:
        """Drop a device's chunks for this many seconds."""
        with self._ready:
            now = self._clock()
            self._muted = {name: until for name, until in self._muted.items() if until > now}
            self._muted[device] = now + seconds

    def take_dropped(self) -> dict[str, str]:
        """Return devices whose messages were dropped since the last call, with the reasons."""
        if not self._dropped:
            return {}
        with self._ready:
            dropped, self._dropped = self._dropped, {}
            return dropped

    def _admits_stranger(self, kind: TopicKind, payload: bytes) -> bool:
        """True if a message from an unknown name is accepted; chunks never are."""
        if kind is TopicKind.UP_CHUNK or self.full or not may_be_message(kind, payload):
            return False
        return self._strangers.take("", self._clock())

    def _objection_to_control(self, kind: TopicKind, device: str, payload: bytes) -> str | None:
        """Return why a control message is dropped; None: it is not."""
        size = len(payload)
        if size > self.max_bytes:
            return f"a message has {size} bytes; at most {self.max_bytes} are allowed"
        if payload and not may_be_message(kind, payload):
            return _GARBAGE
        if self._waiting[device] >= MAX_WAITING:
            return f"more than {MAX_WAITING} messages waiting"
        if self._total[0] + size > self._controls_bytes:
            return "more messages than the coordinator can handle"
        rate = self._rates.get(kind)
        if rate is not None and not rate.take(device, self._clock(), 1 + size // 1024):
            return f"too many messages on {kind.value}"
        return None

    def _objection_to_chunk(self, device: str, payload: bytes) -> str | None:
        """Return why a chunk is dropped, empty if nobody need be told; None: it is not."""
        size = len(payload)
        if size > UPLOAD_BYTES + 4 + MAX_CHUNK_BYTES:
            return f"a chunk has {size} bytes; at most {MAX_CHUNK_BYTES} are allowed"
        if not self.expects(device, payload):
            return "" if self._useless.take(device, self._clock()) else "too many useless chunks"
        taken = self._bytes[device]
        if taken and taken + size + OVERHEAD_BYTES > self._device_bytes:
            return "more chunks at a time than its credits allow"
        if self._total[1] + size > self._chunks_bytes:
            return "more chunks than the coordinator can handle"
        if self._muted.get(device, 0.0) > self._clock():
            return "too many useless chunks"
        return None

    def _append(self, letter: Letter, sender: str) -> None:
        if sender not in self._queues and self._waiting[sender]:
            sender = _STRANGERS  # its first messages still wait there: none overtakes them
        self._count(letter, 1)
        self._queues.setdefault(sender, deque()).append(letter)
        self._ready.notify()

    def _count(self, letter: Letter, sign: int) -> None:
        device, chunk = letter.topic.device or PUBLIC, letter.topic.kind is TopicKind.UP_CHUNK
        size = len(letter.payload) + OVERHEAD_BYTES
        self._total[chunk] += sign * size
        counter = self._bytes if chunk else self._waiting
        counter[device] += sign * (size if chunk else 1)
        if not counter[device]:
            del counter[device]  # of many names, few have messages waiting


def _all_expected(_device: str, _chunk: bytes) -> bool:
    return True
