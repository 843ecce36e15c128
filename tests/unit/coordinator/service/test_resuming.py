"""A coordinator that ends in the middle of a round and is started again: same round, same bits."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregate.memory import DiskMemory
from coordinator.aggregate.rules import RULES
from coordinator.masks import make_masks
from coordinator.rounds.state import OpenRound
from coordinator.rounds.synchronous import RoundPhase, RoundsConfig
from coordinator.run.folder import MOVEMENTS, ROUND, Run, RunError, read_history
from coordinator.run.journal import Journal
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Assignment, Bid, Outcome, RoundClosed, RoundOpen
from tests.unit.coordinator.service.service_world import (
    TOPICS,
    ScriptedDevice,
    World,
    rounds_config,
)

RULE_NAMES = ["ra-fed", "ram-fed", "ccfl-2"]


def config_of(rule: str, **changes: Any) -> RoundsConfig:
    masks = make_masks("coverage" if rule.startswith("ra") else "random")
    return rounds_config(rule=RULES[rule](), masks=masks, rounds=3, **changes)


def add_devices(world: World) -> tuple[ScriptedDevice, ...]:
    """Two that answer at once, one that answers when it is told to, one that never does."""
    return (
        world.add("a", value=0.25),
        world.add("b", value=-0.5, level=lambda _: 0.5),
        world.add("slow", value=0.75, sends=False),
        world.add("mute", sends=False),
    )


def finish(world: World, slow: ScriptedDevice) -> None:
    """Let every round have the movement of the slow one, and the deadline close it."""
    while not world.service.finished:
        round = world.state.round
        slow.offer(slow.movements[round])
        world.settle()
        world.wait(101)


def undisturbed(folder: Path, config: RoundsConfig) -> str:
    world = World(folder, config)
    _, _, slow, _ = add_devices(world)
    world.settle()
    finish(world, slow)
    world.stop()
    return world.service.model.digest


@pytest.mark.parametrize("graceful", [True, False])
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_movements_with_a_receipt_are_counted_by_the_next_process(
    tmp_path: Path, rule: str, graceful: bool
) -> None:
    config = config_of(rule, min_devices=4)
    expected = undisturbed(tmp_path / "calm", config)
    world = World(tmp_path / "run", config)
    a, b, slow, _ = add_devices(world)
    for round in (1, 2, 3):
        world.settle()
        assert world.state.round == round
        assert world.state.counted == {"a", "b"}
        if graceful:
            world.stop()
        else:
            world.crash()
        world.start()
        assert world.state.counted == {"a", "b"}
        assert world.service.course.resumed
        world.settle()
        slow.offer(slow.movements[round])
        world.settle()
        assert slow.receipts[-1] == (round, "counted")
        world.wait(101)
    assert world.service.finished
    assert world.service.model.digest == expected
    assert a.receipts == b.receipts == [(round, "counted") for round in (1, 2, 3)]
    lines, calm = (list(read_history(tmp_path / name)) for name in ("run", "calm"))
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert [line["levels"] for line in lines] == [line["levels"] for line in calm]
    assert lines[-1]["levels"][-1]["devices"] == 3
    assert lines[-1]["levels"][-1]["data_share"] == 0.75
    world.stop()
    assert not (tmp_path / "run" / ROUND).exists()
    assert os.listdir(tmp_path / "run" / MOVEMENTS) == []


@pytest.mark.parametrize(("rule", "taught"), [("ram-fed", [2, 3]), ("ra-fed", [2, 2])])
def test_movement_that_came_too_late_teaches_where_there_is_memory(
    tmp_path: Path, rule: str, taught: list[int]
) -> None:
    world = World(tmp_path / "run", rounds_config(rule=RULES[rule](), min_devices=3, rounds=2))
    a, _, late = world.add("a"), world.add("b"), world.add("late", sends=False)
    world.settle()
    late.level = lambda _: None
    a.sends = False
    world.wait(101)
    world.crash()
    world.start()
    late.offer(late.movements[1])
    world.settle()
    a.offer(a.movements[2])
    world.settle()
    assert world.service.finished
    lines = list(read_history(tmp_path / "run"))
    assert [line["levels"][0]["devices"] for line in lines] == taught
    world.stop()


def test_receipt_that_was_lost_with_the_process_is_given_without_an_upload(tmp_path: Path) -> None:
    world = World(tmp_path / "run", config_of("ra-fed", min_devices=4))
    a, *_ = add_devices(world)
    world.settle()
    world.crash()
    world.start()
    world.settle()
    before = len(a.heard)
    a.offer(a.movements[1])
    world.settle()
    (receipt,) = a.heard[before:]
    assert a.receipts[-1] == (1, "counted")
    assert receipt == a.heard[-1]
    world.stop()


def test_round_without_assignments_is_void_and_the_next_is_opened(tmp_path: Path) -> None:
    world = World(tmp_path / "run", config_of("ra-fed", min_devices=2))
    a = world.add("a")
    world.add("b").opened[1] = RoundOpen(  # it never bids in round 1
        round=1,
        plan_hash="",
        local_rule=world.machine.local_rule,
        steps=1,
        batch_size=1,
        bid_s=1,
        train_deadline_s=1,
    )
    world.settle()
    assert world.state.phase is RoundPhase.BIDDING
    world.crash()
    world.start()
    assert not world.service.course.resumed
    world.settle()
    world.wait(11)
    assert world.service.finished
    assert a.receipts == [(2, "counted"), (3, "counted"), (4, "counted")]
    world.stop()


def test_resumed_round_is_retained_again_and_its_devices_hear_their_groups(tmp_path: Path) -> None:
    world = World(tmp_path / "run", config_of("ra-fed", min_devices=4))
    *_, slow, _ = add_devices(world)
    world.settle()
    opened = world.retained(TOPICS.round)
    world.crash()
    world.broker.stop()
    world.broker.start(keep_retained=False)
    world.start()
    world.settle()
    assert isinstance(opened, RoundOpen)
    assert world.retained(TOPICS.round) == opened
    world.devices.remove(slow)
    slow.link.kill()
    again = world.add("slow", session=2)
    world.settle()
    assert again.receipts == [(1, "counted")]
    world.stop()


def test_device_that_left_while_nobody_listened_is_waited_for_a_little_only(tmp_path: Path) -> None:
    world = World(tmp_path / "run", rounds_config(rounds=1, train_deadline_s=1e6, away_s=10.0))
    a, b = world.add("a"), world.add("b", sends=False)
    world.settle()
    world.crash()
    b.link.kill()  # its will is retained
    world.devices.remove(b)
    world.settle_broker()
    world.start()
    world.settle()
    assert world.state.phase is RoundPhase.TRAINING
    world.wait(11)
    assert a.receipts == [(1, "counted")]
    assert world.service.finished
    world.stop()


def test_withdrawal_is_remembered(tmp_path: Path) -> None:
    world = World(tmp_path / "run", rounds_config(rounds=1, train_deadline_s=1e6))
    world.add("a")
    b = world.add("b", sends=False)
    c = world.add("c", sends=False)
    world.settle()
    run = world.run.about.run
    b.tell(Bid(device="b", round=1, level=None, reason="too hot", run=run))
    world.settle()
    world.crash()
    world.start()
    assert set(world.state.assigned) == {"a", "c"}
    c.offer(c.movements[1])
    world.settle()
    assert world.service.finished
    assert isinstance(world.retained(TOPICS.round), RoundClosed)
    world.stop()


def test_late_movement_for_memory_outlives_the_process(tmp_path: Path) -> None:
    digests = []
    for crashes in (False, True):
        folder = tmp_path / str(crashes)
        world = World(folder, config_of("ram-fed"))
        world.add("fast")
        slow = world.add("slow", value=0.4, sends=False)
        world.settle()
        world.wait(101)
        slow.offer(slow.movements[1])
        world.settle()
        assert slow.receipts == [(1, "memory")]
        if crashes:
            world.crash()
            world.start()
            assert world.state.late == {("slow", 1)}
            world.settle()
        for _ in range(2):
            world.wait(101)
        assert world.service.finished
        digests.append(world.service.model.digest)
        world.stop()
    assert digests[0] == digests[1]


def test_late_movement_for_memory_outlives_a_round_without_assignments(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digests = []
    for crashes in (False, True):
        world = World(tmp_path / str(crashes), config_of("ram-fed", min_participants=2))
        world.add("fast")
        slow = world.add(
            "slow", value=0.4, sends=False, level=lambda number: None if number == 2 else 1.0
        )
        world.settle()
        world.wait(101)
        slow.offer(slow.movements[1])
        world.settle()
        assert slow.receipts == [(1, "memory")]
        assert (world.state.round, world.state.phase) == (2, RoundPhase.BIDDING)
        for _ in range(2 if crashes else 0):
            world.crash()
            world.start()
            assert not world.service.course.resumed
            assert world.state.late == {("slow", 1)}
        world.wait(11)  # round 2 has too few offers
        assert world.state.round == 3
        world.wait(101)
        assert world.state.past[1].outcomes["slow"] is Outcome.MEMORY
        assert world.state.late == frozenset()
        world.wait(101)
        assert world.service.finished
        digests.append(world.service.model.digest)
        world.stop()
        assert os.listdir(tmp_path / str(crashes) / MOVEMENTS) == []
    assert digests[0] == digests[1]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_movement_with_a_receipt_is_not_screened_again(tmp_path: Path) -> None:
    """The large one came when nothing was usual yet; by name, it would come last."""
    digests = []
    for crashes in (False, True):
        world = World(
            tmp_path / str(crashes), rounds_config(rounds=1, min_devices=7, rms_limit=5.0)
        )
        large = world.add("z", value=10.0)
        small = [world.add(name, value=0.1, sends=False) for name in "abcde"]
        world.add("mute", sends=False)
        world.settle()
        for device in small:
            device.offer(device.movements[1])
        world.settle()
        assert large.receipts == [(1, "counted")]
        assert world.state.counted == set("abcdez")
        if crashes:
            world.crash()
            world.start()
            assert world.state.counted == set("abcdez")
            world.settle()
        world.wait(101)
        assert world.service.finished
        digests.append(world.service.model.digest)
        world.stop()
    assert digests[0] == digests[1]


def test_kept_movement_that_is_of_no_use_any_more_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path / "run", config_of("ra-fed", min_devices=4))
    a, *_ = add_devices(world)
    world.settle()
    world.crash()
    other = encode_movement(replace(a.movements[1], learning_rate=0.2))
    (tmp_path / "run" / MOVEMENTS / "00000001-a").write_bytes(other)
    world.start()
    assert world.state.counted == {"b"}
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "movement of 'a' for round 1" in record.getMessage()
    world.stop()


@pytest.mark.parametrize("mask", ["nested", "core"])
def test_next_process_names_the_same_groups_and_widths(tmp_path: Path, mask: str) -> None:
    config = rounds_config(
        masks=make_masks(mask, order="importance"),
        local_rule=LocalRule(learning_rate=0.1, widths="sandwich"),
        min_devices=4,
        rounds=3,
    )
    expected = undisturbed(tmp_path / "calm", config)
    world = World(tmp_path / "run", config)
    a, b, slow, _ = add_devices(world)
    first: dict[int, dict[str, Assignment]] = {}
    for round in (1, 2, 3):
        world.settle()
        said = {
            name: [each for each in device.heard if isinstance(each, Assignment)]
            for name, device in (("a", a), ("b", b), ("slow", slow))
        }
        first[round] = {name: each[-1] for name, each in said.items()}
        assert len(first[round]["a"].widths) == 3
        assert first[round]["b"].groups == first[round]["a"].widths[1]
        assert first[round]["b"].widths == first[round]["a"].widths[2:]
        if mask == "nested":
            assert first[round]["a"].widths == first[1]["a"].widths
        world.crash()
        world.start()
        world.settle()
        again = [each for each in slow.heard if isinstance(each, Assignment)]
        assert len(again) > len(said["slow"])
        assert again[-1] == first[round]["slow"]
        slow.offer(slow.movements[round])
        world.settle()
        world.wait(101)
    assert world.service.finished
    assert world.service.model.digest == expected
    world.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"local_rule": LocalRule(learning_rate=0.2)},
            "learning_rate 0.1, but the settings say 0.2",
        ),
        ({"steps": 3}, "steps 1, but the settings say 3"),
        ({"batch_size": 8}, "batch_size 4, but the settings say 8"),
        ({"up": Encoding(kind="fp16")}, "up fp32, but the settings say fp16"),
    ],
)
def test_settings_that_changed_while_a_round_is_open_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = config_of("ram-fed", min_devices=4)
    world = World(tmp_path / "run", config)
    add_devices(world)
    world.settle()
    world.crash()
    world.machine = replace(config, **changes)
    with pytest.raises(
        RunError, match=f"^round 1 is open with {message}; restore the old value until"
    ):
        world.start()
    world.run.close()
    world.machine = config
    world.start()
    assert world.state.counted == {"a", "b"}
    world.crash()
    with Run(tmp_path / "run") as run:
        run.rollback(0)
    world.machine = replace(config, **changes)
    world.start()
    assert not world.service.course.resumed
    world.stop()


def test_replay_that_was_counted_outlives_the_process(tmp_path: Path) -> None:
    digests = []
    for crashes in (False, True):
        config = rounds_config(
            rule=RULES["ccfl-1"](), masks=make_masks("random"), rounds=2, min_devices=3
        )
        world = World(tmp_path / str(crashes), config)
        fresh = world.add("fresh", value=0.1, sends=False)
        world.add("other", value=0.7)
        copies = world.add(
            "copies", value=0.3, keeps_copy=True, level=lambda number: 1.0 if number == 1 else None
        )
        world.settle()
        fresh.offer(fresh.movements[1])
        world.settle()
        assert copies.receipts == [(1, "counted"), (2, "counted")]
        assert world.state.round == 2
        if crashes:
            world.crash()
            world.start()
            assert world.state.replayed == {"copies"}
            world.settle()
        fresh.offer(fresh.movements[2])
        world.settle()
        assert world.service.finished
        digests.append(world.service.model.digest)
        world.stop()
    assert digests[0] == digests[1]


class Crash(Exception):
    """The process ends here."""


@pytest.mark.parametrize(
    ("rule", "where"),
    [(rule, where) for rule in RULE_NAMES for where in ("save", "prune", "record")]
    + [(rule, "memory") for rule in RULE_NAMES[1:]],
)
def test_crash_inside_a_commit_ends_with_the_same_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rule: str,
    where: str,
) -> None:
    config = config_of(rule, min_devices=4)
    expected = undisturbed(tmp_path / "calm", config)
    world = World(tmp_path / "run", config)
    _, _, slow, _ = add_devices(world)
    world.settle()
    slow.offer(slow.movements[1])
    world.settle()

    def crashes(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        owner: Any = DiskMemory if where == "memory" else Run
        patch.setattr(owner, "commit" if where == "memory" else where, crashes)
        world.clock.now += 101
        with pytest.raises(RunError, match="round 1 could not be committed"):
            world.settle()
    world.crash()
    world.start()
    world.settle()
    finish(world, slow)
    assert world.service.model.digest == expected
    assert not [each for each in caplog.records if "no longer be used" in each.getMessage()]
    world.stop()


def test_journal_that_is_damaged_is_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / ROUND)
    assert journal.read() is None
    bid = Bid(device="a", round=3, level=0.5, reason="because", samples=4, compute=2.5)
    opened = OpenRound(3, frozenset({"a", "b"}), {"a": bid}, {"a": {"hidden": (0, 2)}})
    terms = {"steps": 3, "clip_norm": None}
    journal.write(opened, terms)
    assert journal.read() == opened
    journal.check_terms(terms)
    with pytest.raises(
        RunError, match="round 3 is open with clip_norm None, but the settings say 2"
    ):
        journal.check_terms({**terms, "clip_norm": 2})
    whole = (tmp_path / ROUND).read_text()
    for text in (whole[:40], "[]", "{}", whole.replace("0.5", "7"), whole.replace("terms", "t")):
        (tmp_path / ROUND).write_text(text)
        with pytest.raises(RunError, match=r"round\.json is damaged"):
            journal.read()
    journal.clear()
    journal.clear()
    assert journal.read() is None


def test_open_round_is_forgotten_when_the_run_goes_back(tmp_path: Path) -> None:
    world = World(tmp_path / "run", config_of("ra-fed", min_devices=4))
    _, _, slow, _ = add_devices(world)
    world.settle()
    slow.offer(slow.movements[1])
    world.settle()
    world.wait(101)
    assert world.state.round == 2
    assert world.state.counted == {"a", "b"}
    world.crash()
    with Run(tmp_path / "run") as run:
        run.rollback(0)
    world.start()
    assert not world.service.course.resumed
    world.settle()
    assert world.state.round == 3
    world.stop()
