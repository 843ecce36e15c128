"""Where parts meet: quarantine and surveys, takeovers and journals, forgetting and repairs."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.operate.serve.charge import LastServed, RetainedFacts, objection
from coordinator.operate.upkeep.inspection import Inspection
from coordinator.operate.upkeep.repair import find_steps
from coordinator.rounds.reputation import quarantined
from coordinator.rounds.synchronous import RoundPhase, RoundsConfig
from coordinator.run.folder import Run
from coordinator.run.forgetting import FORGET
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.transport.link import Received
from tests.unit.coordinator.run.test_forgetting import second_round
from tests.unit.coordinator.service.service_world import TOPICS, World, Worlds, rounds_config
from tests.unit.coordinator.service.test_resuming import refuse, surveyed

__all__ = ["surveyed"]  # a fixture


def with_a_bad_device(worlds: Worlds, **settings: object) -> World:
    """A run in which the third of three devices is refused at once, and quarantined."""
    config = rounds_config(**{"rounds": 9, "quarantine_after": 1, **settings})
    world = worlds.make(config)
    for name in "abc":
        world.add(name, value=0.9 if name == "c" else 0.01)
    world.settle()
    assert list(quarantined(world.state.fleet.standings)) == ["c"]
    return world


def test_run_that_was_taken_over_starts_again_without_its_journal(worlds: Worlds) -> None:
    world = second_round(worlds)
    world.stop()
    with Run(world.folder) as run:
        run.note_opened(4)  # devices have heard of later rounds
    world.start()
    world.stop()
    world.start()
    world.stop()


def test_run_that_ends_with_a_round_open_starts_again(worlds: Worlds) -> None:
    world = second_round(worlds)
    world.stop()
    assert isinstance(world.machine, RoundsConfig)
    world.machine = replace(world.machine, rounds=1)
    world.start()
    assert world.service.finished
    world.stop()
    world.start()
    world.stop()


def test_declined_bid_is_no_movement(worlds: Worlds) -> None:
    world = with_a_bad_device(worlds, min_devices=3)
    first, *later = world.history
    assert first["movements"]["rejected"] == 1
    assert later
    assert not any(line["movements"]["rejected"] or line["refusals"] for line in later)


def test_rollback_keeps_devices_in_quarantine(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=4, rounds=4, quarantine_after=2))
    for name in "abcd":
        world.add(name, value=0.9 if name == "c" else 0.01)
    world.settle()
    assert list(quarantined(world.state.fleet.standings)) == ["c"]
    world.stop()
    with Run(world.folder) as run:
        run.rollback(1)
    world.start()
    assert list(quarantined(world.state.fleet.standings)) == ["c"]
    world.stop()


@pytest.mark.usefixtures("surveyed")
def test_device_that_is_released_in_a_survey_takes_part_after_the_commit(worlds: Worlds) -> None:
    world = with_a_bad_device(worlds, min_devices=3, survey_every=2, survey_s=50.0)
    asked = world.retained(TOPICS.round)
    assert isinstance(asked, Survey)
    world.service.helm.allow("c", by="anna")
    assert world.service.helm.quarantined() == []
    assert list(quarantined(world.state.fleet.standings)) == ["c"]  # until the commit
    for device in world.devices[:2]:
        refuse(device, asked)  # the answers of both are all that is waited for
    world.settle()
    assert world.state.round > asked.round
    # The release was taken up after the commit: the device took part, and was refused.
    rounds = [line for line in world.history if "movements" in line]
    assert [line["movements"]["rejected"] for line in rounds[:3]] == [1, 0, 1]


def test_released_device_opens_the_round_that_waited_for_it(worlds: Worlds) -> None:
    config = rounds_config(rounds=9, quarantine_after=1, min_devices=1)
    world = worlds.make(config)
    devices = [
        world.add(name, value=0.9 if name == "c" else 0.01, level=lambda n: 1.0 if n == 1 else None)
        for name in "abc"
    ]
    world.settle()
    for device in devices[:2]:
        world.leave(device)
    for _ in range(5):
        world.wait(200)
    assert world.state.phase is RoundPhase.WAITING
    before = world.state.round
    world.service.helm.allow("c", by="anna")
    world.settle()
    assert world.state.round == before + 1


def test_verify_and_repair_know_a_request_to_forget(worlds: Worlds) -> None:
    world = second_round(worlds)
    world.stop()
    (world.folder / FORGET).write_bytes(b"rubbish")
    bad = [each.path for each in Inspection(world.folder).all() if each.condition != "good"]
    assert bad == [Path(FORGET)]
    for step in find_steps(world.folder):
        step.take()
    world.start()
    world.stop()


def test_deadlines_go_on_once_what_lacked_room_is_written(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer bytes are free than it needed, because it took them."""
    world = worlds.make(rounds_config(min_devices=2, rounds=9))
    monkeypatch.setattr(world.service, "_room_s", 0.0)
    write, failed = os.write, list[int]()

    def full_once(handle: int, data: bytes) -> int:
        if not failed:
            failed.append(len(data))
            raise OSError(errno.ENOSPC, "no space left")
        return write(handle, data)

    monkeypatch.setattr("edge_sdk.program.files.os.write", full_once)
    monkeypatch.setattr("coordinator.service.admission.room.free_bytes", lambda _: failed[0] // 2)
    world.add("a"), world.add("b", sends=False)
    world.settle()
    assert failed
    before = world.state.round
    for _ in range(3):
        world.wait(200)
    assert world.state.round > before


@pytest.mark.usefixtures("surveyed")
def test_backup_is_recognised_while_a_survey_is_retained(worlds: Worlds, tmp_path: Path) -> None:
    world = worlds.make(rounds_config(min_devices=2, rounds=9, survey_every=3, survey_s=50.0))
    devices = [world.add(name, sends=False) for name in "ab"]
    world.settle()
    shutil.copytree(world.folder, tmp_path / "backup")
    for round in (1, 2, 3):
        for device in devices:
            device.send(round)
    world.settle()
    assert isinstance(world.retained(TOPICS.round), Survey)
    world.stop()
    seen = RetainedFacts()
    for topic in (TOPICS.epoch, TOPICS.coordinator, TOPICS.round):
        if payload := world.broker.retained.get(topic):
            seen.hear(Received(topic, payload, True), world.run.about.run)
    with Run(tmp_path / "backup") as run:
        assert objection(LastServed.of(run), seen, "tiny") is not None
