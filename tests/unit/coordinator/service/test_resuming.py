"""A coordinator that ends in the middle of a round and is started again: same round, same bits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregate.memory import DiskMemory
from coordinator.aggregate.rules import RULES
from coordinator.aggregate.rules.ram_fed import RamFed
from coordinator.checksums import checksum
from coordinator.masks import make_masks
from coordinator.rounds.state import OpenRound
from coordinator.rounds.synchronous import RoundPhase, RoundsConfig
from coordinator.run.folder import MOVEMENTS, ROUND, Run, RunError, read_history
from coordinator.run.journal import Journal
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.messages.transfer import Complaint
from tests.unit.coordinator.service.service_world import (
    TOPICS,
    ScriptedDevice,
    World,
    Worlds,
    fragments_config,
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
    """Let every round have the movement of the slow one; the deadline closes the first."""
    while not world.service.finished:
        send_and_close(world, slow)


def send_and_close(world: World, slow: ScriptedDevice) -> None:
    """Let the round have the movement of the slow one, and close, by the deadline if need be."""
    round = world.state.round
    slow.send(round)
    assert (round, "kept") in slow.receipts
    if world.state.round == round:  # later rounds do not wait for the mute one
        world.wait(101)


def undisturbed(worlds: Worlds, config: RoundsConfig) -> str:
    world = worlds.make(config, "calm")
    _, _, slow, _ = add_devices(world)
    world.settle()
    finish(world, slow)
    return world.service.model.digest


Play = Callable[[World, bool], None]


def expect_the_same(worlds: Worlds, config: RoundsConfig, play: Play) -> None:
    """A run that is played without and with crashes ends, and with the same model and reports of
    its levels."""
    digests = []
    for crashes in (False, True):
        world = worlds.make(config, str(crashes))
        play(world, crashes)
        assert world.service.finished
        taught = [line["levels"] for line in world.history if "levels" in line]
        digests.append((world.service.model.digest, taught))
        world.stop()
        assert os.listdir(world.folder / MOVEMENTS) == []
    assert digests[0] == digests[1]


@pytest.mark.parametrize("graceful", [True, False])
@pytest.mark.parametrize("rule", RULE_NAMES)
def test_movements_with_a_receipt_are_counted_by_the_next_process(
    worlds: Worlds, rule: str, graceful: bool
) -> None:
    config = config_of(rule, min_devices=4)
    expected = undisturbed(worlds, config)
    world = worlds.make(config)
    a, b, slow, _ = add_devices(world)
    for round in (1, 2, 3):
        world.settle()
        assert world.state.round == round
        assert set(world.state.kept) == {"a", "b"}
        if graceful:
            world.stop()
        else:
            world.crash()
        world.start()
        assert set(world.state.kept) == {"a", "b"}
        assert world.service.course.resumed
        world.settle()
        send_and_close(world, slow)
    assert world.service.finished
    assert world.service.model.digest == expected
    assert a.verdicts == b.verdicts == [(round, "counted") for round in (1, 2, 3)]
    assert [line["round"] for line in world.history] == [1, 2, 3]
    taught = [line["levels"] for line in world.history]
    calm = read_history(world.folder.with_name("calm"))
    assert taught == [line["levels"] for line in calm]
    assert taught[-1][-1]["devices"] == 3
    assert taught[-1][-1]["data_share"] == 0.75
    world.stop()
    assert not (world.folder / ROUND).exists()
    assert os.listdir(world.folder / MOVEMENTS) == []


@pytest.mark.parametrize(("rule", "taught"), [("ram-fed", [2, 3]), ("ra-fed", [2, 2])])
def test_movement_that_came_too_late_teaches_where_there_is_memory(
    worlds: Worlds, rule: str, taught: list[int]
) -> None:
    world = worlds.make(rounds_config(rule=RULES[rule](), min_devices=3, rounds=2))
    a, _, late = world.add("a"), world.add("b"), world.add("late", sends=False)
    world.settle()
    late.level = lambda _: None
    a.sends = False
    world.wait(101)
    world.restart()
    late.send(1)
    a.send(2)
    assert world.service.finished
    assert [line["levels"][0]["devices"] for line in world.history] == taught


def test_receipt_that_was_lost_with_the_process_is_given_without_an_upload(worlds: Worlds) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=4))
    a, *_ = add_devices(world)
    world.settle()
    world.restart()
    before = len(a.heard)
    a.send(1)
    (receipt,) = a.heard[before:]
    assert a.receipts[-1] == (1, "kept")
    assert receipt == a.heard[-1]


def test_resumed_round_is_retained_again_and_its_devices_hear_their_groups(worlds: Worlds) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=4))
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
    assert again.receipts == [(1, "kept")]


def test_device_that_left_while_nobody_listened_is_waited_for_a_little_only(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1, train_deadline_s=1e6, away_s=10.0))
    a, b = world.add("a"), world.add("b", sends=False)
    world.settle()
    world.crash()
    b.link.kill()  # its will is retained
    world.devices.remove(b)
    world.broker.run()
    world.start()
    world.settle()
    assert world.state.phase is RoundPhase.TRAINING
    world.wait(11)
    assert a.verdicts == [(1, "counted")]
    assert world.service.finished


def test_withdrawal_is_remembered(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1, train_deadline_s=1e6))
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
    c.send(1)
    assert world.service.finished
    assert isinstance(world.retained(TOPICS.round), RoundClosed)


def test_late_movement_for_memory_outlives_the_process(worlds: Worlds) -> None:
    def play(world: World, crashes: bool) -> None:
        fast = world.add("fast")
        slow = world.add("slow", value=0.4, sends=False)
        world.settle()
        fast.sends = False
        world.wait(101)
        slow.send(1)
        assert slow.verdicts == [(1, "memory")]
        if crashes:
            world.crash()
            world.start()
            assert world.state.late == {("slow", 1)}
            world.settle()
        for round in (2, 3):
            fast.send(round)  # the slow one is not waited for

    expect_the_same(worlds, config_of("ram-fed"), play)


def test_late_movement_for_memory_outlives_a_round_without_assignments(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    def play(world: World, crashes: bool) -> None:
        fast = world.add("fast")
        slow = world.add(
            "slow", value=0.4, sends=False, level=lambda number: None if number == 2 else 1.0
        )
        world.settle()
        fast.sends = False
        world.wait(101)
        slow.send(1)
        assert slow.verdicts == [(1, "memory")]
        assert (world.state.round, world.state.phase) == (2, RoundPhase.BIDDING)
        for _ in range(2 if crashes else 0):
            world.crash()
            world.start()
            assert world.service.course.resumed
            assert world.state.late == {("slow", 1)}
            world.settle()
        world.wait(11)  # round 2 has too few offers
        assert world.state.round == 3
        world.wait(101)
        assert world.state.past[1].outcomes["slow"] is Outcome.MEMORY
        assert world.state.late == frozenset()
        world.wait(101)

    expect_the_same(worlds, config_of("ram-fed", min_participants=2), play)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def test_verdict_on_a_movement_is_the_same_in_the_next_process(worlds: Worlds) -> None:
    """The large one came when nothing was known; the others of its round tell."""

    def play(world: World, crashes: bool) -> None:
        large = world.add("z", value=10.0)
        small = [world.add(name, value=0.1, sends=False) for name in "abcde"]
        world.add("mute", sends=False)
        world.settle()
        for device in small:
            device.send(1)
        assert large.receipts == [(1, "kept")]
        assert set(world.state.kept) == set("abcdez")
        if crashes:
            world.crash()
            world.start()
            assert set(world.state.kept) == set("abcdez")
            world.settle()
        world.wait(101)
        assert large.verdicts == [(1, "rejected")]
        assert "median RMS of this round's 6 movements" in large.all(Receipt)[-1].reason
        assert all(device.verdicts == [(1, "counted")] for device in small)
        (line,) = world.history
        assert line["movements"] == {"counted": 5, "memory": 0, "late": 0, "rejected": 1}

    expect_the_same(worlds, rounds_config(rounds=1, min_devices=7), play)


def test_kept_movement_that_is_of_no_use_any_more_is_logged(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=4))
    a, *_ = add_devices(world)
    world.settle()
    world.crash()
    other = encode_movement(replace(a.movements[1], learning_rate=0.2))
    (world.folder / MOVEMENTS / "00000001-a").write_bytes(other + checksum(other))
    world.start()
    assert set(world.state.kept) == {"b"}
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "movement of 'a' for round 1" in record.getMessage()


@pytest.mark.parametrize("mask", ["nested", "core"])
def test_next_process_names_the_same_groups_and_widths(worlds: Worlds, mask: str) -> None:
    config = rounds_config(
        masks=make_masks(mask, order="importance"),
        local_rule=LocalRule(learning_rate=0.1, widths="sandwich"),
        min_devices=4,
        rounds=3,
    )
    expected = undisturbed(worlds, config)
    world = worlds.make(config)
    a, b, slow, _ = add_devices(world)
    first: dict[int, dict[str, Assignment]] = {}
    for round in (1, 2, 3):
        world.settle()
        said = {each.name: each.all(Assignment) for each in (a, b, slow)}
        first[round] = {name: each[-1] for name, each in said.items()}
        assert len(first[round]["a"].widths) == 3
        assert first[round]["b"].groups == first[round]["a"].widths[1]
        assert first[round]["b"].widths == first[round]["a"].widths[2:]
        if mask == "nested":
            assert first[round]["a"].widths == first[1]["a"].widths
        world.restart()
        again = slow.all(Assignment)
        assert len(again) > len(said["slow"])
        assert again[-1] == first[round]["slow"]
        send_and_close(world, slow)
    assert world.service.finished
    assert world.service.model.digest == expected


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
    worlds: Worlds, changes: dict[str, Any], message: str
) -> None:
    config = config_of("ram-fed", min_devices=4)
    world = worlds.make(config)
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
    assert set(world.state.kept) == {"a", "b"}
    world.crash()
    with Run(world.folder) as run:
        run.rollback(0)
    world.machine = replace(config, **changes)
    world.start()
    assert not world.service.course.resumed


def test_replay_that_was_counted_outlives_the_process(worlds: Worlds) -> None:
    def play(world: World, crashes: bool) -> None:
        fresh = world.add("fresh", value=0.1, sends=False)
        world.add("other", value=0.7)
        copies = world.add(
            "copies", value=0.3, keeps_copy=True, level=lambda number: 1.0 if number == 1 else None
        )
        world.settle()
        fresh.send(1)
        assert copies.receipts == [(1, "kept"), (1, "counted"), (2, "kept")]
        assert world.state.round == 2
        if crashes:
            world.crash()
            world.start()
            assert set(world.state.replayed) == {"copies"}
            world.settle()
        fresh.send(2)

    masks = make_masks("random")
    config = rounds_config(rule=RULES["ccfl-1"](), masks=masks, rounds=2, min_devices=3)
    expect_the_same(worlds, config, play)


class Crash(Exception):
    """The process ends here."""


@pytest.mark.parametrize(
    ("rule", "where"),
    [(rule, where) for rule in RULE_NAMES for where in ("save", "prune", "record_line")]
    + [(rule, "memory") for rule in RULE_NAMES[1:]],
)
def test_crash_inside_a_commit_ends_with_the_same_model(
    worlds: Worlds,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rule: str,
    where: str,
) -> None:
    config = config_of(rule, min_devices=4)
    expected = undisturbed(worlds, config)
    world = worlds.make(config)
    _, _, slow, _ = add_devices(world)
    world.settle()
    slow.send(1)

    def crashes(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        owner: Any = DiskMemory if where == "memory" else Run
        patch.setattr(owner, "commit" if where == "memory" else where, crashes)
        world.clock.now += 101
        with pytest.raises(RunError, match="round 1 could not be committed"):
            world.settle()
    world.restart()
    finish(world, slow)
    assert world.service.model.digest == expected
    assert [line["round"] for line in world.history] == [1, 2, 3]
    assert not [each for each in caplog.records if "no longer be used" in each.getMessage()]


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


def test_open_round_is_forgotten_when_the_run_goes_back(worlds: Worlds) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=4))
    _, _, slow, _ = add_devices(world)
    world.settle()
    slow.send(1)
    world.wait(101)
    assert world.state.round == 2
    assert set(world.state.kept) == {"a", "b"}
    world.crash()
    with Run(world.folder) as run:
        run.rollback(0)
    world.start()
    assert not world.service.course.resumed
    world.settle()
    assert world.state.round == 3
    world.stop()


# -- a round that is bid for -----------------------------------------------------------------------


def rounds_bid_for(worlds: Worlds, config: RoundsConfig, *, crashes: bool) -> World:
    """Five devices; in every round they hear the opening, and bid only when the coordinator was
    ended, or when it would have been."""
    world = worlds.make(config, f"crashes-{crashes}")
    devices = [world.add(each, value=0.1 * n, bids=False) for n, each in enumerate("abcde", 1)]
    world.settle()
    while not world.service.finished:
        round, asked = world.state.round, set(world.state.selected)
        assert world.state.phase is RoundPhase.BIDDING
        if crashes:
            world.restart()
            assert world.service.course.resumed
            assert (world.state.round, world.state.phase) == (round, RoundPhase.BIDDING)
            assert world.state.selected == asked
        for device in devices:
            if round in device.opened:
                device.bid(device.opened[round])
        world.settle()
    return world


@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("changes", [{}, {"participants": 2}, {"participants": 3}])
@pytest.mark.parametrize("select", ["before", "after"])
def test_round_that_was_bid_for_has_the_same_number_devices_and_draws(
    worlds: Worlds, rule: str, changes: dict[str, Any], select: str
) -> None:
    masks = make_masks("random")
    config = replace(config_of(rule, min_devices=5, select=select, **changes), masks=masks)
    calm = rounds_bid_for(worlds, config, crashes=False)
    disturbed = rounds_bid_for(worlds, config, crashes=True)
    assert disturbed.service.model.digest == calm.service.model.digest
    for one, other in zip(calm.history, disturbed.history, strict=True):
        assert (one["round"], one["devices"]) == (other["round"], other["devices"])


def test_draw_is_not_repeated_among_the_devices_that_came_back(worlds: Worlds) -> None:
    """The others may be on their way; those who were asked are asked again."""
    config = config_of("ra-fed", min_devices=6, participants=2, select="before")
    world = worlds.make(config)
    devices = {name: world.add(name, bids=False) for name in "abcdef"}
    world.settle()
    asked = set(world.state.selected)
    for name in asked:
        world.leave(devices[name])
    world.crash()
    world.broker.stop()
    world.broker.start(keep_retained=False)
    world.start()
    world.settle()
    again = [world.add(name, session=2, bids=False) for name in sorted(asked)]
    world.settle()
    assert world.state.selected == asked
    for device in again:
        device.bid(device.opened[1])
    world.settle()
    assert {each["device"] for each in world.history[0]["devices"]} == asked


def test_resumed_round_waits_for_as_many_devices_as_a_round_needs(worlds: Worlds) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=2))
    one, other = world.add("a", bids=False), world.add("b", bids=False)
    world.settle()
    world.crash()
    for device in (one, other):
        world.leave(device)
    world.broker.run()
    world.broker.stop()
    world.broker.start(keep_retained=False)
    world.start()
    world.add("a", session=2)
    world.settle()
    world.wait(1000)
    assert (world.state.round, world.state.phase) == (1, RoundPhase.BIDDING)
    world.add("b", session=2, bids=False)
    world.settle()
    assert world.state.phase is RoundPhase.BIDDING
    world.wait(11)  # the time for bids began when the second came
    assert world.history[0]["round"] == 1
    assert [each["device"] for each in world.history[0]["devices"]] == ["a"]


def test_paused_run_does_not_wait_for_devices_to_return(worlds: Worlds) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=2))
    one, other = world.add("a", bids=False), world.add("b", bids=False)
    world.settle()
    world.service.helm.pause("anna")
    world.crash()
    for device in (one, other):
        world.leave(device)
    world.broker.run()
    world.start()
    world.settle()
    world.wait(11)
    assert world.service.course.idle
    assert not (world.folder / ROUND).exists()


def test_void_round_is_not_resumed(worlds: Worlds) -> None:
    world = worlds.make(config_of("ra-fed", min_devices=2, min_participants=2))
    world.add("a")
    other = world.add("b", bids=False)
    world.settle()
    world.leave(other)
    world.wait(11)
    assert (world.state.round, world.state.phase) == (1, RoundPhase.WAITING)
    assert not (world.folder / ROUND).exists()
    world.restart()
    assert not world.service.course.resumed
    world.add("b", session=2)
    world.settle()
    assert [line["round"] for line in world.history] == [2, 3, 4]


def test_replay_that_came_while_others_bid_is_counted_by_the_next_process(worlds: Worlds) -> None:
    """Also if its device is gone by then; if it is not, nothing is sent twice."""

    def play(world: World, crashes: bool, *, gone: bool = False) -> None:
        world.add("a")
        slow = world.add("slow")
        copies = world.add("copies", keeps_copy=True, level=lambda n: 1.0 if n == 1 else None)
        slow.bids = False
        world.settle()
        slow.bid(slow.opened[1])
        world.settle()
        assert (world.state.round, world.state.phase) == (2, RoundPhase.BIDDING)
        assert set(world.state.replayed) == {"copies"}
        if crashes:
            world.crash()
            if gone:
                world.leave(copies)
                world.broker.run()
            world.start()
            assert set(world.state.replayed) == {"copies"}
            world.settle()
        slow.bid(slow.opened[2])
        world.settle()
        world.wait(11)
        assert world.history[1]["round"] == 2
        replayed = [each["device"] for each in world.history[1]["devices"] if each["replayed"]]
        assert replayed == ["copies"]

    masks = make_masks("random")
    config = rounds_config(rule=RULES["ccfl-1"](), masks=masks, rounds=2, min_devices=3)
    expect_the_same(worlds, config, play)
    world = worlds.make(config, "gone")
    play(world, True, gone=True)
    calm = worlds.make(config, "False")
    assert world.service.model.digest == calm.service.model.digest


def test_settings_of_a_round_that_was_bid_for_are_those_of_its_opening(worlds: Worlds) -> None:
    def play(world: World, crashes: bool) -> None:
        devices = [world.add(name, bids=False) for name in "ab"]
        world.settle()
        world.service.helm.change("learning_rate", 0.5, "anna")
        if crashes:
            world.restart()
            world.restart()
        while not world.service.finished:
            for device in devices:
                device.bid(device.opened[world.state.round])
            world.settle()
        rates = [device.opened[n].local_rule.learning_rate for n in (1, 2, 3)]
        assert rates == [0.1, 0.5, 0.5]

    expect_the_same(worlds, config_of("ram-fed"), play)


def test_round_that_nobody_began_is_void_under_other_terms(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(config_of("ra-fed"))
    devices = [world.add(name, bids=False) for name in "ab"]
    world.settle()
    world.crash()
    world.machine = replace(config_of("ra-fed"), steps=7)
    world.start()
    assert not world.service.course.resumed
    assert "so round 1 is void" in caplog.text
    world.settle()
    assert world.state.round == 2
    assert devices[0].opened[2].steps == 7


def test_device_that_is_quarantined_while_others_bid_is_not_asked_by_the_next_process(
    worlds: Worlds,
) -> None:
    def play(world: World, crashes: bool) -> None:
        devices = [world.add(name, value=0.1 * n, bids=False) for n, name in enumerate("abc", 1)]
        world.settle()
        world.service.helm.quarantine("b", "it is loud", "anna")
        world.settle()
        if crashes:
            world.restart()
        assert world.state.selected == {"a", "c"}
        while not world.service.finished:
            round = world.state.round
            for device in devices:
                if round in device.opened:
                    device.bid(device.opened[round])
            world.settle()

    expect_the_same(worlds, config_of("ram-fed"), play)


def test_number_of_a_resumed_round_that_is_void_is_not_used_again(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds.make(rounds_config(min_participants=2))
    a = world.add("a", bids=False)
    world.settle()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "note_journal", failing_disk)
        world.add("b", bids=False)
        with pytest.raises(RunError):
            world.settle()  # the round is in the journal, and not in the counters
    world.restart()
    assert (world.state.round, world.run.opened) == (1, 1)
    a.bid(a.opened[1])
    world.settle()
    world.leave(world.devices[-1])
    world.wait(11)
    world.wait(11)
    assert world.state.phase is RoundPhase.WAITING  # round 1, which a heard of, is void
    world.restart()
    world.add("b", session=3)
    world.settle()
    assert sorted(a.opened) == [1, 2]


def failing_disk(*_: object) -> None:
    raise OSError(5, "input/output error")


def test_file_of_a_void_round_that_a_power_cut_brought_back_opens_nothing(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_participants=2))
    world.add("a")
    b = world.add("b", bids=False)
    world.settle()
    path = world.folder / ROUND
    journal = path.read_bytes()
    world.leave(b)
    world.wait(11)
    assert world.state.phase is RoundPhase.WAITING
    assert not path.exists()
    world.crash()
    path.write_bytes(journal)
    world.start()
    world.settle()
    assert world.state.phase is RoundPhase.WAITING
    world.add("b", session=3)
    world.settle()
    assert [line["round"] for line in world.history] == [2, 3]


def test_crash_between_journal_and_counters_opens_the_same_round(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds.make(config_of("ra-fed"))
    world.add("a", bids=False)
    world.settle()

    def crashes(*_: Any) -> None:
        raise OSError(5, "the process ends here")

    with monkeypatch.context() as patch:
        patch.setattr(Run, "note_journal", crashes)
        world.add("b", bids=False)
        with pytest.raises(RunError, match="cannot be written"):
            world.settle()
    world.restart()
    assert world.state.round == 1
    assert world.state.selected == {"a", "b"}
    assert world.devices[0].opened.keys() == {1}


# -- rounds by invitation ------------------------------------------------------------------------


def by_invitation(folder: Path, *, crashes: bool) -> World:
    """Six devices, two in a round, and a coordinator that ends in every round, or never."""
    world = World(folder, config_of("ccfl-2", min_devices=6, participants=2))
    skips = {"a": 1, "c": 2, "e": 3}
    devices = [
        world.add(name, value=0.1 * number, sends=False, level=_except(skips.get(name)))
        for number, name in enumerate("abcdef", 1)
    ]
    world.settle()
    while not world.service.finished:
        round, selected = world.state.round, set(world.state.selected)
        assert len(selected) == 2
        if crashes:
            world.crash()
            world.start()
            assert world.state.selected == selected
            world.settle()
        for device in devices:
            invited = [m for m in device.heard if isinstance(m, RoundOpen) and m.round == round]
            assert any(not each.by_invitation for each in invited) is (device.name in selected)
            if round in device.movements:
                device.offer(device.movements[round])
        world.settle()
        world.wait(101)
    world.stop()
    return world


def _except(skipped: int | None) -> Callable[[int], float | None]:
    return lambda number: None if number == skipped else 1.0


def test_run_by_invitation_ends_with_the_same_model_after_crashes(tmp_path: Path) -> None:
    calm = by_invitation(tmp_path / "calm", crashes=False)
    disturbed = by_invitation(tmp_path / "run", crashes=True)
    assert disturbed.service.model.digest == calm.service.model.digest


def test_invited_device_that_was_started_again_gets_invitation_and_assignment(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, config_of("ra-fed", min_devices=3, participants=1))
    devices = {name: world.add(name, sends=False) for name in "abc"}
    world.settle()
    (name,) = world.state.assigned
    (other, _) = sorted(devices.keys() - {name})
    for each, session in ((other, 2), (name, 3)):
        devices[each].link.kill()
        again = world.add(each, session=session)
        world.settle()
    assert again.verdicts == [(1, "counted")]
    assert not [m for m in world.devices[-2].heard if m == again.opened[1]]


# -- surveys -------------------------------------------------------------------------------------


@pytest.fixture
def surveyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small model count as one with BatchNorm; its devices say that they run no level."""
    monkeypatch.setattr("coordinator.service.service.can_survey", lambda *_: True)


