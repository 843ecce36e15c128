"""Costs of a task on a device: measured once, corrected by rounds, kept on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task
from edge_sdk.decide.costs.costing import Costing
from edge_sdk.decide.costs.model import Known
from edge_sdk.machine.probe import StaticProbe
from edge_sdk.machine.snapshot import Battery, Cpu, MemoryState, Snapshot
from edge_sdk.protocol.errors import TrainingError
from tests.unit.edge_sdk.decide.costs import test_calibration as calibrations

LEVELS = (1.0, 0.5, 0.25)
MACHINE = Snapshot(
    cpu=Cpu(cores=4.0),
    memory=MemoryState(available_bytes=1e9),
    battery=Battery(present=True, percent=90, charging=False),
)


class World:
    """A task on a machine whose steps take what a law says."""

    def __init__(self, task: Task, path: Path) -> None:
        self.task = task
        self.manifest = compile_graphs(task, levels=LEVELS, batch_sizes=(8, 32)).manifest
        self.path = path
        self.backend = calibrations.LawfulBackend(task)

    def start(self, snapshot: Snapshot = MACHINE, **more: Any) -> Costing:
        self.backend.trained.clear()
        return Costing(
            self.backend,
            self.manifest,
            self.path,
            probe=StaticProbe(snapshot),
            levels=LEVELS,
            clock=self.backend.clock,
            **{"keep_s": 0.0, **more},
        )

    def seconds(self, costing: Costing, level: float = 1.0) -> float:
        (cost,) = costing.predict((level,), calibrations.opened(self.task, 20, 32))
        return cost.seconds

    def train(self, costing: Costing, seconds: float, level: float = 1.0) -> float | None:
        with costing.metered(calibrations.opened(self.task, 20, 32), level) as meter:
            self.backend.now += seconds
        return meter.joules


@pytest.fixture(scope="module")
def task() -> Task:
    return calibrations.small_task()


@pytest.fixture
def world(task: Task, tmp_path: Path) -> World:
    return World(task, tmp_path / "costs.json")


def test_costs_are_measured_once_and_kept(world: World) -> None:
    costing = world.start()
    assert world.backend.trained
    again = world.start()
    assert not world.backend.trained
    assert world.seconds(again) == world.seconds(costing)
    assert 0 < world.seconds(costing, 0.25) <= world.seconds(costing)


def test_costs_are_measured_anew_on_another_machine(world: World) -> None:
    world.start()
    world.start(Snapshot(cpu=Cpu(cores=2.0), memory=MACHINE.memory))
    assert world.backend.trained
    world.path.write_bytes(b"{")
    world.start(Snapshot(cpu=Cpu(cores=2.0), memory=MACHINE.memory))
    assert world.backend.trained


def test_rounds_correct_costs_and_are_kept(world: World) -> None:
    costing = world.start()
    first = world.seconds(costing)
    for _ in range(3):
        world.train(costing, 1.2 * first)
    assert math.isclose(world.seconds(costing), 1.2 * first, rel_tol=0.01)
    assert math.isclose(world.seconds(world.start()), 1.2 * first, rel_tol=0.01)
    assert json.loads(world.path.read_text())["learned"]["rounds"] == 3


def test_rounds_that_are_stopped_teach_nothing(world: World) -> None:
    costing = world.start()
    first = world.seconds(costing)
    meter = costing.metered(calibrations.opened(world.task, 20, 32), 1.0)
    meter.__enter__()
    world.backend.now += 100 * first
    meter.__exit__(TrainingError, TrainingError("stopped"), None)
    assert world.seconds(costing) == first


def test_predictions_that_are_far_off_are_measured_again_between_rounds(world: World) -> None:
    costing = world.start()
    first = world.seconds(costing)
    costing.renew(lambda: False)
    world.backend.trained.clear()
    for factor in (1, 3, 1, 3, 1, 3, 1, 3):
        world.train(costing, factor * first)
    assert costing.is_off
    world.seconds(costing)
    assert not world.backend.trained  # neither while it trains nor when a round opens
    costing.renew(lambda: True)
    assert costing.is_off  # there was something to do
    costing.renew(lambda: False)
    assert world.backend.trained
    assert not costing.is_off


def test_a_device_that_waits_for_others_is_as_fast_as_ever(world: World) -> None:
    busy = 0.0
    costing = world.start(busy=lambda: busy)
    first = world.seconds(costing)
    for factor in (1, 3, 1, 3, 1, 3, 1, 3):
        with costing.metered(calibrations.opened(world.task, 20, 32), 1.0):
            busy += first  # the same work
            world.backend.now += factor * first
    assert not costing.is_off
    for factor in (1, 3, 1, 3, 1, 3, 1, 3):
        with costing.metered(calibrations.opened(world.task, 20, 32), 1.0):
            busy += factor * first
            world.backend.now += factor * first
    assert costing.is_off


def test_what_rounds_teach_is_written_once_a_while(world: World) -> None:
    costing = world.start(keep_s=100.0)
    written = world.path.read_bytes()
    world.train(costing, 1.0)
    assert world.path.read_bytes() == written
    world.train(costing, 100.0)
    assert json.loads(world.path.read_text())["learned"]["rounds"] == 2


def test_joules_come_from_the_board_where_no_sensor_is(world: World) -> None:
    assert world.train(world.start(), 10.0) is None
    costing = world.start(known=Known(net_w=3.0))
    joules = world.train(costing, 10.0)
    assert joules is not None
    assert math.isclose(joules, 30.0)


def test_level_that_cannot_even_be_tried_takes_forever(world: World) -> None:
    tiny = Snapshot(memory=MemoryState(available_bytes=1e6))
    costing = world.start(tiny)
    assert not world.backend.trained
    costs = costing.predict(LEVELS, calibrations.opened(world.task, 20, 32))
    assert all(cost.seconds == math.inf and cost.peak_bytes > 1e6 for cost in costs)
    assert world.train(costing, 1.0) is None
    assert not world.path.exists()


def test_calibration_that_failed_is_tried_again_with_more_memory(world: World) -> None:
    class Growing:
        now = Snapshot(memory=MemoryState(available_bytes=1e6))

        def snapshot(self) -> Snapshot:
            return self.now

    probe = Growing()
    costing = Costing(
        world.backend,
        world.manifest,
        world.path,
        probe=probe,
        levels=LEVELS,
        clock=world.backend.clock,
    )
    assert world.seconds(costing) == math.inf
    probe.now = MACHINE
    assert world.seconds(costing) < math.inf


def test_memory_that_others_take_is_not_taken_for_ours(world: World) -> None:
    costing = world.start()
    opened = calibrations.opened(world.task, 20, 32)
    (before,) = costing.predict((1.0,), opened)
    others = bytearray(b"x" * 200_000_000)
    (after,) = costing.predict((1.0,), opened)
    assert after.peak_bytes == before.peak_bytes
    del others


def test_nothing_is_measured_while_the_device_may_not_train(world: World) -> None:
    allowed = [False]
    costing = world.start(may_measure=lambda: allowed[0])
    assert world.seconds(costing) == math.inf
    assert not world.backend.trained
    allowed[0] = True
    assert world.seconds(costing) < math.inf
