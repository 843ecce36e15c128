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
from edge_sdk.decide.costs import costing as costing_module
from edge_sdk.decide.costs.calibration import calibrate as calibrated
from edge_sdk.decide.costs.costing import Costing
from edge_sdk.decide.costs.model import Known
from edge_sdk.machine.probe import StaticProbe
from edge_sdk.machine.snapshot import Battery, Cpu, MemoryState, Snapshot
from edge_sdk.protocol.errors import GraphError, TrainingError, TrainingStopped
from edge_sdk.protocol.task.graphs import GraphPlace, GraphWay
from edge_sdk.train.backend import Job, Trained
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
            levels=LEVELS,
            clock=self.backend.clock,
            **{"keep_s": 0.0, "probe": StaticProbe(snapshot), **more},
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


def test_what_is_not_written_yet_is_kept_when_the_device_rests_and_at_its_end(world: World) -> None:
    costing = world.start(keep_s=100.0)
    seen = [costing.is_kept]
    world.train(costing, 1.0)
    for wait_s in (0.0, 100.0):  # the calibration was just written
        world.backend.now += wait_s
        costing.keep()
        seen.append(costing.is_kept)
    assert seen == [True, False, True]
    assert json.loads(world.path.read_text())["learned"]["rounds"] == 1
    world.train(costing, 1.0)
    costing.keep(always=True)
    assert json.loads(world.path.read_text())["learned"]["rounds"] == 2
    world.path.unlink()
    costing.keep(always=True)
    assert not world.path.exists()  # nothing is new


def test_costs_without_a_file_have_nothing_to_keep(world: World) -> None:
    costing = Costing(
        world.backend, world.manifest, None, probe=StaticProbe(MACHINE), levels=LEVELS
    )
    world.train(costing, 1.0)
    assert costing.is_kept


def test_measuring_that_is_put_off_is_logged_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Trained:
        raise TrainingStopped(0)

    costing = world.start()
    for factor in (1, 3, 1, 3, 1, 3, 1, 3):
        world.train(costing, factor * 0.1)
    caplog.set_level("INFO")
    with monkeypatch.context() as patched:
        patched.setattr(world.backend, "train", interrupted)
        for _ in range(3):
            costing.renew(lambda: False)
            assert costing.is_off
    begun, stopped = caplog.messages
    assert begun.startswith("measuring the costs of levels: predictions are off by ")
    assert stopped.startswith("not measured now: a round began, or other work came")
    costing.renew(lambda: False)
    assert caplog.messages[2:] == ["the costs of levels are measured"]


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

    has_ways = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.tuned: tuple[Tuned, ...] = ()
        self.asked: list[float] = []
        """Levels that were tried."""
        self.found = {"0.conv forward": "blocked"}

    def close(self) -> None:
        """Nothing is open."""

    def tune(self, job: Job, batch: Batch, *, level: float, **_: Any) -> Tuned | None:
        self.asked.append(level)
        kept = self.plan.kept_atoms(self.plan.choose(job.groups))
        return Tuned(level=level, kept=kept, ways=self.found, places=3, default_s=2.0, step_s=1.0)


@pytest.fixture
def choosing(world: World) -> World:
    """The world with graphs that leave a choice."""
    place = GraphPlace("0.conv forward", (GraphWay("conv", 0, 1), GraphWay("blocked", 1, 2)))
    graphs = tuple(replace(entry, places=(place,)) for entry in world.manifest.graphs)
    world.manifest = replace(world.manifest, graphs=graphs)
    return world


def rested(choosing: World, **more: Any) -> Costing:
    """Start, and have nothing to do for a while."""
    costing = choosing.start(**{"tunes": True, **more})
    if costing.is_off:
        costing.renew(lambda: False)
    return costing


def kept(choosing: World) -> Any:
    """The ways that are kept."""
    return json.loads(choosing.path.read_text()).get("tuned")


