"""A broker and devices in memory, as plain data: what they do depends on what they heard alone.

The coordinator's link keeps what is published until the next turn (`Wire.pass_on`), so that a
process that ends can have passed its messages on, or not. Devices do not train. A movement's values
follow from the device, the round, and the submodel that the device reads from the broker's chunks,
so a wrong model makes a wrong movement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_sdk.protocol.chunks import join_blob
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Credit, Presence
from edge_sdk.protocol.messages.wire import ControlMessage, decode_message, encode_message
from edge_sdk.protocol.packs.index import decode_index, needed_chunks, unpack_model
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.filters import matches
from edge_sdk.transport.link import Connected, Deliver, Received, Will
from edge_sdk.transport.outbox import Publication
from edge_sdk.transport.uploads import Outgoing

TASK = "tiny"
TOPICS = Topics(TASK)
RUN = "0123456789abcdef"
CHUNK_BYTES = 1024
LEARNING_RATE = 0.1
SAMPLES = 10

KEPT = "kept"
"""The outcome of a movement whose verdict is still to come."""

Level = Callable[[int], float | None]
"""The level that a device offers in a round; None: it skips."""


@dataclass(slots=True)
class Wire:
    """The broker. `note` is told of every message that the coordinator is about to publish."""

    note: Callable[[str], object]
    retained: dict[str, bytes] = field(default_factory=dict)
    devices: list[ScriptedDevice] = field(default_factory=list)
    waiting: list[Publication] = field(default_factory=list)
    """Published by the coordinator and not passed on yet."""
    link: CoordinatorLink | None = None

    def open_link(
        self,
        *,
        name: str,  # noqa: ARG002  there is one link
        deliver: Deliver,
        will: Will | None = None,
    ) -> CoordinatorLink:
        """Open the coordinator's link."""
        self.link = CoordinatorLink(self, deliver, will)
        deliver(Connected(first=True))
        return self.link

    def pass_on(self) -> bool:
        """Let everybody hear what the coordinator published; False: that was nothing."""
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.accept(message)
        return bool(waiting)

    def accept(self, message: Publication) -> None:
        """Take a message in, and give it to those whom it concerns."""
        if message.retain and message.payload:
            self.retained[message.topic] = message.payload
        elif message.retain:
            self.retained.pop(message.topic, None)
        for device in self.devices:
            device.hear(message.topic, message.payload)
        if self.link is not None:
            self.link.hear(message.topic, message.payload, retained=False)

    def end_link(self, *, unsent: bool) -> None:
        """End the coordinator's process: its last words go out, or are lost; its will is read."""
        link, self.link = self.link, None
        if unsent:
            self.waiting.clear()
        self.pass_on()
        if link is not None and link.will is not None:
            will = link.will
            self.accept(Publication(will.topic, will.payload, will.retain))

    def chunks(self) -> Mapping[bytes, bytes]:
        """Return the chunks of models and task that the broker holds."""
        prefix = TOPICS.chunk(bytes(16))[:-32]
        return {
            bytes.fromhex(topic.removeprefix(prefix)): payload
            for topic, payload in self.retained.items()
            if topic.startswith(prefix)
        }


