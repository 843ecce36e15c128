"""Devices that are killed, absent, or running twice."""

from __future__ import annotations

import shutil

import pytest

from edge_sdk.protocol.messages.movement import decode_movement
from edge_sdk.protocol.messages.round import Bid, Receipt
from tests.interruptions.world import World, Worlds, is_message, upload_chunks

REPLACED = 6
"""The exit code of a device that was replaced."""


def test_device_killed_while_it_trains(worlds: Worlds) -> None:
    """A device is killed (`kill -9`) while it trains, and is restarted"""
    world = worlds.make(rounds=2)
    world.trains_on("one")
    world.start()
    one = world.device("one")
    training = one.wait_for("training", round=1)
    one.kill()
    assert not list(world.state_dir("one").rglob("*.movement"))
    world.proxy("one").tamper = None
    one.start()
    one.wait_for("training", after=training, round=1)
    world.finish()
    world.expect_undisturbed()
    world.note("it trained the round again")


def test_device_killed_while_it_uploads(worlds: Worlds) -> None:
    """A device is killed (`kill -9`) during an upload, and is restarted"""
    world = worlds.make(chunk_bytes=1024)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    one = world.device("one")
    hold.wait()
    world.coordinator.wait_for("movement", device="two", round=1)
    one.kill()
    hold.release()
    one.start()
    resumed = one.wait_for("resumed", round=1)
    world.finish()
    world.expect_undisturbed()
    arrived, chunks = resumed.content["arrived"], resumed.content["chunks"]
    assert 0 < arrived < chunks
    assert len(list(one.find("training", round=1))) == 1
    world.note(f"the upload resumed: {arrived} of {chunks} chunks had arrived")


def test_device_killed_before_the_receipt(worlds: Worlds) -> None:
    """A device is killed (`kill -9`) between its upload and the receipt, and is restarted"""
    world = worlds.make()
    hold = world.proxy("one").hold(is_message(Receipt, round=2))
    bid = world.proxy("two").hold(is_message(Bid, round=3))
    world.start()
    one = world.device("one")
    hold.wait()
    one.kill()
    (kept,) = world.state_dir("one").rglob("*.movement")
    assert decode_movement(kept.read_bytes()).round == 2
    hold.release()
    one.start()
    one.wait_for("receipt", round=2, outcome="counted")
    one.wait_for("bid", round=3)
    bid.release()
    outcome = world.finish()
    world.expect_undisturbed()
    found = world.coordinator.find("movement", device="one", round=2, outcome="counted")
    assert len(list(found)) == 1
    assert not kept.exists()
    assert outcome.receipts["one"]["counted"] == 3
    world.note("it offered the movement again and got the same receipt")


@pytest.mark.slow
def test_device_that_lost_its_folder_while_it_uploaded(worlds: Worlds) -> None:
    """A device is killed during an upload, and comes back with an empty state folder"""
    world = worlds.make(chunk_bytes=1024)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    one = world.device("one")
    hold.wait()
    one.kill()
    hold.release()
    shutil.rmtree(world.state_dir("one"))
    one.start()
    world.finish()
    world.expect_undisturbed()
    assert len(list(one.find("training", round=1))) == 2
    world.note("it trained again; the same bytes replaced the partial upload")


def start_together(world: World) -> None:
    """Start a world that goes on with one device, with both in its first round."""
    bids = [world.proxy(name).hold(is_message(Bid, round=1)) for name in ("one", "two")]
    world.start()
    for each in bids:
        each.wait()
    for each in bids:
        each.release()


@pytest.mark.slow
def test_device_that_stays_away_is_waited_for_no_longer_than_it_may_be(worlds: Worlds) -> None:
    """A device is killed during an upload and does not come back"""
    world = worlds.make(round={"min_devices": 1, "min_participants": 1, "away_s": 6.0})
    hold = world.proxy("one").hold(upload_chunks, after=2)
    start_together(world)
    one = world.device("one")
    hold.wait()
    one.kill()
    outcome = world.finish(codes={"one": -9})
    assert outcome.counted == {1: ["two"], 2: ["two"], 3: ["two"]}
    world.note("its round closed without it 6 s after it left")


@pytest.mark.parametrize("rule", ["ram-fed", pytest.param("ra-fed", marks=pytest.mark.slow)])
def test_device_away_for_three_rounds(worlds: Worlds, rule: str) -> None:
    """A device is killed during an upload, away for three rounds, and returns"""
    alone = {"min_devices": 1, "min_participants": 1, "away_s": 1.0}
    world = worlds.make(rounds=6, rule=rule, chunk_bytes=1024, round=alone)
    one, two = world.device("one"), world.device("two")
    upload = world.proxy("one").hold(upload_chunks, after=5)
    bid = world.proxy("two").hold(is_message(Bid, round=5))
    start_together(world)
    upload.wait()
    one.kill()
    upload.release()
    # Three rounds without it; the fifth waits for the bid of the other.
    bid.wait()
    two.wait_for("receipt", round=4)
    one.start()
    world.heard(Bid, device="one", round=5)
    bid.release()
    outcome = world.finish()
    late = one.wait_for("receipt", round=1)
    assert late.content["outcome"] == ("memory" if rule == "ram-fed" else "late")
    both = ["one", "two"]
    assert outcome.counted == {1: ["two"], 2: ["two"], 3: ["two"], 4: ["two"], 5: both, 6: both}
    world.note(f"its old movement: {late.content['outcome']}; it took part again from round 5")


@pytest.mark.parametrize(
    "same_folder", [pytest.param(True, id="one-folder", marks=pytest.mark.slow), False]
)
def test_two_programs_with_one_name(worlds: Worlds, same_folder: bool) -> None:
    """A second program is started under the name of a device that takes part"""
    world = worlds.make()
    bid = world.proxy("two").hold(is_message(Bid, round=2))
    world.start()
    one = world.device("one")
    one.wait_for("bid", round=2)
    newer = world.add_device("one", program="newer", state="one" if same_folder else "newer")
    newer.start()
    assert one.wait() == REPLACED
    said = one.wait_for("replaced")
    assert "another program was started as 'one'" in said.content["message"]
    newer.wait_for("bid", round=2)
    bid.release()
    outcome = world.finish(codes={"one": REPLACED})
    assert set(map(len, outcome.counted.values())) == {2}
    world.note(f"the older one stopped with exit code {REPLACED}, and the newer one replaced it")
    evictions = len(list(newer.find("disconnected"))) + len(list(one.find("disconnected")))
    assert evictions < 10
