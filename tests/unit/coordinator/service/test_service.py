"""The coordinator over a broker in memory, with devices that speak the wire."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.rules import RULES
from coordinator.cli import main
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import MOVEMENTS, UPLOADS, RunError, read_result
from coordinator.service.receiving import UploadFile
from coordinator.service.store import SAVE_S
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Bid, Receipt, RoundClosed
from edge_sdk.protocol.messages.transfer import (
    Credit,
    Evaluation,
    Presence,
    TaskNotice,
    Want,
)
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.protocol.packs.index import decode_index
from edge_sdk.protocol.plan.blocks import select_blocks
from edge_sdk.transport.link import LinkEvent, Received
from edge_sdk.transport.uploads import pack_chunk
from tests.messages import make_outgoing
from tests.unit.coordinator.service.service_world import (
    PLAN,
    TASK,
    TOPICS,
    ScriptedDevice,
    World,
    Worlds,
    blob_hashes,
    fragments_config,
    rounds_config,
    saved_model,
)
from tests.waiting import HANGS_S, until

START = PLAN.flatten(saved_model().weights)


def test_synchronous_run_adds_up_and_ends(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    one, two = world.add("one", value=0.25), world.add("two", value=0.75)
    world.settle()
    assert world.service.finished
    # Both train everything, so ra-fed moves every value by the mean of the two, twice.
    assert world.service.model.theta == pytest.approx(START + 2 * 0.5, abs=1e-6)
    assert world.service.model.buffers["mean"] == pytest.approx(np.full(6, 0.5))
    assert one.verdicts == two.verdicts == [(1, "counted"), (2, "counted")]
    # Only the last round is closed in so many words: to devices that is the end of the run.
    assert sum(isinstance(message, RoundClosed) for message in one.heard) == 1
    assert one.last_round == RoundClosed(round=2, run=world.run.about.run)
    assert [line["round"] for line in world.history] == [1, 2]
    assert world.history[-1]["digest"] == world.service.model.digest
    # What the devices were given is the model, bit for bit.
    blocks, buffers = one.fetched[2]
    now = world.service.model.theta - np.float32(0.5)
    whole = select_blocks(now, np.arange(PLAN.block_count), PLAN.block_offsets)
    assert blocks.values == pytest.approx(whole.values, abs=1e-6)
    assert buffers["mean"] == pytest.approx(np.full(6, 0.5))
    assert not list((world.folder / MOVEMENTS).iterdir())
    world.stop()
    assert world.retained(TOPICS.coordinator) == Presence(
        name="coordinator", session=1000, online=False
    )


def test_compressed_movements_are_decoded_into_the_run_folder(
    worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))  # it may be RAM
    world = worlds.make(rounds_config(up=Encoding.parse("fp16")))
    world.add("one", value=0.25)
    world.add("two", value=0.75)
    world.settle()
    assert world.service.finished
    assert world.service.model.theta == pytest.approx(START + 2 * 0.5, abs=1e-6)


def test_broker_holds_the_present_and_the_previous_model_and_no_more(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=4))
    one = world.add("one")
    world.add("two")
    world.settle()
    assert one.notice is not None
    notice = one.notice
    expected = blob_hashes(notice.plan, notice.manifest, *notice.graphs.values())
    held = dict(world.chunks)
    opened = one.opened[4]
    assert opened.model is not None
    index = decode_index(PLAN, b"".join(held[each] for each in opened.model.chunks))
    expected |= blob_hashes(opened.model, *index.packs)
    # Of the model after round 4, which nobody was told of, there is as much again.
    assert expected <= held.keys()
    assert len(held) <= len(expected) + len(blob_hashes(opened.model, *index.packs))
    first = one.opened[1].model
    assert first is not None
    assert not set(first.chunks) & held.keys()


def test_level_and_skip_are_heard(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    half = world.add("half", level=lambda _: 0.5)
    skips = world.add("skips", level=lambda _: None)
    world.settle()
    assert world.service.finished
    assert half.verdicts == [(1, "counted")]
    assert skips.verdicts == []
    line = world.history[0]
    assert [(each["device"], each["level"]) for each in line["devices"]] == [
        ("half", 0.5),
        ("skips", None),
    ]
    assert line["devices"][0]["bytes_down"] > 0
    moved = world.service.model.theta != START
    assert 0 < moved.mean() < 1


def test_replay_is_counted_and_checked(worlds: Worlds) -> None:
    config = rounds_config(rule=RULES["ccfl-1"](), masks=make_masks("random"), rounds=3)
    world = worlds.make(config)
    world.add("fresh", value=0.1)
    copies = world.add(
        "copies", value=0.3, keeps_copy=True, level=lambda number: 1.0 if number == 1 else None
    )
    world.settle()
    assert world.service.finished
    assert copies.verdicts == [(1, "counted"), (2, "counted"), (3, "counted")]
    lines = world.history
    assert [device["replayed"] for line in lines for device in line["devices"]] == [
        *(False, False),
        *(True, False),
        *(True, False),
    ]


def test_late_movement_enters_memory(worlds: Worlds) -> None:
    config = rounds_config(rule=RULES["ram-fed"](), rounds=3)
    world = worlds.make(config)
    fast = world.add("fast")
    slow = world.add("slow", sends=False)
    world.settle()
    fast.sends = False
    assert world.state.round == 1
    world.wait(101)  # the deadline: round 1 closes without it
    assert slow.opened.keys() == {1, 2}
    slow.send(1)
    assert slow.verdicts == [(1, "memory")]
    world.wait(101)
    world.stop()
    lines = world.history
    assert [line["oldest_memory"] for line in lines] == [0, 1]


def test_lost_receipt_is_said_again_without_a_second_upload(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=3))
    one = world.add("one")
    waits = world.add("waits", sends=False)
    world.settle()
    assert one.receipts == [(1, "kept")]
    one.send(1)
    assert one.receipts == [(1, "kept"), (1, "kept")]
    waits.send(1)
    one.offer(one.movements[1])  # its round is closed now
    world.settle()
    assert one.receipts[-1] == (1, "counted")
    credits = one.all(Credit)
    uploads = {each.upload for each in credits}
    assert len(uploads) == len([each for each in credits if each.complete])


def test_asynchronous_run_mixes_every_arrival(worlds: Worlds) -> None:
    world = worlds.make(fragments_config())
    one, two = world.add("one", level=lambda _: 0.5), world.add("two")
    world.settle()
    assert world.service.finished
    counted = [outcome for device in (one, two) for _, outcome in device.receipts]
    assert counted.count("counted") == 6
    assert world.service.model.version == 6
    assert (world.service.model.theta != START).any()
    assert isinstance(world.retained(TOPICS.round), RoundClosed)
    lines = world.history
    assert [line["round"] for line in lines] == [2, 4, 6]
    assert world.run.rounds() == [0, 2, 4, 6]


def test_asynchronous_device_trains_from_the_version_its_opening_named(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(updates=20, train_deadline_s=1e6))
    slow = world.add("slow", sends=False)
    world.add("quick", level=lambda number: 1.0 if number < 8 else None)
    world.settle()
    assert world.service.model.version > 1
    blocks, _ = slow.fetched[min(slow.opened)]
    first = select_blocks(START, blocks.ids, PLAN.block_offsets)
    assert np.array_equal(blocks.values, first.values)
    # Its chunks are still there, however many versions went by.
    opened = slow.opened[min(slow.opened)]
    assert opened.model is not None
    assert set(opened.model.chunks) <= world.chunks.keys()
    version = world.service.model.version
    slow.send(min(slow.opened))
    assert world.service.model.version > version
    world.wait(SAVE_S)
    assert slow.receipts[0] == (min(slow.opened), "counted")


def asynchronous_world(worlds: Worlds) -> tuple[World, ScriptedDevice]:
    """One movement is in the model, and in no checkpoint."""
    world = worlds.make(fragments_config(updates=20, train_deadline_s=1e6))
    world.add("idle", level=lambda _: None)
    one = world.add("one", sends=False, level=lambda number: 1.0 if number < 3 else None)
    world.settle()
    one.send(min(one.opened))
    assert world.service.model.version == 1
    return world, one


def test_asynchronous_receipt_waits_for_the_checkpoint(worlds: Worlds) -> None:
    world, one = asynchronous_world(worlds)
    round = min(one.opened)
    assert (one.receipts, world.run.rounds()) == ([], [0])
    chunks = len([each for each in one.heard if isinstance(each, Credit) and not each.complete])
    one.offer(one.movements[round])  # it has heard nothing, and asks again
    world.settle()
    credits = one.all(Credit)
    assert credits[-1].complete
    assert len([each for each in credits if not each.complete]) == chunks
    assert one.verdicts == []
    world.wait(SAVE_S)
    assert (one.receipts, world.run.rounds()) == ([(round, "counted")], [0, 1])
    one.send(round)
    assert one.verdicts == [(round, "counted")] * 2


def test_asynchronous_movement_is_let_go_when_a_checkpoint_has_it(worlds: Worlds) -> None:
    world, _ = asynchronous_world(worlds)
    world.wait(SAVE_S)
    assert not world.history  # its report is still to come
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is UploadFile]


def test_asynchronous_movement_without_a_receipt_is_late_after_a_crash(worlds: Worlds) -> None:
    world, one = asynchronous_world(worlds)
    world.restart()
    assert world.service.model.version == 0
    one.send(min(one.opened))
    assert one.verdicts == [(min(one.opened), "late")]


def test_asynchronous_receipt_is_given_at_a_stop(worlds: Worlds) -> None:
    world, one = asynchronous_world(worlds)
    world.stop()
    one.pump()
    assert one.verdicts == [(min(one.opened), "counted")]
    world.start()
    assert world.service.model.version == 1


def test_asynchronous_versions_are_published_as_time_allows(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(updates=12, train_deadline_s=1e6))
    world.crash()
    world.clock.slow_s = 1.0
    world.start()  # publishing the first version takes long
    world.clock.slow_s = 0.0
    devices = [world.add("one"), world.add("two")]
    world.settle()
    assert world.service.finished
    opened = [each for device in devices for each in device.opened.values()]
    assert len({each.model for each in opened}) == 1
    # All were trained from version 0, and count as that old.
    assert world.service.model.version == 12
    blocks, _ = devices[0].fetched[max(devices[0].fetched)]
    assert np.array_equal(
        blocks.values, select_blocks(START, blocks.ids, PLAN.block_offsets).values
    )


def test_report_counts_what_became_of_movements_and_says_why(worlds: Worlds) -> None:
    config = rounds_config(rule=RULES["ram-fed"](), rounds=2, min_devices=3)
    world = worlds.make(config)
    one = world.add("one")
    late, evil = world.add("late", sends=False), world.add("evil", sends=False)
    world.settle()
    one.sends = False
    evil.offer_bytes(b"\xff" * 3000, 1)
    world.settle()
    world.wait(101)
    late.offer(late.movements[1])
    late.send(1, run="f" * 16)
    evil.send(2, answers=5)
    one.send(2)
    first, second = world.history
    assert first["movements"] == {"counted": 1, "memory": 0, "late": 0, "rejected": 1}
    (refusal,) = first["refusals"]
    assert (refusal["device"], refusal["round"], refusal["outcome"]) == ("evil", 1, "rejected")
    assert "not a movement" in refusal["reason"]
    assert second["movements"] == {"counted": 1, "memory": 1, "late": 0, "rejected": 1}
    assert [each["device"] for each in second["refusals"]] == ["late", "evil"]


@pytest.mark.parametrize(
    "config",
    [rounds_config(rounds=1), fragments_config(train_deadline_s=1e6)],
    ids=["rounds", "async"],
)
def test_device_that_starts_anew_gets_its_groups_again(
    worlds: Worlds, config: RoundsConfig | FragmentsConfig
) -> None:
    world = worlds.make(config)
    first = world.add("one", sends=False)
    world.add("two", sends=False)
    world.settle()
    world.leave(first)
    again = world.add("one", session=2)
    world.settle()
    assert min(again.movements) == min(first.movements)
    said = "kept" if isinstance(config, RoundsConfig) else "counted"
    assert again.receipts[0] == (min(first.movements), said)


@pytest.mark.parametrize("copies", [(0, 0), (0, 7), (3, 40)])
def test_messages_that_come_twice_and_late_change_nothing(
    worlds: Worlds, copies: tuple[int, int]
) -> None:
    digests = []
    for number, tamper in enumerate([None, lambda _name, _event: copies]):
        world = worlds.make(rounds_config(rule=RULES["ram-fed"](), rounds=3), f"{number}")
        world.broker.tamper = tamper
        world.add("one", value=0.25)
        world.add("two", value=0.5, level=lambda _: 0.5)
        world.settle()
        assert world.service.finished
        digests.append(world.service.model.digest)
    assert digests[0] == digests[1]


def test_loop_serves_to_the_end_and_lets_devices_leave(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    devices = [world.add("one"), world.add("two")]
    stop = threading.Event()
    thread = threading.Thread(target=world.service.serve, args=(stop,))
    thread.start()

    def ended() -> bool:
        world.broker.run()
        for device in world.devices:
            device.pump()
        if world.service.finished and world.devices:
            for device in devices:
                device.link.kill()  # the broker tells by their wills
            world.devices.clear()
        return not thread.is_alive()

    until(ended)
    stop.set()
    thread.join(HANGS_S)
    assert world.service.finished
    assert world.state.present == frozenset()


def test_loop_ends_when_it_is_asked_to(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    world.settle()
    stop = threading.Event()
    stop.set()
    world.service.serve(stop)
    assert not world.service.finished
    world.stop()
    gone = world.retained(TOPICS.coordinator)
    assert isinstance(gone, Presence)
    assert not gone.online


def test_commit_that_fails_ends_the_process_and_the_next_goes_on(worlds: Worlds) -> None:
    def fails(_: object, __: object) -> LevelScores:
        raise OSError("the disk is full")

    world = worlds.make(rounds_config(rounds=1), evaluate=fails)
    one = world.add("one")
    world.add("two")
    with pytest.raises(RunError, match="round 1 could not be committed"):
        world.settle()
    assert one.verdicts == []
    world.crash()
    again = worlds.make(rounds_config(rounds=1))
    again.add("one"), again.add("two")
    again.settle()
    assert again.service.finished
    assert again.service.model.version == 1
    again.stop()


def test_finished_run_that_is_started_again_is_finished(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    world.add("one"), world.add("two")
    world.settle()
    world.stop()
    world.start()
    world.settle()
    assert world.service.finished
    assert world.run.opened == 1
    assert isinstance(world.retained(TOPICS.round), RoundClosed)


def test_finished_run_that_is_started_again_gives_the_last_receipts(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    one, _ = world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    world.crash()
    world.start()
    stop = threading.Event()
    thread = threading.Thread(target=world.service.serve, args=(stop,))
    thread.start()
    del one.heard[:]  # its receipt was lost
    one.offer(one.movements[1])

    def ended() -> bool:
        world.broker.run()
        for device in world.devices:
            device.pump()
        if one.receipts:
            world.clock.now += 10
        return not thread.is_alive()

    until(ended)
    stop.set()
    thread.join(HANGS_S)
    assert one.receipts == [(1, "counted")]


def test_broker_that_comes_back_empty_is_filled_again(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2, train_deadline_s=1e6))
    one, two = world.add("one"), world.add("two", sends=False)
    world.settle()
    before = dict(world.broker.retained)
    world.broker.stop()
    world.settle()
    world.clock.now += 1e7  # time without a broker does not count
    world.broker.start(keep_retained=False)
    world.settle()
    assert dict(world.broker.retained) == before
    two.send(1)
    assert one.verdicts == two.verdicts == [(1, "counted")]
    assert one.opened.keys() == {1, 2}


def test_devices_may_come_before_the_coordinator(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    world.crash()
    world.add("one"), world.add("two")
    for _ in range(3):
        world.broker.run()
        for device in world.devices:
            device.pump()
    world.start()
    world.settle()
    assert world.service.finished


def test_will_of_an_older_session_is_ignored(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1))
    one = world.add("one", session=7, sends=False)
    world.settle()
    stale = Presence(name="one", session=6, online=False)
    world.publish(TOPICS.presence("one"), encode_message(stale))
    assert world.present == {"one"}
    world.publish(TOPICS.presence("one"), one.gone())
    assert world.present == set()


def test_farewell_of_a_device_is_shown_with_its_reason(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(rounds_config(min_devices=1))
    for name in ("one", "two", "three"):
        world.add(name, session=7, sends=False)
    world.settle()
    with caplog.at_level(logging.INFO):
        for name, reason, code in (
            ("one", "its data does not fit\nthe task", 3),
            ("two", "the run is finished", 0),
            ("three", "", None),  # of an earlier version
        ):
            gone = Presence(name=name, session=7, online=False, reason=reason, exit_code=code)
            world.publish(TOPICS.presence(name), encode_message(gone))
    said = [(each.levelname, each.message) for each in caplog.records if "left" in each.message]
    assert said == [
        ("WARNING", "one left: its data does not fit the task (exit code 3)"),
        ("INFO", "two left: the run is finished"),
        ("INFO", "three left"),
    ]


def test_want_is_answered_directly_and_only_with_what_is_there(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(), retained_chunks=False)
    got: dict[str, bytes] = {}
    link = world.broker.open_link(name="asks", deliver=lambda e: _note(e, got))
    link.subscribe(TOPICS.down_chunks("asks"), bulk=True)
    world.settle()
    assert not world.chunks
    notice = world.retained(TOPICS.task)
    assert isinstance(notice, TaskNotice)
    hashes = notice.plan.chunks
    want = Want(device="asks", chunks=(*hashes, b"?" * 16))
    link.publish(TOPICS.up_control("asks"), encode_message(want))
    world.settle()
    assert got.keys() == {TOPICS.down_chunk("asks", hash) for hash in hashes}
    assert b"".join(got[TOPICS.down_chunk("asks", each)] for each in hashes) == PLAN.encoded


def test_accuracy_stops_the_run_and_is_in_the_history(worlds: Worlds) -> None:
    said = iter([0.2, 0.6, 0.9])
    config = rounds_config(rounds=50, target_accuracy=0.85)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, next(said)))
    world.add("one"), world.add("two")
    world.settle()
    assert world.service.finished
    assert [line["accuracy"] for line in world.history] == [0.2, 0.6, 0.9]


def scored(levels: LevelScores, *accuracies: float) -> LevelScores:
    """The first levels with these accuracies."""
    pairs = zip(levels.levels, accuracies, strict=False)
    return replace(levels, levels=tuple(replace(each, accuracy=share) for each, share in pairs))


def test_level_to_deploy_stops_the_run_and_is_in_the_history(
    worlds: Worlds, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rounds_config(rounds=50, target_accuracy=0.85)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, 0.4, 0.9))
    world.add("one", level=lambda _: 0.5), world.add("two")
    world.settle()
    assert world.service.finished
    (line,) = world.history
    small = line["levels"][1]["level"]
    assert (line["accuracy"], line["deploy"]) == (0.4, small)
    assert [each["accuracy"] for each in line["levels"]] == [0.4, 0.9]
    assert main(["history", str(world.folder)]) == 0
    assert "accuracy  40.00%" in (said := capsys.readouterr().out)
    assert f"deploy level {small:g}  90.00%" in said
    kept = read_result(world.folder).levels
    assert (kept.deploy, kept.rescale) == (small, config.local_rule.rescale)
    assert kept.by_level[small].groups == config.unscored().by_level[small].groups


def test_void_rounds_try_nobodys_patience_across_a_restart(worlds: Worlds) -> None:
    said = iter([0.5, 0.4, 0.4])
    skips = {1, 3, 4, 5}
    config = rounds_config(rounds=50, patience=2)
    world = worlds.make(config, evaluate=lambda _, levels: scored(levels, next(said)))
    for name in ("one", "two"):
        world.add(name, level=lambda n: None if n in skips or n > 6 else 1.0)
    world.settle()
    for _ in range(4):
        world.wait(11)
    assert [line["round"] for line in world.history] == [2, 6]
    world.stop()
    world.start()
    for device in world.devices:
        device.level = lambda _: 1.0
    world.settle()
    world.wait(11)
    assert world.service.finished
    assert len(world.history) == 3


def test_evaluations_of_devices_are_averaged_by_samples(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    one, two = world.add("one"), world.add("two", sends=False)
    world.settle()
    run = world.run.about.run
    for device, samples, loss, accuracy in ((one, 30, 1.0, 0.5), (two, 10, 2.0, 0.9)):
        device.tell(
            Evaluation(
                device=device.name, run=run, round=1, samples=samples, loss=loss, accuracy=accuracy
            )
        )
    world.settle()
    two.send(1)
    line = world.history[0]
    assert line["evaluations"] == {
        "devices": 2,
        "samples": 40,
        "loss": pytest.approx(1.25),
        "accuracy": pytest.approx(0.6),
        "own_accuracy": pytest.approx(0.7),
        "own_deviation": pytest.approx(0.2),
    }
    world.stop()


# -- hostile devices -----------------------------------------------------------------------------


def test_hostile_messages_cost_nobody_anything(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    one, two = world.add("one"), world.add("two", sends=False)
    evil = world.broker.open_link(name="evil", deliver=lambda _: None)
    world.settle()
    random = np.random.default_rng(5)
    run = world.run.about.run
    bid = Bid(device="two", round=1, level=None, reason="not mine", run=run)
    topics = [TOPICS.up_control("evil"), TOPICS.up_chunk("evil"), TOPICS.presence("evil")]
    for number in range(60):
        evil.publish(topics[number % 3], random.bytes(int(random.integers(1, 200))))
    evil.publish(TOPICS.up_control("evil"), encode_message(bid))
    evil.publish(f"tessera/v1/{TASK}/up/EVIL/control", encode_message(bid))
    presence = Presence(name="two", session=99, online=False)
    evil.publish(TOPICS.presence("evil"), encode_message(presence))
    world.settle()
    assert world.present >= {"one", "two"}
    two.send(1)
    assert world.service.finished
    assert one.verdicts == two.verdicts == [(1, "counted")]


def test_hostile_uploads_are_refused_and_leave_nothing_on_disk(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    good, evil = world.add("good", sends=False), world.add("evil", sends=False)
    world.settle()
    mine, others = evil.movements[1], good.movements[1]
    # Another's movement, one of another round, garbage: rejected, with the reason.
    evil.offer_bytes(encode_movement(others), 1)
    world.settle()
    assert evil.verdicts == [(1, "rejected")]
    evil.offer_bytes(b"\xff" * 5000, 1)
    world.settle()
    assert evil.receipts[1:] == [(1, "rejected")]
    # More than any movement has: refused before a byte of it is sent.
    huge = make_outgoing(device="evil", run=world.run.about.run).offer
    evil.tell(replace(huge, upload=b"u" * 16, size=2**39))
    world.settle()
    assert [each.refused for each in evil.heard if isinstance(each, Credit)][-1]
    assert evil.receipts[2:] == [(1, "rejected")]
    # Chunks of an upload that was never offered, and more of them than there are.
    evil.link.publish(TOPICS.up_chunk("evil"), pack_chunk(b"x" * 16, 0, b"data"), bulk=True)
    evil.link.publish(TOPICS.up_chunk("evil"), pack_chunk(b"u" * 16, 2**31, b"data"), bulk=True)
    world.settle()
    assert os.listdir(world.folder / UPLOADS) == []
    assert os.listdir(world.folder / MOVEMENTS) == []
    # None of it kept anybody from counting.
    good.offer(others)
    evil.offer(mine)
    world.settle()
    assert good.verdicts == [(1, "counted")]
    assert evil.verdicts[-1] == (1, "counted")


def test_movement_of_another_run_is_late(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    one = world.add("one")
    world.add("two", sends=False)
    world.settle()
    one.send(1, run="f" * 16)
    receipts = one.all(Receipt)
    assert [(each.outcome.value, each.run) for each in receipts] == [
        ("kept", world.run.about.run),
        ("late", "f" * 16),
    ]


def test_bids_of_another_run_are_ignored(worlds: Worlds) -> None:
    world = worlds.make(rounds_config())
    one, two = world.add("one"), world.add("two", sends=False)
    world.settle()
    withdrawal = Bid(device="two", round=1, level=None, reason="old", run="f" * 16)
    two.tell(withdrawal)
    world.settle()
    assert world.state.round == 1
    two.send(1)
    assert one.opened.keys() == {1, 2}


def _note(event: LinkEvent, got: dict[str, bytes]) -> None:
    if isinstance(event, Received):
        got[event.topic] = event.payload
