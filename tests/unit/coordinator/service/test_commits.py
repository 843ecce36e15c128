"""Commits in real threads: what the loop changes meanwhile, what fails, what is forgotten."""

from __future__ import annotations

import errno
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from coordinator.aggregate.memory import Memory
from coordinator.aggregate.rules import RULES
from coordinator.errors import ConfigError, StopRequestedError
from coordinator.rounds import events
from coordinator.rounds.persistent import PersistentMap, PersistentSet
from coordinator.rounds.reputation import Agreed, DeviceStanding
from coordinator.rounds.synchronous import RoundPhase
from coordinator.run import folder as run_folder
from coordinator.run.errors import RunError
from coordinator.run.folder import MOVEMENTS, Checkpoint
from coordinator.service.admission.requests import Requests
from coordinator.service.aside import Aside, AtOnce, InThreads
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.service.service import Service
from coordinator.service.store import RunOnDisk
from edge_sdk.program.files import DiskFull
from edge_sdk.protocol.messages.round import Receipt
from tests.unit.coordinator.service.service_world import World, Worlds, rounds_config
from tests.waiting import HANGS_S, until

MANY = 2000
"""Devices that are registered, and far away."""
SWITCH_S = 1e-6


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Commits wait until it is set, after the model moved and before anything is on disk."""
    opened, judge = threading.Event(), RoundsCourse._judge

    def judging(course: RoundsCourse, *arguments: Any) -> Any:
        assert opened.wait(HANGS_S)
        return judge(course, *arguments)

    monkeypatch.setattr(RoundsCourse, "_judge", judging)
    yield opened
    opened.set()


def course_of(world: World) -> RoundsCourse:
    assert isinstance(world.service.course, RoundsCourse)
    return world.service.course


def committing(worlds: Worlds, folder: str = "run", **settings: Any) -> World:
    """A run whose first round is being committed in threads."""
    config = rounds_config(rule=RULES["ram-fed"](), rounds=3, **settings)
    world = worlds.make(config, folder, aside=InThreads)
    world.add("a")
    world.add("b")
    world.until(lambda: course_of(world).committing)
    return world


def asked(world: World, device: str, gate: threading.Event) -> Future[Any]:
    """The answer to an operator who asks that a device be forgotten during a commit."""
    requests, answer = world.service._requests, Future[Any]()
    requests._queue.put((lambda service: service.forget(device, "me"), answer))
    threading.Timer(0.05, gate.set).start()
    return answer


def failing(*_: object) -> None:
    raise ValueError("no levels")


# -- what workers read ---------------------------------------------------------------------------


def crowd(course: RoundsCourse) -> None:
    """Let many devices be known, each of them in every record of the fleet."""
    names, state = [f"far-{number:05}" for number in range(MANY)], course._state
    rounds = dict.fromkeys(names, 1)
    fleet = replace(
        state.fleet,
        trained=PersistentMap(rounds),
        samples=PersistentMap(rounds),
        total_samples=MANY,
        standings=PersistentMap({name: DeviceStanding(silent=True) for name in names}),
        agreements=PersistentMap({name: Agreed(1.0, 1.0) for name in names}),
    )
    devices = PersistentSet([*state.devices, *names])
    course._state = replace(state, fleet=fleet, devices=devices)


def change(course: RoundsCourse, number: int) -> None:
    """Let the loop change what a commit saves: a newcomer, and a device that is released."""
    course.handle(events.Joined(f"newcomer-{number}"), 0.0)
    course.handle(events.Left(f"newcomer-{number}"), 0.0)
    course.handle(events.Released(f"far-{number % MANY:05}"), 0.0)


def records_of(checkpoint: Checkpoint) -> list[Any]:
    fleet = checkpoint.fleet
    records = [fleet.trained, fleet.samples, fleet.standings, fleet.agreements]
    return [checkpoint.devices, checkpoint.counted, fleet.teachers.blocks, *records]


def test_loop_changes_nothing_that_is_being_saved(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, reading = threading.Event(), threading.Event()
    encode, seen = run_folder._encode, []

    def slowly(checkpoint: Checkpoint) -> Any:
        found = [iter(each) for each in records_of(checkpoint)]
        names = [[next(each, None)] for each in found]
        reading.set()
        assert may_read.wait(HANGS_S)
        for each, first in zip(found, names, strict=True):
            first.extend(each)
        seen.append(names)
        return encode(checkpoint)

    world = worlds.make(rounds_config(rounds=1), aside=InThreads)
    crowd(course_of(world))
    monkeypatch.setattr(run_folder, "_encode", slowly)
    world.add("a")
    world.add("b")
    world.until(reading.is_set)
    for number in range(MANY // 2):
        change(course_of(world), number)
    may_read.set()
    world.until(lambda: world.service.finished)
    assert [len(each) for each in seen[0]] == [MANY + 2, 1, 2, MANY + 2, MANY + 2, MANY, MANY]
    known = world.run.latest()
    assert known.devices == {"a", "b", *(f"far-{number:05}" for number in range(MANY))}
    assert len(known.fleet.standings) == MANY


@pytest.mark.parametrize("rule", ["ram-fed", "ra-fed"])
def test_model_is_the_same_however_the_loop_changes_meanwhile(worlds: Worlds, rule: str) -> None:
    digests, before = [], sys.getswitchinterval()
    for aside in (None, InThreads):
        config = rounds_config(rule=RULES[rule](), rounds=2)
        world = worlds.make(config, f"{aside}", aside=aside)
        crowd(course_of(world))
        for name in ("a", "b"):
            world.add(name)
        number = 0
        sys.setswitchinterval(SWITCH_S)
        try:
            while not world.service.finished:
                world.settle()
                while course_of(world).committing:
                    change(course_of(world), number)
                    number += 1
                    world.service.tick()
        finally:
            sys.setswitchinterval(before)
        assert (number > 0) == (aside is not None)
        # Newcomers of a commit count from the next round on, so only this one is the same.
        digests.append(world.history[0]["digest"])
    assert len(set(digests)) == 1


def test_model_before_a_round_is_let_go_while_its_commit_is_under_way(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    move, record = RoundsCourse._move, RunOnDisk.record

    def moving(course: RoundsCourse, *arguments: Any) -> Any:
        before[:] = [weakref.ref(course._parts.model.theta)]
        return move(course, *arguments)

    def recording(store: RunOnDisk, *arguments: Any) -> None:
        alive.append(before[0]() is not None)
        record(store, *arguments)

    monkeypatch.setattr(RoundsCourse, "_move", moving)
    monkeypatch.setattr(RunOnDisk, "record", recording)
    world = worlds.make(rounds_config(rule=RULES["ram-fed"](), rounds=2))
    assert world.service.overview.watches  # so it is compared with the one after it
    world.add("a")
    world.add("b")
    world.settle()
    assert alive == [False, False]


# -- commits that fail ---------------------------------------------------------------------------


def test_commit_that_fails_while_a_device_is_to_be_forgotten_ends_the_loop(
    worlds: Worlds, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = committing(worlds)
    with monkeypatch.context() as patch:
        patch.setattr(RoundsCourse, "_move", failing)
        patch.setattr(RunOnDisk, "_save_at", failing)
        answer = asked(world, "a", gate)
        again: Future[Any] = Future()
        requests: Requests[Service] = world.service._requests
        requests._queue.put((lambda service: service.forget("a", "me"), again))
        with pytest.raises(RunError, match="could not be committed"):
            world.service.tick()
    with pytest.raises(RunError, match="could not be committed"):
        answer.result(0)
    with pytest.raises(ConfigError, match="about to be committed"):
        again.result(0)
    assert not course_of(world).idle
    world.stop()  # it has been told
    world.start()  # whose memory is that of the last commit
    assert world.state.round == 1
    world.until(lambda: world.service.finished)
    assert [line["round"] for line in world.history] == [1, 2, 3]


def test_end_of_a_failed_commit_waits_for_the_rest_and_does_not_tell_it(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, ended = threading.Event(), threading.Event()

    def saving(*_: object) -> None:
        assert prepared.wait(HANGS_S)
        ended.wait(0.2)
        raise OSError(5, "cannot save")

    def preparing(_: Memory) -> None:
        prepared.set()
        raise OSError(5, "cannot prepare")

    with monkeypatch.context() as patch:
        patch.setattr(RunOnDisk, "_save_at", saving)
        patch.setattr(Memory, "prepare", preparing)
        config = rounds_config(rule=RULES["ram-fed"]())
        world = worlds.make(config, aside=InThreads)
        world.add("a")
        world.add("b")
        with pytest.raises(RunError, match="could not be committed") as failed:
            world.until(lambda: False)
        assert "cannot prepare" in str(failed.value.__cause__)
        ended.set()
        until(lambda: all(work.done() for work in course_of(world)._works))
        world.stop()


@pytest.mark.parametrize("aside", [AtOnce, InThreads])
@pytest.mark.parametrize("kind", [ConfigError, StopRequestedError])
def test_error_of_an_evaluation_that_cannot_begin_ends_the_run_as_it_is(
    worlds: Worlds,
    kind: type[Exception],
    aside: Callable[[], Aside],
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = kind("no such data")

    def evaluate(*_: object) -> Any:
        raise error

    world = worlds.make(rounds_config(), aside=aside, evaluate=evaluate)
    world.add("a")
    world.add("b")
    for _ in range(2):
        with pytest.raises(kind) as raised:
            world.until(lambda: False)
        assert raised.value is error
    assert caplog.messages == []
    world.stop()


def test_stop_while_an_evaluation_cannot_begin_is_in_order(worlds: Worlds) -> None:
    stopped = threading.Event()

    def evaluate(*_: object) -> Any:
        assert stopped.wait(HANGS_S)
        raise StopRequestedError

    world = worlds.make(rounds_config(), aside=InThreads, evaluate=evaluate)
    world.add("a")
    world.add("b")
    world.until(lambda: course_of(world).committing)
    threading.Timer(0.05, stopped.set).start()
    world.stop()
    assert [each["round"] for each in world.history] == []


# -- what is forgotten meanwhile -----------------------------------------------------------------


def test_commit_that_ends_because_a_device_is_to_be_forgotten_is_told_to_devices(
    worlds: Worlds, gate: threading.Event
) -> None:
    world = committing(worlds)
    answer = asked(world, "nobody", gate)
    world.service.tick()
    with pytest.raises(ConfigError, match="nothing is kept of 'nobody'"):
        answer.result(0)
    # Nothing else comes, so nothing else would make the loop go on.
    assert (world.state.round, world.state.phase) == (2, RoundPhase.BIDDING)
    world.settle()
    assert [each.verdicts[0] for each in world.devices] == [(1, "counted")] * 2


def test_movement_that_waited_for_a_commit_is_not_kept_once_its_device_is_forgotten(
    worlds: Worlds, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = rounds_config(rule=RULES["ram-fed"](), rounds=3, min_devices=3)
    world = worlds.make(config, aside=InThreads)
    gate.set()
    for name in ("a", "b", "late"):
        world.add(name)
    late = world.devices[-1]
    late.sends = False
    world.settle()
    late.send(1)
    world.until(lambda: world.state.round == 2 and 2 in late.movements)
    gate.clear()
    world.wait(101)
    late.send(2)
    course = course_of(world)
    assert len(course._held) == 1
    # A link that is slow to take the model keeps the next round from opening.
    gate.set()
    until(lambda: course._awaited is None or course._awaited.done())
    monkeypatch.setattr(Service, "_proceed", lambda _: None)
    world.service.forget("late", "me")
    monkeypatch.undo()
    world.settle()
    told = late.all(Receipt)[-1]
    assert (told.round, told.outcome.value) == (2, "rejected")
    assert told.reason == "the operator had it forgotten"
    assert [path.name for path in (world.folder / MOVEMENTS).iterdir()] == []


# -- a full disk ---------------------------------------------------------------------------------


def test_disk_that_a_commit_finds_full_counts_as_full_until_it_no_longer_says_so(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "coordinator.service.admission.room")
    world = worlds.make(rounds_config())
    service = world.service
    for _ in range(5):  # of a quota, which free bytes do not tell of
        service._lacking = DiskFull(world.folder, 0, 10**9, errno.EDQUOT)
        service.tick()
        assert service._room.full is not None
        world.clock.now += 1
    service.tick()
    world.clock.now += 1
    service.tick()
    assert service._room.full is None
    assert [each.split(":")[0] for each in caplog.messages] == [
        "the disk is full",
        "the disk has room again",
    ]