def test_fastest_ways_are_found_once_and_kept(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    first = rested(choosing)
    assert choosing.backend.asked == [0.25, 0.5, 1.0]
    assert [each.level for each in first.tuned] == [0.25, 0.5, 1.0]
    assert choosing.backend.tuned == first.tuned
    for _ in range(3):  # what rounds teach is kept beside them
        choosing.train(first, 1.2 * choosing.seconds(first))
    choosing.backend = again = Choosing(choosing.task)
    assert rested(choosing).tuned == first.tuned
    assert again.tuned == first.tuned
    assert again.asked == []
    choosing.backend = other = Choosing(choosing.task)
    rested(choosing, snapshot=Snapshot(cpu=Cpu(cores=2.0), memory=MACHINE.memory))
    assert other.asked == [0.25, 0.5, 1.0]


def test_first_bid_does_not_wait_for_the_fastest_ways(choosing: World) -> None:
    choosing.backend = backend = Choosing(choosing.task)
    costing = choosing.start(tunes=True)
    assert backend.asked == []
    assert backend.tuned == ()
    assert choosing.seconds(costing) < math.inf
    assert costing.seeks
    assert costing.is_off


def test_measuring_again_keeps_the_ways(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    costing = rested(choosing)
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
    rested(choosing)
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


def test_nothing_is_sought_while_the_device_may_not_train(choosing: World) -> None:
    choosing.backend = backend = Choosing(choosing.task)
    allowed = [True]
    costing = choosing.start(tunes=True, may_measure=lambda: allowed[0])
    allowed[0] = False
    costing.renew(lambda: False)
    assert backend.asked == []
    off = [costing.is_off]  # its sensors are not asked all the time
    backend.now += 60
    assert [*off, costing.is_off] == [False, True]
    allowed[0] = True
    costing.renew(lambda: False)
    assert backend.asked == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("error", [GraphError("no"), TrainingError("no"), OSError(28, "full")])
def test_tuning_that_fails_leaves_the_default_ways(choosing: World, error: Exception) -> None:
    class Failing(Choosing):
        def tune(self, job: Job, batch: Batch, *, level: float, **_: Any) -> Tuned:
            raise error

    choosing.backend = backend = Failing(choosing.task)
    costing = rested(choosing)
    assert choosing.seconds(costing) < math.inf
    assert costing.tuned == backend.tuned == ()
    assert not costing.is_off  # the next start tries again
    assert kept(choosing) is None


@pytest.mark.parametrize("found", [{}, None])
def test_nothing_found_is_kept(choosing: World, found: dict[str, str] | None) -> None:
    """Neither a step that no way makes faster nor a machine that is too slow to tell."""

    class Finding(Choosing):
        def tune(self, job: Job, batch: Batch, *, level: float, **more: Any) -> Tuned | None:
            tuned = super().tune(job, batch, level=level, **more)
            return tuned if found is not None else None

    choosing.backend = first = Finding(choosing.task)
    first.found = found or {}
    costing = choosing.start(tunes=True)
    steps = len(first.trained)
    costing.renew(lambda: False)
    assert len(first.trained) == steps  # the default ways were measured already
    assert not costing.is_off
    assert [each["ways"] for each in kept(choosing)] == ([] if found is None else [{}] * 3)
    choosing.backend = second = Finding(choosing.task)
    assert not rested(choosing).is_off
    assert first.asked == [0.25, 0.5, 1.0]
    assert second.asked == []


def test_search_without_room_is_for_the_next_start(choosing: World) -> None:
    class Filling:
        now = MACHINE

        def snapshot(self) -> Snapshot:
            return self.now

    choosing.backend = backend = Choosing(choosing.task)
    probe = Filling()
    costing = choosing.start(tunes=True, probe=probe)
    probe.now = Snapshot(memory=MemoryState(available_bytes=1e6))
    costing.renew(lambda: False)
    assert not costing.is_off
    assert kept(choosing) is None
    assert backend.asked == []
    assert rested(choosing).tuned != ()


def test_file_that_says_nothing_of_ways_was_never_searched_for(choosing: World) -> None:
    """Such as one of an earlier version."""
    choosing.backend = Choosing(choosing.task)
    rested(choosing)
    content = json.loads(choosing.path.read_text())
    assert content.pop("tuned")
    choosing.path.write_text(json.dumps(content))
    choosing.backend = again = Choosing(choosing.task)
    costing = choosing.start(tunes=True)
    assert again.trained == []
    assert costing.is_off
    costing.renew(lambda: False)
    assert again.asked == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(
    ("error", "again"),
    [(TrainingStopped(0), True), (TrainingError("no"), False), (GraphError("no"), False)],
)
def test_ways_count_only_with_a_calibration_in_them(
    choosing: World, error: Exception, again: bool
) -> None:
    class Failing(Choosing):
        failures: int = 1

        def train(self, *arguments: Any, **more: Any) -> Trained:
            if self.tuned and self.failures:
                self.failures -= 1
                raise error
            return super().train(*arguments, **more)

    choosing.backend = backend = Failing(choosing.task)
    costing = choosing.start(tunes=True)
    predicted = choosing.seconds(costing)
    costing.renew(lambda: False)
    assert costing.tuned == backend.tuned == ()
    assert choosing.seconds(costing) == predicted
    assert kept(choosing) is None
    assert costing.is_off == again
    costing.renew(lambda: False)
    assert backend.asked == [0.25, 0.5, 1.0]  # what was found is known
    assert bool(costing.tuned) == bool(kept(choosing)) == again


def test_search_that_is_stopped_goes_on_where_it_was(choosing: World) -> None:
    class Stopped(Choosing):
        def tune(self, job: Job, batch: Batch, *, level: float, **more: Any) -> Tuned | None:
            found = super().tune(job, batch, level=level, **more)
            if len(self.asked) == 3:
                raise TrainingStopped(0)
            return found

    choosing.backend = backend = Stopped(choosing.task)
    costing = choosing.start(tunes=True)
    costing.renew(lambda: False)
    assert costing.is_off
    assert costing.tuned == backend.tuned == ()
    costing.renew(lambda: False)
    assert backend.asked == [0.25, 0.5, 1.0, 1.0]
    assert len(costing.tuned) == 3


def test_ways_that_failed_are_forgotten_on_disk_too(choosing: World) -> None:
    choosing.backend = backend = Choosing(choosing.task)
    costing = rested(choosing)
    assert kept(choosing)
    backend.tuned = ()  # the runtime failed in them
    choosing.train(costing, choosing.seconds(costing))
    assert costing.tuned == ()
    assert kept(choosing) == []
    choosing.backend = again = Choosing(choosing.task)
    assert not rested(choosing).is_off
    assert again.asked == []
    assert again.tuned == ()


def test_without_a_choice_nothing_is_sought(choosing: World) -> None:
    """Whatever places other kinds of graphs have, or other providers could take."""
    choosing.backend = backend = Choosing(choosing.task)
    backend.has_ways = False
    costing = choosing.start(tunes=True)
    assert not costing.is_off
    assert not costing.seeks
    costing.renew(lambda: False)
    assert backend.asked == []


def test_memory_of_a_search_is_no_training_s(
    choosing: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that it leaves would else count as taken by the smallest step."""
    resident = [100e6]
    held: list[float] = []

    def calibrate(*arguments: Any, held_bytes: float, **more: Any) -> Any:
        held.append(held_bytes)
        resident[0] += 30e6
        return calibrated(*arguments, held_bytes=held_bytes, **more)

    class Leaving(Choosing):
        def close(self) -> None:
            resident[0] = min(resident[0], 110e6)

        def tune(self, job: Job, batch: Batch, *, level: float, **more: Any) -> Tuned | None:
            resident[0] += 500e6
            return super().tune(job, batch, level=level, **more)

    monkeypatch.setattr(costing_module, "calibrate", calibrate)
    monkeypatch.setattr(costing_module, "resident_bytes", lambda: int(resident[0]))
    monkeypatch.setattr(costing_module, "release_heap", lambda: None)
    choosing.backend = Leaving(choosing.task)
    costing = choosing.start(tunes=True)
    assert costing._held_bytes == 30e6
    costing.renew(lambda: False)
    assert held == [0, 10e6]  # of 30, closing the graphs gives back 20
    assert costing._held_bytes == 40e6


def test_freed_memory_leaves_before_costs_are_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def calibrate(*arguments: Any, **more: Any) -> Any:
        done.append("calibrate")
        return calibrated(*arguments, **more)

    monkeypatch.setattr(costing_module, "calibrate", calibrate)
    monkeypatch.setattr(costing_module, "release_heap", lambda: done.append("release"))
    world.start()
    assert done == ["release", "calibrate"]


def test_ways_are_found_anew_for_other_graphs(choosing: World) -> None:
    choosing.backend = Choosing(choosing.task)
    choosing.start()  # kept without ways
    choosing.backend = first = Choosing(choosing.task)
    rested(choosing)
    choosing.backend = second = Choosing(choosing.task)
    graphs = choosing.manifest.graphs
    changed = tuple(replace(entry, sha256=entry.sha256[::-1]) for entry in graphs)
    choosing.manifest = replace(choosing.manifest, graphs=changed)
    rested(choosing)
    assert first.asked == second.asked == [0.25, 0.5, 1.0]