def refuse(device: ScriptedDevice, asked: Survey) -> None:
    for level in asked.levels:
        device.tell(
            SurveyFinding(
                device=device.name,
                round=asked.round,
                wants=asked.wants,
                level=level,
                samples=0,
                run=asked.run,
                reason="hot",
            )
        )


@pytest.mark.usefixtures("surveyed")
@pytest.mark.parametrize("rule", ["ra-fed", "ram-fed"])
def test_movement_that_comes_during_a_survey_is_late_whether_or_not_it_is_killed(
    worlds: Worlds, rule: str
) -> None:
    config = config_of(rule, min_devices=3, survey_every=1, survey_s=50.0)

    def play(world: World, crashes: bool) -> None:
        a, b = world.add("a", sends=False), world.add("b", value=-0.5, sends=False)
        slow = world.add("slow", sends=False)
        world.settle()
        while not world.service.finished:
            round = world.state.round
            for device in (a, b):
                device.send(round)
            if not isinstance(world.retained(TOPICS.round), Survey):
                world.wait(101)  # the round closes without the slow one
            asked = world.retained(TOPICS.round)
            assert isinstance(asked, Survey)
            assert (asked.round, asked.wants) == (round, "statistics")
            assert [line["round"] for line in world.history] == list(range(1, round))
            if crashes:
                world.restart()
                assert world.retained(TOPICS.round) == asked
            slow.send(round)
            assert (round, "counted") not in slow.receipts
            if crashes:
                world.restart()
            for device in (a, b):
                refuse(device, asked)
            world.wait(51)  # the slow one says nothing
            slow.send(round)
        late = "memory" if rule == "ram-fed" else "late"
        assert slow.receipts[0] == (1, late)
        levels = world.history[-1]["levels"]
        assert {level["statistics_devices"] for level in levels} == {0}

    expect_the_same(worlds, config, play)