class CoordinatorLink:
    """The coordinator's `Link`."""

    def __init__(self, wire: Wire, deliver: Deliver, will: Will | None) -> None:
        self.will = will
        self._wire = wire
        self._deliver = deliver
        self._filters: list[str] = []

    def hear(self, topic: str, payload: bytes, *, retained: bool) -> None:
        """Deliver a message if it is subscribed to."""
        if any(matches(topic, each) for each in self._filters):
            self._deliver(Received(topic, payload, retained))

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        """See `Link.publish`."""
        if self._wire.link is not self:
            return False
        kind = "chunk" if bulk or not payload else type(decode_message(payload)).__name__
        self._wire.note(f"{kind} to {_named(topic)}")
        self._wire.waiting.append(Publication(topic, bytes(payload), retain))
        return True

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:  # noqa: ARG002
        """See `Link.subscribe`."""
        self._filters.append(topic_filter)
        for topic, payload in list(self._wire.retained.items()):
            if matches(topic, topic_filter):
                self._deliver(Received(topic, payload, True))

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        """See `Link.unsubscribe`."""

    def acknowledged(self, *, bulk: bool = False) -> bool:  # noqa: ARG002
        """See `Link.acknowledged`."""
        return not self._wire.waiting

    def silence_s(self, *, bulk: bool = False) -> float:  # noqa: ARG002
        """See `Link.silence_s`."""
        return math.inf

    def reconnect(self, will: Will | None = None) -> None:
        """See `Link.reconnect`."""

    def close(self, *, flush: bool = True) -> None:  # noqa: ARG002  nothing waits
        """See `Link.close`."""
        self._wire.pass_on()
        if self._wire.link is self:
            self._wire.link = None

    def kill(self) -> None:
        """See `Link.kill`."""
        if self._wire.link is self:
            self._wire.end_link(unsent=True)


def _named(topic: str) -> str:
    """Return a topic without a chunk's hash, which the model decides."""
    head, _, tail = topic.rpartition("/")
    return f"{head}/…" if len(tail) == 32 else topic


