"""A coordinator that does what a test says, over the in-memory broker or MQTT; the device is real.

Everything the coordinator does is done by the test's thread, in `until`, which also steps the
in-memory broker. The device runs in threads, or in a process, of its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Protocol, TypeVar

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.service import DeviceService
from edge_sdk.protocol.chunks import Blob, split_blob
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.epoch import Claim, Epoch
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.movement import decode_movement
from edge_sdk.protocol.messages.round import (
    Assignment,
    Movement,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.topics import TopicKind, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Credit, Offer, Presence, TaskNotice, Want
from edge_sdk.protocol.messages.wire import ControlMessage, decode_received, encode_message
from edge_sdk.protocol.packs.index import encode_index, pack_model
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.transport.link import Deliver, Link, LinkEvent, Received, Will
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from edge_sdk.transport.uploads import Uploads
from tests.memory_broker import BrokeredLink, MemoryBroker
from tests.unit.edge_sdk.train.handmade import CLASSES, INPUTS, Handmade, bundle
from tests.waiting import HANGS_S

TASK, DEVICE = "toy", "pi"
CHUNK_BYTES = 1024
RULE = LocalRule(learning_rate=0.1, momentum=0.5)
T = TypeVar("T")


class LockedLink(BrokeredLink):
    """A link that may be closed by another thread than the one that steps the broker."""

    lock: Lock

    def close(self, *, flush: bool = True) -> None:
        with self.lock:
            super().close(flush=flush)


class Place(Protocol):
    """Where a coordinator and devices meet."""

    def open_peer(self, *, name: str, deliver: Deliver) -> Link:
        """A link whose events are delivered in `until`."""

    def until(self, holds: Callable[[], T | None]) -> T:
        """Let things happen until something holds."""


class MqttStage:
    """A broker that runs elsewhere."""

    def __init__(self, settings: BrokerSettings) -> None:
        self._settings = settings
        self._events: SimpleQueue[tuple[Deliver, LinkEvent]] = SimpleQueue()

    def open_peer(self, *, name: str, deliver: Deliver) -> Link:
        return open_link(
            self._settings, name=name, deliver=lambda event: self._events.put((deliver, event))
        )

    def until(self, holds: Callable[[], T | None]) -> T:
        end = time.monotonic() + HANGS_S
        while time.monotonic() < end:
            if found := holds():
                return found
            try:
                deliver, event = self._events.get(timeout=0.01)
            except Empty:
                continue
            deliver(event)
        raise AssertionError("it never happened")


class Stage:
    """The in-memory broker, and whatever runs on it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.lock = Lock()
        self.device_links: list[BrokeredLink] = []

    def open_link(self, *, name: str, deliver: Deliver, will: Will | None = None) -> BrokeredLink:
        with self.lock:
            link = self.broker.open_link(name=name, deliver=deliver, will=will)
        link.__class__ = LockedLink
        link.lock = self.lock  # type: ignore[attr-defined]
        self.device_links.append(link)
        return link

    def open_peer(self, *, name: str, deliver: Deliver) -> Link:
        return self.broker.open_link(name=name, deliver=deliver)

    def until(self, holds: Callable[[], T | None], idle: Callable[[], None] = lambda: None) -> T:
        """As `Place`; `idle` is called whenever no message is on its way."""
        end = time.monotonic() + HANGS_S
        while time.monotonic() < end:
            if found := holds():
                return found
            with self.lock:
                busy = self.broker.step()
            if not busy:
                idle()
                time.sleep(0.001)
        raise AssertionError("it never happened")


