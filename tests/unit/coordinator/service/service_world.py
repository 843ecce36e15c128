"""A coordinator and scripted devices that speak the wire, over a broker in memory.

Devices do not train: a device's movement is one number for every value. What they are told is kept
as it came, so that tests can look at it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coordinator.aggregate.rules import ASYNC_RULES, RULES
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig, RoundsState
from coordinator.run.folder import About, Run, TaskFiles, create_run, is_run, read_history
from coordinator.service.aside import Aside
from coordinator.service.courses.parts import Evaluate
from coordinator.service.service import Service, ServiceConfig
from coordinator.service.store import Keeping
from coordinator.task.saved_model import SavedModel
from edge_sdk.protocol.chunks import Blob, join_blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
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
from edge_sdk.protocol.messages.transfer import Credit, Presence, TaskNotice
from edge_sdk.protocol.messages.wire import ControlMessage, decode_message, encode_message
from edge_sdk.protocol.packs.index import decode_index, needed_chunks, unpack_model
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.transport.link import Connected, LinkEvent, Received, Will
from edge_sdk.transport.uploads import Outgoing
from tests.memory_broker import MemoryBroker
from tests.messages import make_movement, make_outgoing
from tests.unit.edge_sdk.train.handmade import Handmade, bundle
from tests.waiting import until

TASK = "tiny"
TOPICS = Topics(TASK)
CHUNK_BYTES = 1024
LEARNING_RATE = 0.1
Kind = TypeVar("Kind")


@cache
def saved_model() -> SavedModel:
    """A small model with a statistic, and graphs that were written by hand."""
    plan, manifest, files = bundle(Handmade(statistic=True))
    random = np.random.default_rng(3)
    weights = {
        tensor.name: np.asarray(random.normal(size=tensor.shape), dtype=np.float32)
        for tensor in plan.tensors
    }
    return SavedModel(plan, weights, {"mean": np.zeros(6, dtype=np.float32)}, manifest, files)


def task_files() -> TaskFiles:
    model = saved_model()
    return TaskFiles(model.plan, model.manifest, model.files)


PLAN = saved_model().plan
COMMON: dict[str, Any] = {
    "plan": PLAN,
    "local_rule": LocalRule(learning_rate=LEARNING_RATE),
    "steps": 1,
    "batch_size": 4,
    "min_devices": 2,
    "seed": 7,
    "bid_s": 10.0,
    "train_deadline_s": 100.0,
}


def rounds_config(**changes: Any) -> RoundsConfig:
    usual: dict[str, Any] = {"rule": RULES["ra-fed"](), "masks": make_masks("coverage")}
    return RoundsConfig(**{**COMMON, **usual, "rounds": 2, "min_participants": 1, **changes})


def fragments_config(**changes: Any) -> FragmentsConfig:
    usual: dict[str, Any] = {"rule": ASYNC_RULES["fed-raa"](), "masks": make_masks("gre-raa")}
    return FragmentsConfig(**{**COMMON, **usual, "updates": 6, **changes})


@dataclass
class Clock:
    now: float = 1000.0
    slow_s: float = 0.0
    """That pass whenever somebody looks."""

    def __call__(self) -> float:
        self.now += self.slow_s
        return self.now


class World:
    """A broker, a run's folder, the coordinator's service, and devices."""

    def __init__(
        self,
        folder: Path,
        machine: RoundsConfig | FragmentsConfig,
        *,
        evaluate: Evaluate | None = None,
        aside: Callable[[], Aside] | None = None,
        **changes: Any,
    ) -> None:
        """`aside` makes what does the work of commits; None: the loop does it. `changes`: of the
        service's settings."""
        self._aside = aside
        self.broker = MemoryBroker()
        self.clock = Clock()
        self.folder = folder
        self.machine = machine
        self.devices: list[ScriptedDevice] = []
        self._evaluate = evaluate
        self._changes = changes
        if not is_run(folder):
            about = About(task=TASK, run="0123456789abcdef", source="t.py:f", batch_size=4)
            create_run(folder, about, saved_model())
        self.start()

    def start(self) -> None:
        """A coordinator, new or again."""
        self.running = True
        config = ServiceConfig(
            machine=self.machine,
            down=Encoding(),
            keeping=Keeping(),
            chunk_bytes=CHUNK_BYTES,
        )
        self.run = Run(self.folder)
        try:
            self.service = Service(
                self.run,
                replace(config, **self._changes),
                open_link=self.broker.open_link,
                evaluate=self._evaluate,
                clock=self.clock,
                wall=self.clock,
                aside=None if self._aside is None else self._aside(),
            )
        except BaseException:
            self.running = False
            self.run.close()
            raise

    def crash(self) -> None:
        """The coordinator is gone, without a goodbye."""
        self._end(self.service.kill)

    def stop(self) -> None:
        """The coordinator ends as it should; it may have ended before."""
        if self.running:
            self._end(self.service.close)

    def _end(self, end: Callable[[], None]) -> None:
        self.running = False
        end()
        self.run.close()
        self.broker.run()

    def restart(self) -> None:
        """A crash, and another coordinator."""
        self.crash()
        self.start()
        self.settle()

    def add(self, name: str, **options: Any) -> ScriptedDevice:
        device = ScriptedDevice(self, name, **options)
        self.devices.append(device)
        return device

    def settle(self) -> None:
        """Until nobody has anything to say any more."""
        for _ in range(500):
            self.broker.run()
            self.service.pump()
            for device in self.devices:
                device.pump()
            if not self.broker.step():
                return
        raise AssertionError("they talk for ever")

    def until(self, condition: Callable[[], object]) -> None:
        """Settle until something is so, which work beside the loop may bring about."""

        def holds() -> object:
            self.settle()
            return condition()

        until(holds)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.settle()

    def publish(self, topic: str, payload: bytes) -> None:
        """As anybody could who may write there."""
        link = self.broker.open_link(name="anybody", deliver=lambda _: None)
        link.publish(topic, payload, retain=True)
        self.settle()
        link.close()

    def leave(self, device: ScriptedDevice) -> None:
        """A device is gone, without a goodbye; its will speaks for it."""
        device.link.kill()
        self.devices.remove(device)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The run's lines."""
        return list(read_history(self.folder))

    @property
    def state(self) -> RoundsState:
        """Of a run in rounds."""
        state = self.service.course.state
        assert isinstance(state, RoundsState)
        return state

    @property
    def present(self) -> set[str]:
        """The devices that the coordinator believes to be there."""
        return set(self.state.present)

    @property
    def chunks(self) -> Mapping[bytes, bytes]:
        """The chunks that the broker holds."""
        prefix = TOPICS.chunk(bytes(16))[:-32]
        return {
            bytes.fromhex(topic.removeprefix(prefix)): payload
            for topic, payload in self.broker.retained.items()
            if topic.startswith(prefix)
        }

    def retained(self, topic: str) -> ControlMessage | None:
        data = self.broker.retained.get(topic)
        return None if data is None else decode_message(data)


