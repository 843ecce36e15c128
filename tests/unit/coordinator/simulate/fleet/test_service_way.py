"""The same small fleet in virtual time and over the real service: the same decisions, in order.

One way is `FleetSimulation`. The other is the coordinator's service with its disk, its chunks and
its uploads over a broker in memory, and devices' own apps: emulated boards whose messages are held
back until their time has come, on a clock that the test moves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.engine import Sent, Told
from coordinator.simulate.fleet.cohorts import CohortTraining
from coordinator.simulate.fleet.device import FleetDevice
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from coordinator.simulate.fleet.shared import deal_out
from coordinator.simulate.fleet.simulation import FleetSimulation
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.decide.emulation.fleet import FleetMember
from edge_sdk.decide.gates import Limits
from edge_sdk.decide.observer import Observer
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.stores.movements import MemoryMovements
from edge_sdk.machine.board import find_board
from edge_sdk.protocol.encoding.codec import encoded_size
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.wire import ControlMessage
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.specs import MacTerm
from edge_sdk.train.onnx import OnnxBackend
from tests.unit.coordinator.service.service_world import (
    PLAN,
    ScriptedDevice,
    World,
    Worlds,
    fragments_config,
    rounds_config,
    saved_model,
)

WORK = 1e7
"""A step of the tiny model takes seconds."""
TIMED = replace(PLAN, macs=(MacTerm(50, (0,)), MacTerm(30, ())))
"""The plan, with the costs of a step."""
KINDS: dict[str, dict[str, Any]] = {
    "agx": {"board": "jetson_agx_orin", "latency_s": 0.013, "policy": Policy(level=1.0)},
    "pi": {"board": "raspberry_pi_4", "latency_s": 0.21, "policy": Policy(level=0.5)},
    "slow": {"board": "raspberry_pi_zero_2_w", "latency_s": 0.37, "policy": Policy(level=1.0)},
    "phone": {
        "board": "pixel_4",
        "latency_s": 0.11,
        "battery_percent": 80.0,
        # The apps here predict no costs, so energy must not be short.
        "policy": Policy(level=0.75, limits=Limits(energy_wh_per_day=1e6)),
    },
    "empty": {
        "board": "redmi_7a",
        "latency_s": 0.17,
        "battery_percent": 20.0,
        "policy": Policy(),
    },
}
RATES: dict[str, Any] = {"up_mbit_s": 0.004, "down_mbit_s": 0.009}
"""So slow that transfers of some hundred bytes take part of a second."""

Entry = tuple[float, str, int, str]
"""A message to a device: time when it was said, device, round, and what it says."""


def population() -> DevicePopulation:
    kinds = []
    for name, each in KINDS.items():
        percent = each.get("battery_percent")
        kinds.append(
            DeviceKind(
                board=find_board(each["board"]),
                name=name,
                battery_percent=None if percent is None else (percent, percent),
                latency_s=each["latency_s"],
                policy=each["policy"],
                **RATES,
            )
        )
    return DevicePopulation(kinds=tuple(kinds), work=WORK)


def shares() -> tuple[ArrayData, list[Any]]:
    random = np.random.default_rng(5)
    data = ArrayData(
        (random.normal(size=(100, 4)).astype(np.float32),), random.integers(0, 3, size=100)
    )
    return data, np.array_split(random.permutation(100), len(KINDS))


# -- one way: virtual time ------------------------------------------------------------------------


class Recorded:
    """A device that notes what it is told, before it arrives."""

    def __init__(self, device: FleetDevice, log: list[Entry]) -> None:
        self._device, self._log = device, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def receive(self, message: Told, now_s: float) -> list[Sent]:
        if (words := said(message)) is not None:
            self._log.append((now_s - self._device.latency_s, self._device.name, *words))
        return self._device.receive(message, now_s)


def said(message: object) -> tuple[int, str] | None:
    if isinstance(message, Assignment):
        return message.round, f"train {sorted(message.groups.items())}"
    if isinstance(message, Receipt):
        return message.round, message.outcome.value
    return None


def simulate(config: RoundsConfig | FragmentsConfig) -> tuple[list[Entry], str, list[float]]:
    saved, (data, parts), log = saved_model(), shares(), list[Entry]()
    model = GlobalModel(TIMED, saved.weights, saved.buffers, seed=config.seed)
    dealt, devices = deal_out(data, parts), population()
    names = {name: number for number, (name, _) in enumerate(devices.devices())}
    with CohortTraining(
        TIMED, saved.manifest, saved.files, dealt, names, seed=config.seed, cohort=2
    ) as training:
        run = FleetSimulation(config, model, devices, training=training, samples=dealt.counts())
        for name, device in list(run.devices.items()):
            run.devices[name] = Recorded(device, log)  # type: ignore[assignment]
        times = [round.time_s for round in run.run()]
    return log, model.digest, times


# -- the other way: the service -------------------------------------------------------------------


class PacedDevice(ScriptedDevice):
    """A device's own app on an emulated board, behind a link; its messages take their time."""

    def start(self, schedule: Schedule, data: ArrayData, seed: int) -> PacedDevice:
        kind = KINDS[self.name]
        percent = kind.get("battery_percent")
        member = FleetMember(
            name=self.name, board=find_board(kind["board"]), battery_percent=percent, **RATES
        )
        self.emulation, self.schedule = Emulation(member, work=WORK), schedule
        self.latency_s, policy, saved = kind["latency_s"], kind["policy"], saved_model()
        backend = OnnxBackend(TIMED, saved.manifest, saved.files)
        self.app = DeviceApp(
            self.name,
            backend=self.emulation.emulated(backend),
            data=data,
            policy=policy,
            source=self,
            seed=seed,
            movements=MemoryMovements(),
            observer=Observer(
                policy, self.emulation, clock=self.emulation.clock, wall=self.emulation.wall
            ),
            clock=self.emulation.clock,
        )
        return self

    def _receive(self, message: ControlMessage) -> None:
        now_s = self.schedule.now_s
        if (words := said(message)) is not None:
            self.schedule.log.append((now_s, self.name, *words))
        if isinstance(message, RoundOpen):
            self.opened.setdefault(message.round, message)
        if isinstance(message, (RoundOpen, Assignment, Receipt, RoundClosed)):
            self.schedule.add(now_s + self.latency_s, partial(self.work, message))
        if not isinstance(message, (RoundOpen, Assignment)):
            super()._receive(message)

    def work(self, message: Any) -> None:
        if self.emulation.clock() > self.schedule.now_s:
            self.schedule.add(self.emulation.clock(), partial(self.work, message))
            return
        self.emulation.wait_until(self.schedule.now_s)
        for answer in self.app.receive(message):
            assert isinstance(answer, Bid | Movement | Replay)
            size = len(answer.payload) if isinstance(answer, Movement) else 0
            sent_s = 8e-6 * size / RATES["up_mbit_s"]
            arrives_s = self.emulation.clock() + self.latency_s + sent_s
            self.schedule.add(arrives_s, partial(self.send_now, answer))

    def send_now(self, message: Bid | Movement | Replay) -> None:
        if isinstance(message, Bid):
            self.tell(replace(message, run=self.world.run.about.run))
        elif isinstance(message, Movement):
            self.offer(message)

    def fetch(self, assignment: Assignment, opened: RoundOpen) -> tuple[Blocks, dict[str, Array]]:
        size = encoded_size(PLAN, assignment.groups, Encoding())
        self.emulation.wait_until(self.emulation.clock() + 8e-6 * size / RATES["down_mbit_s"])
        return self.read_model(opened, assignment.groups)

    def fetch_control(self, assignment: Assignment, opened: RoundOpen) -> Blocks:
        return self.read_control(opened, assignment.groups)