class Coordinator:
    """The other side: says what it is told to, answers offers and wants, and remembers."""

    def __init__(self, stage: Place, seed: int = 5, task: str = TASK, device: str = DEVICE) -> None:
        self.stage = stage
        self.task, self.device = task, device
        self.topics = Topics(task)
        self.heard: list[ControlMessage] = []
        self.movements: list[tuple[Offer, Movement]] = []
        self.chunks: dict[bytes, bytes] = {}
        self.answers_offers = True
        self.retains_chunks = True
        self.refuses = ""
        self.epoch: Epoch | None = None
        self.uploaded_chunks = 0
        self.plan, self.manifest, self.files = bundle(Handmade())
        random = np.random.default_rng(seed)
        self.theta = random.normal(size=self.plan.parameters).astype(np.float32)
        self.run = secrets.token_hex(8)
        self._uploads = Uploads()
        name = "coordinator" if task == TASK else f"coordinator-{task}"
        self._link = stage.open_peer(name=name, deliver=self._deliver)
        self._link.subscribe(self.topics.up_controls)
        self._link.subscribe(self.topics.up_chunks, bulk=True)
        self._link.subscribe(self.topics.presences)

    # -- saying ---------------------------------------------------------------------------------

    def present(self, session: int = 1) -> None:
        self._say(
            self.topics.coordinator,
            Presence(name="coordinator", session=session, online=True),
            retain=True,
        )

    def leave(self, session: int = 1) -> None:
        """Say goodbye, as a will does too."""
        gone = Presence(name="coordinator", session=session, online=False, reason="stopped")
        self._say(self.topics.coordinator, gone, retain=True)

    def claim(self, counter: int) -> None:
        """Take charge with an epoch, which is on all messages from now on."""
        self.epoch = Epoch(counter, "8" * 16)
        self._say(self.topics.epoch, Claim(run=self.run), retain=True)

    def notice(self) -> TaskNotice:
        return TaskNotice(
            task=self.task,
            run=self.run,
            plan=self._publish(self.plan.encoded),
            manifest=self._publish(self.manifest.encoded),
            graphs={name: self._publish(data) for name, data in self.files.items()},
            chunk_bytes=CHUNK_BYTES,
        )

    def announce(self) -> None:
        self._say(self.topics.task, self.notice(), retain=True)

    def announce_model(self, notice: ModelNotice) -> None:
        self._say(self.topics.model("latest"), notice, retain=True)

    def opening(self, round: int, *, steps: int = 3, **more: Any) -> RoundOpen:
        encoded = encode_model(
            self.plan, self.theta, Encoding.parse("fp32"), np.random.default_rng(0)
        )
        index, chunks = pack_model(self.plan, encoded, {}, CHUNK_BYTES)
        self._retain(chunks)
        return RoundOpen(
            round=round,
            plan_hash=self.plan.hash,
            local_rule=RULE,
            steps=steps,
            batch_size=4,
            bid_s=60,
            train_deadline_s=60,
            run=self.run,
            model=self._publish(encode_index(self.plan, index)),
            **more,
        )

    def open(self, round: int, **more: Any) -> None:
        self._say(self.topics.round, self.opening(round, **more), retain=True)

    def assign(self, round: int, groups: tuple[int, ...] = (0, 2)) -> None:
        self.tell(
            Assignment(device=self.device, round=round, groups={"hidden": groups}, run=self.run)
        )

    def receipt(self, round: int, outcome: Outcome = Outcome.COUNTED, reason: str = "") -> None:
        run, device = self.run, self.device
        self.tell(Receipt(device=device, round=round, outcome=outcome, reason=reason, run=run))

    def finish(self, round: int) -> None:
        self._say(self.topics.round, RoundClosed(round=round, run=self.run), retain=True)

    def tell(self, message: ControlMessage) -> None:
        self._say(self.topics.down_control(self.device), message)

    def clear_chunk(self, hash: bytes) -> None:
        """Take a chunk from its topic."""
        self._link.publish(self.topics.chunk(hash), b"", retain=True, bulk=True)

    def close(self) -> None:
        self._link.close()

    def _say(self, topic: str, message: ControlMessage, *, retain: bool = False) -> None:
        self._link.publish(topic, encode_message(message, self.epoch), retain=retain)

    def _publish(self, data: bytes) -> Blob:
        blob, chunks = split_blob(data, CHUNK_BYTES)
        self._retain(chunks)
        return blob

    def _retain(self, chunks: dict[bytes, bytes]) -> None:
        self.chunks |= chunks
        if self.retains_chunks:
            for hash, chunk in chunks.items():
                self._link.publish(self.topics.chunk(hash), chunk, retain=True, bulk=True)

    # -- hearing --------------------------------------------------------------------------------

    def forget(self) -> None:
        self.heard.clear()
        self.movements.clear()

    def all(self, kind: type[T]) -> list[T]:
        return [message for message in self.heard if isinstance(message, kind)]

    def last(self, kind: type[T], holds: Callable[[T], bool] = lambda _: True) -> T | None:
        return next((each for each in reversed(self.all(kind)) if holds(each)), None)

    def _deliver(self, event: LinkEvent) -> None:
        if not isinstance(event, Received):
            return
        topic = parse_topic(event.topic)
        if topic.kind is TopicKind.UP_CHUNK:
            self.uploaded_chunks += 1
            progress = self._uploads.received(self.device, event.payload, 0.0)
            if progress.credit is not None:
                self.tell(progress.credit)
            if progress.upload is not None:
                movement = decode_movement(bytes(progress.upload.data))
                self.movements.append((progress.upload.offer, movement))
            return
        message = decode_received(topic, event.payload)
        self.heard.append(message)
        match message:
            case Offer() if self.refuses:
                self.tell(
                    Credit(
                        device=self.device,
                        upload=message.upload,
                        missing=(),
                        window=0,
                        refused=True,
                        reason=self.refuses,
                    )
                )
            case Offer() if self.answers_offers:
                self.tell(self._uploads.offered(self.device, message, 0.0))
            case Want():
                for hash in message.chunks:
                    if hash in self.chunks:
                        where = self.topics.down_chunk(self.device, hash)
                        self._link.publish(where, self.chunks[hash], bulk=True)


class Running:
    """A device service in a thread."""

    def __init__(self, stage: Stage, config: DeviceConfig, data: ArrayData | None = None) -> None:
        self.stage = stage
        self._leapt_s = 0.0
        self.service = DeviceService(
            config,
            data or make_data(),
            open_link=stage.open_link,
            clock=lambda: time.monotonic() + self._leapt_s,
        )
        self.error: Exception | None = None
        self.waited = False
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except Exception as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> Exception | None:
        """Until it has ended; the error it ended with."""
        self.waited = True
        self.stage.until(lambda: self.ended)
        return self.error

    def hurry(self, coordinator: Coordinator, holds: Callable[[], T | None]) -> T:
        """Until something holds; seconds pass on the device's clock while nothing moves."""

        def leap() -> None:
            self._leapt_s += 5.0
            # Nobody waits for this assignment, but it wakes every thread that waits.
            coordinator.assign(2**20)

        return self.stage.until(holds, leap)

    def stop(self) -> None:
        """Stop it; an error that nobody waited for is a mistake."""
        waited = self.waited
        self.service.stop()
        assert self.wait() is None or waited


def make_data(samples: int = 20, seed: int = 3) -> ArrayData:
    random = np.random.default_rng(seed)
    x: Array = random.normal(size=(samples, INPUTS)).astype(np.float32)
    return ArrayData((x,), random.integers(0, CLASSES, samples))


def make_config(folder: Path, **changes: Any) -> DeviceConfig:
    config = DeviceConfig(task=TASK, name=DEVICE, state_dir=folder, seed=7, weigh=False)
    return replace(config, **changes)
