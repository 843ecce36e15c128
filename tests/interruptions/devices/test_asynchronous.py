"""Devices in an asynchronous run, where each has its own rounds."""

from __future__ import annotations

import pytest

from edge_sdk.protocol.messages.transfer import Offer
from tests.interruptions.world import Worlds, is_message, upload_chunks


@pytest.mark.slow
def test_asynchronous_device_killed_while_it_trains(worlds: Worlds) -> None:
    """In an asynchronous run, a device is killed (`kill -9`) while it trains, and is restarted"""
    world = worlds.make(rounds=8, rule="fed-raa", asynchronous=True)
    others = world.proxy("two").hold(is_message(Offer), after=3)  # or it would do all of it
    world.trains_on("one")
    world.start()
    one = world.device("one")
    training = one.wait_for("training")
    one.kill()
    world.proxy("one").tamper = None
    one.start()
    again = one.wait_for("training", after=training)
    assert again.content["round"] == training.content["round"]
    one.wait_for("receipt", outcome="counted")
    others.release()
    outcome = world.finish()
    assert outcome.receipts["one"]["counted"] > 0
    world.note("it got the same fragment again")


@pytest.mark.slow
def test_asynchronous_device_killed_while_it_uploads(worlds: Worlds) -> None:
    """In an asynchronous run, a device is killed during an upload, and is restarted"""
    world = worlds.make(rounds=40, chunk_bytes=1024, rule="fed-raa", asynchronous=True)
    others = world.proxy("two").hold(is_message(Offer), after=3)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    one = world.device("one")
    hold.wait()
    one.kill()
    world.proxy("one").cut()  # or what is held might still arrive, though its sender is gone
    hold.release()
    one.start()
    resumed = one.wait_for("resumed")
    others.release()
    world.finish()
    arrived, chunks = resumed.content["arrived"], resumed.content["chunks"]
    world.note(f"the upload resumed: {arrived} of {chunks} chunks had arrived")


def test_asynchronous_connection_cut_while_it_trains(worlds: Worlds) -> None:
    """In an asynchronous run, a device's connections are cut while it trains"""
    world = worlds.make(rounds=4, steps=2000, rule="fed-raa", asynchronous=True)
    # However slow we are to cut: nobody ends the run before.
    holds = [world.proxy(name).hold(is_message(Offer)) for name in ("one", "two")]
    world.start()
    one = world.device("one")
    training = one.wait_for("training")
    world.proxy("one").cut()
    one.wait_for("connected", after=training, first=False)
    holds[0].release()
    one.wait_for("receipt", outcome="counted")
    holds[1].release()
    outcome = world.finish()
    assert outcome.receipts["one"]["counted"] > 0
    rounds = [line.content["round"] for line in one.find("training")]
    assert len(set(rounds)) == len(rounds)
    world.note("no round was trained twice")