@pytest.mark.usefixtures("surveyed")
def test_device_that_came_and_left_in_a_round_that_is_killed_still_counts(worlds: Worlds) -> None:
    rule = RamFed(population="all")
    config = rounds_config(rule=rule, min_devices=2, rounds=2, survey_every=1, survey_s=50.0)

    def play(world: World, crashes: bool) -> None:
        a, b = world.add("a", value=0.25, sends=False), world.add("b", value=-0.5)
        world.settle()
        passing = world.add("passing")
        world.settle()
        world.leave(passing)
        for round in (1, 2):
            a.send(round)
            world.settle()
            asked = world.retained(TOPICS.round)
            assert isinstance(asked, Survey)
            assert asked.round == round
            if crashes:
                world.restart()
            for device in (a, b):
                refuse(device, asked)
            world.settle()

    expect_the_same(worlds, config, play)


@pytest.mark.usefixtures("surveyed")
def test_silent_devices_delay_one_survey_only(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=2, rounds=2, survey_every=1, survey_s=50.0))
    a, _ = world.add("a"), world.add("old")
    world.settle()
    for _ in (1, 2):
        asked = world.retained(TOPICS.round)
        assert isinstance(asked, Survey)
        refuse(a, asked)
        world.settle()
        if asked.round == 1:
            assert world.history == []
            world.wait(51)
    assert world.service.finished
    assert isinstance(world.retained(TOPICS.round), RoundClosed)


