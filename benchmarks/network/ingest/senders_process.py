"""Devices that train nothing, in a process of their own: each bids and uploads a movement.

    python -m benchmarks.network.ingest.senders_process SETTINGS

SETTINGS is a JSON file: the broker's settings, the task's name, its plan's file, the devices that
send, and one that only bids, so that the round stays open. A line is printed at each step: `ready`
when all have their assignments, `sent` when all have their receipts. Between the two, it waits for
a line on standard input.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from edge_sdk.device.transfer.sending import Sending
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Assignment, Bid, Movement, Outcome, Receipt, RoundOpen
from edge_sdk.protocol.messages.topics import Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Credit, Presence, TaskNotice
from edge_sdk.protocol.messages.wire import ControlMessage, decode_received, encode_message
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.transport.link import LinkEvent, Received, Writable
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from edge_sdk.transport.uploads import Outgoing

TICK_S = 0.5
STEP = 1e-5
"""Size of the numbers in a movement: far below what the coordinator's bound allows."""


class SendingDevice:
    """One device; its messages arrive in the queue of all."""

    def __init__(
        self, name: str, task: str, broker: BrokerSettings, events: queue.SimpleQueue[Any]
    ) -> None:
        self.name = name
        self.opened: RoundOpen | None = None
        self.assignment: Assignment | None = None
        self.notice: TaskNotice | None = None
        self.outcome: Outcome | None = None
        self._topics = Topics(task)
        self._link = open_link(broker, name=name, deliver=lambda event: events.put((self, event)))
        self._sending = Sending(self._link, self._topics, name)
        for topic in (self._topics.task, self._topics.round, self._topics.down_control(name)):
            self._link.subscribe(topic)
        there = Presence(name=name, session=1, online=True)
        self._link.publish(self._topics.presence(name), encode_message(there), retain=True)

    def close(self) -> None:
        """Leave the broker."""
        self._link.close(flush=False)

    def handle(self, event: LinkEvent) -> None:
        """Process an event of the link."""
        if isinstance(event, Writable) and event.bulk:
            self._sending.flush()
        if isinstance(event, Received) and event.payload:
            self._hear(decode_received(parse_topic(event.topic), event.payload))

    def _hear(self, message: ControlMessage) -> None:
        match message:
            case RoundOpen():
                self.opened = message
                bid = Bid(
                    device=self.name, round=message.round, level=1.0, reason="all", run=message.run
                )
                self._link.publish(self._topics.up_control(self.name), encode_message(bid))
            case TaskNotice():
                self.notice = message
            case Assignment():
                self.assignment = message
            case Credit():
                self._sending.credited(message, time.monotonic())
            case Receipt():
                self.outcome = message.outcome

    def make_upload(self, plan: ModelPlan, payload: bytes) -> Outgoing:
        """Make the upload of a movement that answers the assignment."""
        if self.opened is None or self.notice is None:
            raise RuntimeError(f"{self.name} has no round")
        movement = Movement(
            device=self.name,
            round=self.opened.round,
            plan_hash=plan.hash,
            payload=payload,
            statistics={},
            learning_rate=self.opened.local_rule.learning_rate,
            level=1.0,
            samples=64,
            loss=1.0,
            train_s=1.0,
        )
        return Outgoing(
            encode_movement(movement),
            device=self.name,
            run=self.opened.run,
            round=self.opened.round,
            answers=None,
            chunk_bytes=self.notice.chunk_bytes,
        )

    def tick(self) -> None:
        """Offer again what had no answer for long."""
        now = time.monotonic()
        if self._sending.due_s <= now:
            self._sending.offer_due(now)

    def send(self, upload: Outgoing) -> None:
        """Offer an upload."""
        self._sending.add(upload, time.monotonic())


def main(path: str) -> None:
    """Bid, wait for the word, upload."""
    settings: dict[str, Any] = json.loads(Path(path).read_text())
    plan = decode_plan(Path(settings["plan"]).read_bytes())
    broker, task = BrokerSettings(**settings["broker"]), settings["task"]
    events: queue.SimpleQueue[tuple[SendingDevice, LinkEvent]] = queue.SimpleQueue()
    senders = [SendingDevice(name, task, broker, events) for name in settings["senders"]]
    silent = SendingDevice(settings["silent"], task, broker, events)
    try:
        while not all(each.assignment and each.notice for each in senders):
            _next(events)
        payload = _payload(plan, senders[0])
        uploads = [each.make_upload(plan, payload) for each in senders]
        print("ready", flush=True)
        sys.stdin.readline()
        for device, upload in zip(senders, uploads, strict=True):
            device.send(upload)
        while not all(each.outcome is Outcome.KEPT for each in senders):
            _next(events, senders)
            if bad := [each for each in senders if each.outcome not in (None, Outcome.KEPT)]:
                raise RuntimeError(f"{bad[0].name}: {bad[0].outcome}")
        print("sent", flush=True)
        sys.stdin.readline()
    finally:
        for each in (*senders, silent):
            each.close()


def _next(
    events: queue.SimpleQueue[tuple[SendingDevice, LinkEvent]],
    senders: Sequence[SendingDevice] = (),
) -> None:
    """Process an event, and whatever is due."""
    with suppress(queue.Empty):
        device, event = events.get(timeout=TICK_S)
        device.handle(event)
    for each in senders:
        each.tick()


def _payload(plan: ModelPlan, device: SendingDevice) -> bytes:
    """Return the blocks of a small movement of the assigned groups; the same for all."""
    if device.assignment is None:
        raise RuntimeError("no assignment")
    groups = device.assignment.groups
    draws = stream(0, "ingest", "movement")
    flat = STEP * draws.standard_normal(plan.parameters, dtype=np.float32)
    return encode_blocks(plan, groups, plan.select(flat, groups), Encoding(), draws)


if __name__ == "__main__":
    main(*sys.argv[1:])
