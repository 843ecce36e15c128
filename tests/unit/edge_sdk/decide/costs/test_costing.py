"""Costs of a task on a device: measured once, corrected by rounds, kept on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: a task is compiled")

from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task
from edge_sdk.data.arrays import Batch
from edge_sdk.decide.costs.costing import Costing
from edge_sdk.decide.costs.model import Known
from edge_sdk.machine.probe import StaticProbe
from edge_sdk.machine.snapshot import Battery, Cpu, MemoryState, Snapshot
from edge_sdk.protocol.errors import GraphError, TrainingError
from edge_sdk.protocol.task.graphs import GraphPlace, GraphWay
from edge_sdk.train.backend import Job
from edge_sdk.train.tuning import Tuned
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


class Choosing(calibrations.LawfulBackend):
    """A backend that computes in several ways, and counts how often it is asked which is best."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.tuned: tuple[Tuned, ...] = ()
        self.asked: list[float] = []
        """Levels that were tried."""

    def tune(self, job: Job, batch: Batch, *, level: float, **_: Any) -> Tuned:
        self.asked.append(level)
        kept = self.plan.kept_atoms(self.plan.choose(job.groups))
        ways = {"0.conv forward": "blocked"}
        return Tuned(level=level, kept=kept, ways=ways, places=3, default_s=2.0, step_s=1.0)


@pytest.fixture
def choosing(world: World) -> World:
    """The world with graphs that leave a choice."""
    place = GraphPlace("0.conv forward", (GraphWay("conv", 0, 1), GraphWay("blocked", 1, 2)))
    graphs = tuple(replace(entry, places=(place,)) for entry in world.manifest.graphs)
    world.manifest = replace(world.manifest, graphs=graphs)
    return world


def test_fastest_ways_are_found_once_and_kept(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    first = choosing.start(tunes=True)
    assert choosing.backend.asked == [0.25, 0.5, 1.0]
    assert [each.level for each in first.tuned] == [0.25, 0.5, 1.0]
    assert choosing.backend.tuned == first.tuned
    for _ in range(3):  # what rounds teach is kept beside them
        choosing.train(first, 1.2 * choosing.seconds(first))
    choosing.backend = again = Choosing(choosing.task)
    assert choosing.start(tunes=True).tuned == first.tuned
    assert again.tuned == first.tuned
    assert again.asked == []
    choosing.backend = other = Choosing(choosing.task)
    choosing.start(Snapshot(cpu=Cpu(cores=2.0), memory=MACHINE.memory), tunes=True)
    assert other.asked == [0.25, 0.5, 1.0]


def test_measuring_again_keeps_the_ways(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    costing = choosing.start(tunes=True)
    asked = list(choosing.backend.asked)
    for _ in range(10):
        choosing.train(costing, 3 * choosing.seconds(costing))
    off = [costing.is_off]
    costing.renew(lambda: False)
    assert [*off, costing.is_off] == [True, False]
    assert choosing.backend.asked == asked
    assert choosing.backend.tuned == costing.tuned != ()


def test_default_ways_without_tuning_whatever_was_kept(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    choosing.start(tunes=True)
    choosing.backend = usual = Choosing(choosing.task)
    assert choosing.start().tuned == ()
    assert usual.tuned == ()
    assert usual.asked == []


def test_round_does_not_wait_for_the_fastest_ways(choosing: World) -> None:
    choosing.backend = backend = Choosing(choosing.task)
    allowed = [False]
    costing = choosing.start(tunes=True, may_measure=lambda: allowed[0])
    allowed[0] = True
    assert choosing.seconds(costing) < math.inf
    assert backend.asked == []
    for _ in range(2):
        costing.renew(lambda: False)
        assert backend.asked == [0.25, 0.5, 1.0]
        assert backend.tuned == costing.tuned != ()


@pytest.mark.parametrize("error", [GraphError("no"), TrainingError("no"), OSError(28, "full")])
def test_tuning_that_fails_leaves_the_default_ways(choosing: World, error: Exception) -> None:
    class Failing(Choosing):
        def tune(self, job: Job, batch: Batch, *, level: float, **_: Any) -> Tuned:
            raise error

    choosing.backend = backend = Failing(choosing.task)
    costing = choosing.start(tunes=True)
    assert choosing.seconds(costing) < math.inf
    assert costing.tuned == backend.tuned == ()


def test_ways_are_found_anew_for_other_graphs(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    choosing.start()  # kept without ways
    choosing.backend = first = Choosing(choosing.task)
    choosing.start(tunes=True)
    choosing.backend = second = Choosing(choosing.task)
    graphs = choosing.manifest.graphs
    changed = tuple(replace(entry, sha256=entry.sha256[::-1]) for entry in graphs)
    choosing.manifest = replace(choosing.manifest, graphs=changed)
    choosing.start(tunes=True)
    assert first.asked == second.asked == [0.25, 0.5, 1.0]