class Worlds:
    """Makes worlds for a test, and stops them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[World] = []

    def make(
        self, machine: RoundsConfig | FragmentsConfig, folder: str = "run", **options: Any
    ) -> World:
        self._made.append(World(self._folder / folder, machine, **options))
        return self._made[-1]

    def stop(self) -> None:
        for world in self._made:
            world.stop()


class ScriptedDevice:
    """Answers rounds with `level(round)`; its movement is `value` everywhere.

    An opening that a coordinator repeats, because it was restarted, is answered again.
    """

    def __init__(
        self,
        world: World,
        name: str,
        *,
        value: float = 0.01,
        level: Callable[[int], float | None] = lambda _: 1.0,
        keeps_copy: bool = False,
        sends: bool = True,
        bids: bool = True,
        session: int = 1,
    ) -> None:
        self.world, self.name, self.value, self.level = world, name, value, level
        self.keeps_copy = keeps_copy
        self.sends = sends
        """False: movements are made but not offered."""
        self.bids = bids
        """False: openings are heard but not answered."""
        self.heard: list[ControlMessage] = []
        self.movements: dict[int, Movement] = {}
        self.fetched: dict[int, tuple[Blocks, dict[str, Array]]] = {}
        self.opened: dict[int, RoundOpen] = {}
        self.outgoing: dict[bytes, Outgoing] = {}
        self.notice: TaskNotice | None = None
        self.copy: Movement | None = None
        self._events: list[LinkEvent] = []
        self._session = session
        self.link = world.broker.open_link(
            name=name, deliver=self._events.append, will=Will(TOPICS.presence(name), self.gone())
        )
        for topic in (TOPICS.task, TOPICS.round, TOPICS.down_control(name)):
            self.link.subscribe(topic)

    def gone(self) -> bytes:
        return encode_message(Presence(name=self.name, session=self._session, online=False))

    def tell(self, message: ControlMessage) -> None:
        self.link.publish(TOPICS.up_control(self.name), encode_message(message))

    def pump(self) -> None:
        events, self._events[:] = list(self._events), []
        for event in events:
            if isinstance(event, Connected):
                here = Presence(name=self.name, session=self._session, online=True)
                self.link.publish(TOPICS.presence(self.name), encode_message(here), retain=True)
                for outgoing in self.outgoing.values():
                    self.tell(outgoing.make_offer(0.0))
            elif isinstance(event, Received) and event.payload:
                self._receive(decode_message(event.payload))

    def _receive(self, message: ControlMessage) -> None:
        self.heard.append(message)
        match message:
            case TaskNotice():
                self.notice = message
            case RoundOpen() if message.round not in self.movements and not message.by_invitation:
                again = message.round in self.opened
                self.opened[message.round] = message
                if self.bids and not (again and message.round < max(self.opened)):
                    self.bid(message)
            case Assignment() if message.round not in self.movements:
                self._train(self.opened[message.round], message)
            case Credit() if message.upload in self.outgoing:
                for chunk in self.outgoing[message.upload].credited(message, 0.0):
                    self.link.publish(TOPICS.up_chunk(self.name), chunk, bulk=True)
            case Receipt():
                self.outgoing = {
                    name: each
                    for name, each in self.outgoing.items()
                    if message.round not in (each.offer.answers, each.offer.round)
                }
            case _:
                pass

    def bid(self, opened: RoundOpen) -> None:
        """Answer an opening."""
        level = self.level(opened.round)
        age = None if self.copy is None else opened.round - self.copy.round
        replays = level is None and age is not None and age <= opened.replay_within
        bid = Bid(
            device=self.name,
            round=opened.round,
            level=level,
            reason="as scripted",
            samples=10,
            replays=replays,
            run=opened.run,
        )
        self.tell(bid)
        if replays and self.copy is not None:
            self.offer(self.copy, answers=opened.round)

    def read_model(
        self, opened: RoundOpen, groups: Mapping[str, tuple[int, ...]]
    ) -> tuple[Blocks, dict[str, Array]]:
        """The submodel, out of the chunks that the broker holds."""
        return self._unpack(opened.model, groups)

    def read_control(self, opened: RoundOpen, groups: Mapping[str, tuple[int, ...]]) -> Blocks:
        """The global variate of a submodel, likewise."""
        return self._unpack(opened.control, groups)[0]

    def _unpack(
        self, blob: Blob | None, groups: Mapping[str, tuple[int, ...]]
    ) -> tuple[Blocks, dict[str, Array]]:
        assert self.notice is not None
        assert blob is not None
        chunks = self.world.chunks
        plan = decode_plan(join_blob(self.notice.plan, chunks))
        index = decode_index(plan, join_blob(blob, chunks))
        assert set(needed_chunks(plan, index, groups)) <= chunks.keys()
        return unpack_model(plan, index, groups, chunks)

    def _train(self, opened: RoundOpen, assignment: Assignment) -> None:
        groups = assignment.groups
        self.fetched[opened.round] = self.read_model(opened, groups)
        movement = self.make_movement(opened.round, groups)
        self.movements[opened.round] = movement
        self.copy = movement if self.keeps_copy else None
        if self.sends:
            self.offer(movement)

    def make_movement(self, round: int, groups: Mapping[str, tuple[int, ...]]) -> Movement:
        return make_movement(
            PLAN,
            groups,
            self.value,
            statistic=self.value,
            encoding=self.world.machine.up,
            device=self.name,
            round=round,
            level=self.level(round) or 1.0,
            samples=10,
            keeps_copy=self.keeps_copy,
            learning_rate=self.learning_rate(round),
        )

    def learning_rate(self, round: int) -> float:
        """That of a round, as it was opened."""
        opened = self.opened.get(round)
        return LEARNING_RATE if opened is None else opened.local_rule.learning_rate

    def offer(self, movement: Movement, *, answers: int | None = None, run: str = "") -> Outgoing:
        return self.offer_bytes(encode_movement(movement), movement.round, answers=answers, run=run)

    def send(self, round: int, *, answers: int | None = None, run: str = "") -> Outgoing:
        """Offer the movement of a round, and wait for what becomes of it."""
        outgoing = self.offer(self.movements[round], answers=answers, run=run)
        self.world.settle()
        return outgoing

    def offer_bytes(
        self, data: bytes, round: int, *, answers: int | None = None, run: str = ""
    ) -> Outgoing:
        run = run or self.world.run.about.run
        outgoing = make_outgoing(data, device=self.name, run=run, round=round, answers=answers)
        self.outgoing[outgoing.offer.upload] = outgoing
        self.tell(outgoing.make_offer(0.0))
        return outgoing

    def all(self, kind: type[Kind]) -> list[Kind]:
        """What it was told of this kind, in the order it came."""
        return [message for message in self.heard if isinstance(message, kind)]

    @property
    def receipts(self) -> list[tuple[int, str]]:
        """(round, outcome) in the order they came."""
        return [(receipt.round, receipt.outcome.value) for receipt in self.all(Receipt)]

    @property
    def verdicts(self) -> list[tuple[int, str]]:
        """As `receipts`, without those that say *kept*."""
        return [each for each in self.receipts if each[1] != "kept"]

    @property
    def last_round(self) -> RoundOpen | RoundClosed:
        found = [each for each in self.heard if isinstance(each, (RoundOpen, RoundClosed))]
        return found[-1]


def blob_hashes(*blobs: Blob) -> set[bytes]:
    return {hash for blob in blobs for hash in blob.chunks}