@dataclass(slots=True, eq=False)
class ScriptedDevice:
    """A device that keeps its movement until its receipt, as devices do.

    It offers what it keeps again when the coordinator was restarted and when a round opens, and
    does not bid while it has something to offer: who arrives first is then the same, whatever was
    interrupted. When the coordinator was restarted, it answers the newest opening again.
    """

    wire: Wire
    plan: ModelPlan
    name: str
    value: float
    level: Level
    up: Encoding = field(default_factory=Encoding)
    chunk_bytes: int = CHUNK_BYTES
    withholds: Callable[[int], bool] = lambda _: False
    """True: it sends the movement of this round in the next one only."""
    mute: Callable[[int], bool] = lambda _: False
    """True: it never sends the movement of this round."""
    receipts: dict[int, list[str]] = field(default_factory=dict)
    """Outcomes that it was told, by round, in the order they came."""
    complaints: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """Reasons for which the coordinator asked it to wait."""
    _offered: dict[int, bytes] = field(default_factory=dict)
    """Movements without a receipt, by round."""
    _withheld: dict[int, bytes] = field(default_factory=dict)
    _opened: dict[int, RoundOpen] = field(default_factory=dict)
    _assigned: set[int] = field(default_factory=set)
    _unanswered: RoundOpen | None = None

    def join(self) -> None:
        """Say that it is there, and hear what is retained."""
        self._publish(TOPICS.presence(self.name), Presence(name=self.name, session=1, online=True))
        for topic, payload in list(self.wire.retained.items()):
            self.hear(topic, payload)

    def hear(self, topic: str, payload: bytes) -> None:
        """Act on a message, if it is for this device."""
        mine = (TOPICS.round, TOPICS.coordinator, TOPICS.down_control(self.name))
        if topic in mine and payload:
            self._receive(decode_message(payload))

    def offer_all(self) -> None:
        """Offer everything that has no receipt."""
        for round in sorted(self._offered):
            self._tell(self._outgoing(round).offer)

    @property
    def assigned(self) -> bool:
        """True if a bid of it was answered with an assignment."""
        return bool(self._assigned)

    @property
    def waiting(self) -> bool:
        """True if it has something without a receipt to offer."""
        return bool(self._offered)

    def _receive(self, message: ControlMessage) -> None:
        match message:
            case Presence(online=True):
                self.offer_all()
                self._answer_again()
            case RoundClosed():
                self._release(message.round + 1)
                self.offer_all()
            case RoundOpen() if message.round not in self._opened and not message.by_invitation:
                self._opened[message.round] = message
                self._release(message.round)
                self.offer_all()
                self._unanswered = message
                self._answer()
            case Assignment() if message.round in self._opened.keys() - self._assigned:
                self._assigned.add(message.round)
                self._train(self._opened[message.round], message)
            case Credit():
                self._send(message)
            case Receipt():
                self.receipts.setdefault(message.round, []).append(message.outcome.value)
                if message.outcome.value != KEPT:
                    self._offered.pop(message.round, None)
                    self._answer()
            case _:
                if hasattr(message, "reason"):
                    self.complaints.append(str(message.reason))

    def _release(self, round: int) -> None:
        """Withhold no longer what was made in earlier rounds."""
        for earlier in [each for each in self._withheld if each < round]:
            self._offered[earlier] = self._withheld.pop(earlier)

    def _answer(self) -> None:
        """Answer the newest opening, once nothing is left to offer."""
        opening = self._unanswered
        if opening is None or self._offered:
            return
        self._unanswered = None
        level = self.level(opening.round)
        bid = Bid(
            device=self.name,
            round=opening.round,
            level=level,
            reason="as scripted",
            samples=SAMPLES,
            run=opening.run,
        )
        self._tell(bid)

    def _answer_again(self) -> None:
        """Answer the newest opening once more, unless it has work for it."""
        newest = max(self._opened, default=0)
        if newest and newest not in self._assigned:
            self._unanswered = self._opened[newest]
            self._answer()

    def _train(self, opening: RoundOpen, assignment: Assignment) -> None:
        if self.mute(opening.round):
            return
        data = encode_movement(self._movement(opening, assignment))
        if self.withholds(opening.round):
            self._withheld[opening.round] = data
            return
        self._offered[opening.round] = data
        self._tell(self._outgoing(opening.round).offer)

    def _movement(self, opening: RoundOpen, assignment: Assignment) -> Movement:
        plan, groups = self.plan, assignment.groups
        if opening.model is None:
            raise MessageError(f"round {opening.round} names no model")
        chunks = self.wire.chunks()
        index = decode_index(plan, join_blob(opening.model, chunks))
        if missing := set(needed_chunks(plan, index, groups)) - chunks.keys():
            raise MessageError(f"round {opening.round}: {len(missing)} chunks are not retained")
        blocks, _ = unpack_model(plan, index, groups, chunks)
        values = np.float32(0.01) * blocks.values + np.float32(self.value / opening.round)
        moved = Blocks(blocks.ids, values.astype(np.float32))
        statistics = {
            buffer.name: np.full(buffer.shape, self.value, buffer.dtype)
            for buffer in plan.buffers
            if buffer.statistic
        }
        return Movement(
            device=self.name,
            round=opening.round,
            plan_hash=plan.hash,
            payload=encode_blocks(plan, groups, moved, self.up, stream(0)),
            statistics=plan.cut_buffers(statistics, groups),
            learning_rate=opening.local_rule.learning_rate,
            level=self.level(opening.round) or 1.0,
            samples=SAMPLES,
            loss=1.0,
            train_s=1.0,
        )

    def _outgoing(self, round: int) -> Outgoing:
        return Outgoing(
            self._offered[round],
            device=self.name,
            run=RUN,
            round=round,
            answers=None,
            chunk_bytes=self.chunk_bytes,
        )

    def _send(self, credit: Credit) -> None:
        for round in list(self._offered):
            outgoing = self._outgoing(round)
            if outgoing.offer.upload != credit.upload:
                continue
            if not credit.window and credit.reason:
                self.waits.append(credit.reason)
            for chunk in outgoing.credited(credit, 0.0):
                self.wire.accept(Publication(TOPICS.up_chunk(self.name), chunk, False))

    def _tell(self, message: ControlMessage) -> None:
        self._publish(TOPICS.up_control(self.name), message, retain=False)

    def _publish(self, topic: str, message: ControlMessage, *, retain: bool = True) -> None:
        self.wire.accept(Publication(topic, encode_message(message), retain))


def outcomes(devices: list[ScriptedDevice]) -> dict[str, dict[int, str]]:
    """Return the last word on every movement, by device and round."""
    return {
        device.name: {round: told[-1] for round, told in sorted(device.receipts.items())}
        for device in devices
    }
