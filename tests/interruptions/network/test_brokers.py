"""Brokers that stop and come back, with or without their retained messages."""

from __future__ import annotations

import pytest

from tests.interruptions.world import Worlds, model_chunks, upload_chunks

PERSISTENT = [
    pytest.param(True, id="persistent"),
    pytest.param(False, id="empty"),
]


@pytest.mark.parametrize("persistent", PERSISTENT)
def test_broker_restarted_while_a_movement_is_uploaded(worlds: Worlds, persistent: bool) -> None:
    """The broker is restarted during an upload"""
    world = worlds.make(chunk_bytes=1024, persistent=persistent)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    one = world.device("one")
    hold.wait()
    before = one.wait_for("offered", round=1)
    world.broker.restart()
    hold.release()
    resumed = one.wait_for("resumed", after=before, round=1)
    world.finish()
    world.expect_undisturbed()
    assert len(list(one.find("training", round=1))) == 1
    arrived, chunks = resumed.content["arrived"], resumed.content["chunks"]
    assert 0 < arrived < chunks
    world.note(_kept(persistent))
    world.note(f"the upload resumed: {arrived} of {chunks} chunks had arrived")


@pytest.mark.parametrize(
    "persistent", [pytest.param(True, id="persistent", marks=pytest.mark.slow), PERSISTENT[1]]
)
def test_broker_restarted_while_the_model_is_fetched(worlds: Worlds, persistent: bool) -> None:
    """The broker is restarted while a device fetches the model"""
    world = worlds.make(chunk_bytes=1024, persistent=persistent)
    one, two = world.device("one"), world.device("two")
    world.broker.start()
    world.coordinator.start()
    two.start()
    two.wait_for("task")
    # The task is fetched first, then the model's index and its packs.
    hold = world.proxy("one").hold(model_chunks, after=30)
    one.start()
    hold.wait()
    fetched = world.proxy("one").seen(model_chunks)
    world.broker.restart()
    hold.release()
    world.finish()
    world.expect_undisturbed()
    assert list(one.find("connected", first=False))
    world.note(_kept(persistent))
    world.note(f"the device had {fetched} chunks and asked for the rest")


@pytest.mark.slow
def test_broker_killed_comes_back_with_what_it_saved_long_ago(worlds: Worlds) -> None:
    """The broker is killed (`kill -9`) during an upload, and comes back with its state from
    before the run
    """
    world = worlds.make(chunk_bytes=1024)
    world.broker.start()
    world.broker.stop()
    saved = (world.broker.folder / "mosquitto.db").read_bytes()
    hold = world.proxy("one").hold(upload_chunks, after=25)
    world.start()
    hold.wait()
    world.broker.kill()
    (world.broker.folder / "mosquitto.db").write_bytes(saved)
    world.broker.start()
    hold.release()
    world.finish()
    world.expect_undisturbed()
    world.note("task, round and chunks were published again")


@pytest.mark.slow
def test_broker_restarted_in_every_round(worlds: Worlds) -> None:
    """The broker is restarted in every round, and comes back empty each time"""
    world = worlds.make(rounds=4, persistent=False)
    holds = [world.proxy("two").hold(upload_chunks, after=1 + 5 * round) for round in range(4)]
    world.start()
    for hold in holds:
        hold.wait()
        world.broker.restart()
        hold.release()
    world.finish()
    world.expect_undisturbed()


def _kept(persistent: bool) -> str:
    return "the broker kept its retained messages" if persistent else "the broker came back empty"