@pytest.mark.usefixtures("surveyed")
def test_asynchronous_run_that_is_killed_in_its_survey_asks_again(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(updates=4, survey_s=50.0))
    devices = world.add("a"), world.add("b")
    world.settle()
    asked = world.retained(TOPICS.round)
    assert isinstance(asked, Survey)
    digest = world.service.model.digest
    world.restart()
    assert world.retained(TOPICS.round) == asked
    assert world.service.course.surveying.under_way
    for device in devices:
        refuse(device, asked)
    world.settle()
    assert world.service.finished
    assert isinstance(world.retained(TOPICS.round), RoundClosed)
    assert world.service.model.digest == digest
    assert world.history[-1]["levels"][0]["statistics_devices"] == 0
    world.restart()  # a run that was surveyed is over
    assert world.service.finished


@pytest.mark.usefixtures("surveyed")
def test_finding_that_is_unsound_is_complained_about(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(rounds_config(min_devices=2, rounds=1, survey_s=50.0))
    a, _ = world.add("a"), world.add("b")
    world.settle()
    asked = world.retained(TOPICS.round)
    assert isinstance(asked, Survey)
    finding = SurveyFinding(
        device="a", round=1, wants="statistics", level=1.0, samples=10**6, run=asked.run
    )
    a.tell(finding)
    world.settle()
    complaint = next(each for each in a.heard if isinstance(each, Complaint))
    assert "the survey asks for 256" in complaint.reason
    # Larger than any other message of a device may be, but no finding of this model is so large.
    a.tell(replace(finding, samples=1, means={"x": bytes(2**17)}))
    world.settle()
    world.wait(51)
    assert world.service.finished
    assert "bytes; at most 4096 are allowed" in caplog.text
