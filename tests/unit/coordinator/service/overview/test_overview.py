"""The overview of a run: what is told while it goes on, after a restart, and from its folder."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.rules import RULES
from coordinator.errors import ConfigError
from coordinator.rounds.report import DeviceRound
from coordinator.run.errors import RunError
from coordinator.run.folder import Run
from coordinator.run.steering import stopped
from coordinator.run.steering.settings import values_of
from coordinator.service.overview.blocks import step_squares
from coordinator.service.overview.facts import RunFacts, facts_of, keep_facts, kept_facts
from coordinator.service.overview.folder import overview_of
from coordinator.service.overview.overview import Overview
from coordinator.service.overview.rows import COLUMNS, MOST_ROUNDS
from coordinator.service.overview.strip import HELD, LEGEND, Strip, skipped_mark, trained_mark
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import encode_message
from tests.unit.coordinator.service.service_world import (
    PLAN,
    TOPICS,
    ScriptedDevice,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)

STATUS = {
    *("task", "run", "folder", "state", "phase", "asynchronous", "round", "rounds", "committed"),
    *("waits_for", "deadline_s", "started", "time", "version", "broker_connected", "devices"),
    *("levels", "skips", "accuracy", "deploy", "best", "level_reports", "totals", "settings"),
    *("paused", "stopping", "sequence", "delivery"),
}


def bid(device: ScriptedDevice, round: int, code: str | None, reason: str = "skip: why") -> None:
    """A skip with its cause, as real devices tell it."""
    run = device.world.run.about.run
    device.tell(Bid(device=device.name, round=round, level=None, reason=reason, code=code, run=run))


def row_of(world: World, name: str) -> dict[str, Any]:
    (row,) = [each for each in world.service.overview.devices() if each["device"] == name]
    return row


def entry(round: int, *parts: DeviceRound, **changes: Any) -> dict[str, Any]:
    """A line of history."""
    usual: dict[str, Any] = {
        "round": round,
        "devices": [
            {name: getattr(part, name) for name in DeviceRound.__slots__} for part in parts
        ],
        "movements": {"memory": 0, "late": 0, "rejected": 0},
        "refusals": [],
        "accuracy": None,
        "levels": [],
        "deploy": None,
        "seconds": 2.0,
        "coverage_min": 1,
        "trained_coverage_min": 1,
        "oldest_memory": None,
        "digest": "d",
        "time": 1000.0 + round,
    }
    return usual | changes


def made(*lines: dict[str, Any]) -> Overview:
    facts = RunFacts(task="t", run="0" * 16, folder=None, plan=PLAN)
    return Overview(facts, history=lines, clock=lambda: 5000.0)


# -- while a run goes on -------------------------------------------------------------------------


def test_run_is_shown_from_its_start_to_its_end(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(), evaluate=None)
    overview = world.service.overview
    assert overview.status()["state"] == "starting"
    assert set(overview.status()) == STATUS
    one = world.add("one")
    world.settle()
    status = overview.status()
    assert (status["state"], status["broker_connected"]) == ("waiting", True)
    assert status["waits_for"] == "devices: 1 of 2 are here (round.min_devices)"
    assert row_of(world, "one")["state"] == "idle"
    two = world.add("two", level=lambda _: 0.5, sends=False)
    world.settle()
    status = overview.status()
    assert (status["state"], status["phase"]) == ("running", "collecting movements")
    assert (status["round"], status["levels"]) == (1, {"1": 1, "0.5": 1})
    assert 0 < status["deadline_s"] <= 100
    assert (row_of(world, "one")["state"], row_of(world, "two")["state"]) == ("kept", "training")
    assert status["devices"] == {
        "known": 2,
        "present": 2,
        "training": 1,
        "quarantined": 0,
        "paused": 0,
    }
    two.sends = True
    two.send(1)
    status = overview.status()
    assert (status["state"], status["committed"], status["round"]) == ("finished", 2, 2)
    assert status["totals"]["trained"] == 4
    first, second = overview.rounds()
    assert overview.rounds(since=1) == [second]
    assert first["bytes_up"] + second["bytes_up"] == status["totals"]["bytes_up"]
    row = overview.device("two")
    assert set(row) == {*COLUMNS, "rounds"}
    assert [each["level"] for each in row["rounds"]] == [0.5, 0.5]
    assert (row["contribution"], row["staleness"], row["samples"]) == (0.5, 0, 10)
    assert overview.strip()["devices"] == {"one": "99", "two": "44"}
    assert one.verdicts == [(1, "counted"), (2, "counted")]


def test_everything_can_be_sent_as_json(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rule=RULES["ram-fed"]()))
    world.add("one")
    world.add("two")
    world.settle()
    overview = world.service.overview
    found = [overview.status(), overview.devices(), overview.rounds(), overview.blocks()]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_skips_have_their_causes_and_errors_stay(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9))
    world.add("one", sends=False)
    two = world.add("two")
    world.settle()
    bid(two, 1, "failed", "skip: the disk is full")
    world.settle()
    overview = world.service.overview
    assert overview.status()["skips"] == {"failed": 1}
    row = row_of(world, "two")
    assert (row["state"], row["code"], row["level"]) == ("skipped", "failed", None)
    assert row["last_error"] == row["reason"] == "skip: the disk is full"
    bid(two, 1, "battery", "skip: battery 20 %")
    world.settle()
    assert row_of(world, "two")["last_error"] == "skip: the disk is full"


def test_condition_of_a_device_is_shown_without_what_steers_terminals(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9))
    one = world.add("one")
    world.settle()
    one.tell(
        Condition(
            device="one",
            battery=0.25,
            charging=True,
            temperature_c=40.0,
            memory_free_mb=10.0,
            memory_mb=20.0,
            energy_today_j=1.0,
            energy_budget_j=2.0,
            labels={"site": "berlin"},
            profile="pixel_4",
            version="1.2\x1b[2J",
            last_error="a\x07b\u202ec",
        )
    )
    world.settle()
    row = row_of(world, "one")
    assert (row["battery"], row["charging"], row["labels"]) == (0.25, True, {"site": "berlin"})
    assert (row["version"], row["last_error"]) == ("1.2 [2J", "a b c")


def test_error_has_the_time_at_which_it_became_known() -> None:
    now = [100.0]
    overview = Overview(RunFacts(task="t", run="0", folder=None, plan=PLAN), clock=lambda: now[0])

    def error_time() -> float | None:
        found: float | None = overview.device("one")["last_error_time"]
        return found

    overview.joined("one")
    assert error_time() is None
    overview.condition(Condition(device="one", last_error="no room"))
    now[0] = 200.0
    overview.condition(Condition(device="one", last_error="no room"))  # told again, not new
    assert error_time() == 100.0
    overview.left("one", "no data", 2)
    assert error_time() == 200.0


def test_device_that_leaves_with_an_error_is_offline_and_says_why(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9))
    one = world.add("one")
    world.settle()
    gone = Presence(name="one", session=1, online=False, reason="no data\x1b", exit_code=2)
    one.link.publish(TOPICS.presence("one"), encode_message(gone), retain=True)
    world.settle()
    row = row_of(world, "one")
    assert (row["state"], row["present"]) == ("offline", False)
    assert row["last_error"] == "no data  (exit code 2)"


def test_owner_paused_the_device(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9))
    world.add("one", sends=False)
    two = world.add("two", level=lambda _: 1.0, sends=False)
    world.settle()
    bid(two, 1, "paused", "skip: its owner paused it")
    world.settle()
    assert row_of(world, "two")["state"] == "paused"
    assert world.service.overview.status()["devices"]["paused"] == 1


def test_quarantine_is_shown_until_it_is_lifted(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9, quarantine_after=1, train_deadline_s=5.0))
    bad = world.add("bad", value=float("nan"))
    world.add("good")
    world.settle()
    row = row_of(world, "bad")
    assert row["state"] == "quarantined"
    assert row["quarantined"]["round"] == 1
    assert (row["rejected"], row["last_error"].startswith("round 1: ")) == (1, True)
    assert world.service.overview.status()["devices"]["quarantined"] == 1
    world.service.helm.allow("bad", by="anna")
    assert row_of(world, "bad")["quarantined"] is None
    assert bad.receipts[0] == (1, "rejected")


def test_late_movement_changes_the_mark_of_its_round(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9, train_deadline_s=5.0, away_s=1.0))
    world.add("one", level=lambda number: 1.0 if number == 1 else None)
    slow = world.add("slow", sends=False)
    world.settle()
    world.wait(6.0)
    overview = world.service.overview
    assert overview.strip()["devices"]["slow"][0] == "o"
    assert overview.device("slow")["rounds"][0]["outcome"] == "silent"
    slow.send(1)
    assert overview.strip()["devices"]["slow"][0] == "l"
    assert (row_of(world, "slow")["late"], slow.receipts[-1]) == (1, (1, "late"))


def test_broker_that_is_lost_is_waited_for(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=9))
    world.add("one", sends=False)
    world.add("two")
    world.settle()
    overview = world.service.overview
    overview.linked(False)
    status = overview.status()
    assert (status["state"], status["waits_for"]) == ("waiting", "the broker")
    assert status["deadline_s"] is None
    overview.linked(True)
    assert overview.status()["state"] == "running"


def test_blocks_tell_coverage_memory_and_the_last_step(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rule=RULES["ram-fed"](), rounds=1))
    world.add("one", value=0.25)
    world.add("two", value=0.25, level=lambda _: 0.5)
    world.settle()
    found = world.service.overview.blocks()
    assert found["axes"] == [{"name": "hidden", "groups": [2, 2, 1, 1]}]
    assert [tensor["name"] for tensor in found["tensors"]] == [each.name for each in PLAN.tensors]
    blocks = [block for tensor in found["tensors"] for block in tensor["blocks"]]
    assert [block["id"] for block in blocks] == list(range(PLAN.block_count))
    assert sum(block["parameters"] for block in blocks) == PLAN.parameters
    assert sum(tensor["parameters"] for tensor in found["tensors"]) == PLAN.parameters
    for block in blocks:
        assert block["signature"] == [list(each) for each in PLAN.signature(block["id"])]
        assert (block["last_covered"], block["age"], block["memory_age"]) == (1, 0, 0)
        assert block["movement"] == pytest.approx(0.25, rel=1e-5)
    assert {block["covered"] for block in blocks} == {1, 2}


def test_asynchronous_run_is_shown(worlds: Worlds) -> None:
    world = worlds.make(fragments_config())
    world.add("one")
    world.add("two", level=lambda _: None)
    world.settle()
    overview = world.service.overview
    status = overview.status()
    assert (status["asynchronous"], status["state"]) == (True, "finished")
    assert (status["rounds"], status["totals"]["trained"]) == (6, 6)
    assert row_of(world, "one")["trained"] == 6
    assert row_of(world, "two")["state"] == "skipped"
    assert overview.blocks()["tensors"][0]["blocks"][0]["movement"] is None


# -- afterwards ----------------------------------------------------------------------------------


def test_restarted_run_knows_what_history_tells(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=3), evaluate=None)
    world.add("one")
    world.add("two", level=lambda number: None if number == 2 else 0.5)
    while len(world.history) < 2:
        world.settle()
    before = world.service.overview
    world.crash()
    world.devices.clear()
    world.start()
    after = world.service.overview
    assert after.status()["totals"] == before.status()["totals"]
    assert after.strip()["devices"] == before.strip()["devices"]
    assert after.rounds() == before.rounds()
    assert [row["device"] for row in after.devices()] == ["one", "two"]
    for row, was in zip(after.devices(), before.devices(), strict=True):
        assert not row["present"]
        for name in ("bytes_up", "bytes_down", "train_s", "trained", "skipped", "contribution"):
            assert row[name] == was[name], name
        assert row["samples"] == 10


def test_run_that_is_not_served_is_read_from_its_folder(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.add("one")
    world.add("two")
    world.settle()
    shown = world.service.overview.status()
    keep_facts(world.folder, world.service.overview.facts)
    world.stop()
    status = overview_of(world.folder).status()
    assert set(status) == STATUS
    assert (status["state"], status["started"]) == ("finished", None)
    for name in ("totals", "committed", "round", "rounds", "settings", "level_reports"):
        assert status[name] == shown[name], name
    blocks = overview_of(world.folder).blocks()
    assert blocks["tensors"][0]["blocks"][0]["covered"] == 4
    (world.folder / "settings.json").write_bytes(b"damaged")
    assert kept_facts(world.folder) == {}
    assert overview_of(world.folder).status()["state"] == "stopped"


def test_run_that_is_about_to_be_served_is_starting(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.stop()
    with Run(world.folder) as run:
        assert overview_of(world.folder).status()["state"] == "stopped"
        run.note_starting(True)
        assert overview_of(world.folder).status()["state"] == "starting"
        with pytest.raises(RunError, match="the run is starting; try again in a moment"):
            Run(world.folder)
        run.note_starting(False)
        assert overview_of(world.folder).status()["state"] == "stopped"
        run.note_starting(True)
    assert overview_of(world.folder).status()["state"] == "stopped"  # it was killed
    with Run(world.folder):
        assert overview_of(world.folder).status()["state"] == "stopped"


def test_finished_run_that_got_more_rounds_is_stopped(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.add("one")
    world.add("two")
    world.service._steering.begin(values_of(world.machine))
    world.settle()
    keep_facts(world.folder, world.service.overview.facts)
    world.stop()
    assert overview_of(world.folder).status()["state"] == "finished"
    stopped.lengthen(world.folder, 30, "anna")
    assert overview_of(world.folder).status()["state"] == "stopped"


def test_damaged_line_of_history_keeps_the_run_readable(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=3))
    world.add("one")
    world.add("two")
    world.settle()
    world.stop()
    path = world.folder / "history.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:20] + b"#" + second[21:] + third)
    assert len(overview_of(world.folder).rounds()) == 1


def test_folder_without_a_run_is_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="not a run's folder"):
        overview_of(tmp_path)


# -- rows and sequences --------------------------------------------------------------------------


def test_what_is_told_again_is_no_change() -> None:
    overview = made()
    overview.joined("a")
    told = Condition(device="a", battery=0.5, labels={"site": "berlin"})
    overview.condition(told)
    before = overview.sequence
    overview.condition(told)  # in the same second
    overview.asked(["b"], 1)
    overview.asked(["b"], 1)
    assert [row["device"] for row in overview.devices(before)] == ["b"]
    assert overview.sequence == before + 1
    (row,) = (row for row in overview.devices() if row["device"] == "a")
    assert tuple(row) == COLUMNS


def part(device: str, level: float | None = 1.0, **changes: Any) -> DeviceRound:
    return DeviceRound(device, level, "as told", **changes)


def test_only_rows_that_changed_are_given() -> None:
    overview = made()
    for name in ("a", "b", "c"):
        overview.joined(name)
    seen = overview.sequence
    assert overview.devices(since=seen) == []
    overview.bid(Bid(device="b", round=1, level=0.5, reason="why"))
    (changed,) = overview.devices(since=seen)
    assert (changed["device"], changed["sequence"]) == ("b", overview.sequence)
    assert [row["device"] for row in overview.devices()] == ["a", "b", "c"]


def test_waiting_ends_with_a_change() -> None:
    overview = made()
    before = overview.sequence
    assert overview.wait(before, 0.0) == before
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(overview.wait(before, 60.0)))
    waiting.start()
    overview.joined("a")
    waiting.join(60.0)
    assert found == [overview.sequence]


def test_reading_does_not_wait_while_another_reads_and_rows_are_the_readers_own() -> None:
    overview = made(entry(1, part("a")))
    row = overview.devices()[0]
    row["labels"]["site"] = "mine"
    row["state"] = "mine"
    overview.rounds()[0]["accuracy"] = 7
    assert overview.devices()[0]["labels"] == {}
    assert overview.rounds()[0]["accuracy"] is None


def test_unknown_device_is_named_with_the_nearest() -> None:
    overview = made(entry(1, part("kitchen-pi")))
    with pytest.raises(ConfigError, match="did you mean 'kitchen-pi'"):
        overview.device("kitchen-py")


def test_joules_are_unknown_until_a_device_tells_them() -> None:
    overview = made(entry(1, part("a")), entry(2, part("a", energy_j=2.5), part("b")))
    assert [row["joules"] for row in overview.rounds()] == [None, 2.5]
    assert overview.status()["totals"]["joules"] == 2.5
    assert [row["joules"] for row in overview.devices()] == [2.5, None]


def test_best_model_is_that_of_the_level_to_deploy() -> None:
    def levels(half: float) -> list[dict[str, Any]]:
        usual = {"parameters": 1, "devices": 1}
        return [{"level": 1.0, "accuracy": 0.5, **usual}, {"level": 0.5, "accuracy": half, **usual}]

    overview = made(
        entry(1, part("a"), levels=levels(0.7), deploy=0.5, accuracy=0.5),
        entry(2, part("a"), levels=levels(0.9), deploy=0.5, accuracy=0.5),
        entry(3, part("a"), levels=levels(0.8), deploy=0.5, accuracy=0.5),
    )
    status = overview.status()
    assert status["best"] == {"round": 2, "accuracy": 0.9, "level": 0.5}
    assert (status["accuracy"], status["deploy"]) == (0.5, 0.5)
    overview.line({"rolled_back": {"from": 3, "to": 1}})
    assert overview.status()["best"] == {"round": 1, "accuracy": 0.7, "level": 0.5}


def test_rounds_that_were_undone_are_left_out_but_were_spent() -> None:
    overview = made(*(entry(n, part("a")) for n in (1, 2, 3)))
    overview.line({"rolled_back": {"from": 3, "to": 1}})
    assert [(row["round"], row["event"]) for row in overview.rounds()] == [
        (1, None),
        (1, "went back from round 3 to round 1"),
    ]
    assert overview.status()["committed"] == 1
    assert overview.status()["totals"]["trained"] == 3
    overview.line(entry(4, part("a")))
    assert overview.status()["committed"] == 2


def test_news_are_seen_by_those_who_ask_for_what_is_new() -> None:
    overview = made(entry(1, part("a")))
    gone = {"device": "a", "by": "ann"}
    overview.line({"forgotten": gone})
    assert [row["round"] for row in overview.rounds()] == [1, 1]
    assert overview.rounds(since=1) == []
    overview.line(entry(2, part("a")))
    assert [row["event"] for row in overview.rounds(since=1)] == ["forgot a (ann)", None]


def test_memory_is_bounded_and_totals_are_not() -> None:
    many = HELD + 40
    overview = made(*(entry(n, part("a"), part("b", None, code="heat")) for n in range(1, many)))
    assert len(overview.rounds()) == HELD
    assert len(overview.device("a")["rounds"]) == MOST_ROUNDS
    strip = overview.strip(10_000)
    assert strip["rounds"] == list(range(many - HELD, many))
    assert strip["devices"] == {"a": "9" * HELD, "b": "h" * HELD}
    assert overview.strip(3)["rounds"] == [many - 3, many - 2, many - 1]
    assert overview.status()["totals"]["trained"] == many - 1
    assert overview.status()["totals"]["skipped"] == many - 1


def test_settings_and_operators_words_are_shown() -> None:
    overview = made()
    overview.began()
    overview.paused("ann", 5000.0)
    status = overview.status()
    assert (status["state"], status["paused"]) == ("paused", {"by": "ann", "time": 5000.0})
    overview.resumed()
    overview.stopping("round")
    assert (overview.status()["state"], overview.status()["stopping"]) == ("stopping", "round")
    overview.settings({"learning_rate": 0.5}, rounds=20)
    assert overview.status()["settings"] == {"learning_rate": 0.5}
    assert overview.status()["rounds"] == 20
    overview.stopped()
    assert overview.status()["state"] == "stopped"


def test_facts_name_the_settings_of_the_run(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(participants=3))
    facts = facts_of(world.run, world.machine)
    assert facts.settings["rule"] == "ra-fed"
    assert facts.settings["masks"] == "coverage"
    assert (facts.settings["participants"], facts.rounds) == (3, 2)


# -- strips --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "mark"),
    [(1.0, "9"), (0.91, "9"), (0.9, "8"), (0.75, "7"), (0.5, "4"), (0.25, "2"), (0.1, "1")],
)
def test_level_has_its_character(level: float, mark: str) -> None:
    assert trained_mark(level) == mark
    assert mark in LEGEND


def test_causes_have_their_characters() -> None:
    codes = ("battery", "heat", "memory", "network", "deadline", "schedule", "data", None)
    assert "".join(map(skipped_mark, codes)) == "bhmntpss"


def test_strip_shows_absence_where_nothing_was_marked() -> None:
    strip = Strip()
    strip.mark(2, "9")
    strip.mark(5, "b")
    assert strip.read(0, 8) == "..9..b.."
    strip.mark(5, "l")
    assert strip.read(4, 6) == ".l"
    strip.mark(5 + HELD, "4")
    assert strip.read(6, 6 + HELD) == "." * (HELD - 1) + "4"


def test_steps_are_measured_piece_by_piece() -> None:
    random = np.random.default_rng(1)
    sizes = np.array([3, 1, 7, 2, 5], dtype=np.int64)
    before, after = (random.normal(size=18).astype(np.float32) for _ in range(2))
    parts = np.split(after - before, np.cumsum(sizes)[:-1])
    wanted = [float(np.square(each, dtype=np.float64).sum()) for each in parts]
    for piece in (1, 4, 8, 100):
        assert step_squares(after, before, sizes, piece=piece) == pytest.approx(wanted)


def test_model_of_very_many_blocks_has_its_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.service.overview.blocks.MOST", PLAN.block_count - 1)
    tensors = made().blocks()["tensors"]
    assert [tensor["blocks"] for tensor in tensors] == [[]] * len(PLAN.tensors)
    assert sum(tensor["parameters"] for tensor in tensors) == PLAN.parameters