class Schedule:
    """What happens when, on the world's clock."""

    def __init__(self, world: World) -> None:
        self.world, self.began_s, self.log = world, world.clock.now, list[Entry]()
        self._heap: list[tuple[float, int, Any]] = []
        self._numbers = count()
        self.now_s = 0.0

    def add(self, time_s: float, do: Any) -> None:
        heappush(self._heap, (time_s, next(self._numbers), do))

    def run(self) -> None:
        self.world.settle()
        while not self.world.service.finished:
            due = self.world.service.course.deadline
            if self._heap and (due is None or self.began_s + self._heap[0][0] <= due):
                time_s, _, do = heappop(self._heap)
                self.now_s = max(self.now_s, time_s)
                self.world.clock.now = max(self.world.clock.now, self.began_s + self.now_s)
                do()
            else:
                assert due is not None, "nobody has anything to do"
                self.world.clock.now, self.now_s = due, due - self.began_s
            self.world.settle()


CASES: dict[str, RoundsConfig | FragmentsConfig] = {
    "everybody": rounds_config(rounds=3, steps=3, min_devices=5, masks=make_masks("random")),
    "quorum": rounds_config(
        rule=RULES["ram-fed"](), rounds=4, steps=3, min_devices=5, quorum=0.5, bid_s=3.0
    ),
    "over-selection": rounds_config(
        rounds=6, steps=3, min_devices=5, participants=2, over_selection=2.0, bid_s=3.0
    ),
    "fragments": fragments_config(updates=14, steps=2, min_devices=5),
}


@pytest.mark.parametrize("case", CASES)
def test_virtual_time_decides_what_the_service_decides_in_the_same_order(
    worlds: Worlds, case: str
) -> None:
    config = replace(CASES[case], plan=TIMED)
    log, digest, times = simulate(config)
    world = worlds.make(config)
    schedule, (data, parts) = Schedule(world), shares()
    for name, part in zip(KINDS, parts, strict=True):
        own = ArrayData(tuple(x[part] for x in data.inputs), data.targets[part])
        world.devices.append(PacedDevice(world, name).start(schedule, own, config.seed))
    schedule.run()
    assert times == sorted(times)
    assert times[-1] > 1.0
    # Receipts that were under way when a run ended arrive one way and not the other.
    until_s = min(log[-1][0], schedule.log[-1][0]) + 1e-6
    ours, theirs = (
        sorted(
            (round(each[0], 6), *each[1:])
            for each in found
            # Receipts of an asynchronous service wait for its next checkpoint.
            if each[0] <= until_s and (case != "fragments" or each[3].startswith("train"))
        )
        for found in (log, schedule.log)
    )
    assert [each[1:] for each in ours] == [each[1:] for each in theirs]
    assert [each[0] for each in ours] == pytest.approx([each[0] for each in theirs])
    assert world.service.model.digest == digest
    assert len(ours) > 12
    outcomes = {each[3] for each in log}
    assert "counted" in outcomes
    if case in ("quorum", "over-selection"):  # the slow ones come too late
        assert outcomes & {"memory", "late"}
    assert not any(each[1] == "empty" for each in log)
