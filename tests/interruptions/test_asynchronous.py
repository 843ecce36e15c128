"""The same in an asynchronous run, where every device has rounds of its own."""

from __future__ import annotations

import pytest

from tests.interruptions.world import Worlds, upload_chunks


@pytest.mark.slow
def test_asynchronous_device_killed_while_it_trains(worlds: Worlds) -> None:
    """In an asynchronous run, a device is killed (`kill -9`) while it trains, and started again"""
    world = worlds.make(rounds=8, steps=2000, asynchronous=True)
    world.start()
    one = world.device("one")
    training = one.wait_for("training")
    one.kill()
    one.start()
    again = one.wait_for("training", after=training)
    assert again.content["round"] == training.content["round"]
    outcome = world.finish()
    assert outcome.receipts["one"]["counted"] > 0
    world.note("it was given the same fragment again")


@pytest.mark.slow
def test_asynchronous_device_killed_while_it_uploads(worlds: Worlds) -> None:
    """In an asynchronous run, a device is killed in the middle of an upload, and started again"""
    world = worlds.make(rounds=40, chunk_bytes=1024, asynchronous=True)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    one = world.device("one")
    assert hold.held.wait(60)
    one.kill()
    world.proxy("one").cut()  # or what is held might still arrive, though its sender is gone
    hold.release()
    one.start()
    resumed = one.wait_for("resumed")
    world.finish()
    arrived, chunks = resumed.content["arrived"], resumed.content["chunks"]
    world.note(f"the upload went on where it was: {arrived} of {chunks} chunks had arrived")


def test_asynchronous_connection_cut_while_it_trains(worlds: Worlds) -> None:
    """In an asynchronous run, the connections of a device are cut while it trains"""
    world = worlds.make(rounds=4, steps=2000, asynchronous=True)
    world.start()
    one = world.device("one")
    training = one.wait_for("training")
    world.proxy("one").cut()
    one.wait_for("connected", after=training, first=False)
    outcome = world.finish()
    assert outcome.receipts["one"]["counted"] > 0
    rounds = [line.content["round"] for line in one.find("training")]
    assert len(set(rounds)) == len(rounds)
    world.note("no round was trained twice")
