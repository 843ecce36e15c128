"""The coordinator is stopped, killed and restarted."""

from __future__ import annotations

import os
import signal
import time

import pytest

from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.transfer import Offer
from tests.interruptions.programs import Program
from tests.interruptions.world import World, Worlds, is_message, upload_chunks

TERMINATED = 143


def end(program: Program, how: str) -> None:
    """End a coordinator: "stopped" or "killed"."""
    if how == "killed":
        program.kill()
    else:
        assert program.stop() == TERMINATED


def open_round(world: World, *, after: int = 9) -> None:
    """Start, and come to where two is counted in round 1, and one in the middle of its upload."""
    hold = world.proxy("one").hold(upload_chunks, after=after)
    world.start()
    hold.wait()
    world.device("two").wait_for("receipt", round=1)


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_coordinator_that_stands_still(worlds: Worlds, seconds: int) -> None:
    """The coordinator is suspended (SIGSTOP) during an upload, then continues"""
    world = worlds.make(chunk_bytes=1024, keepalive_s=5)
    hold = world.proxy("one").hold(upload_chunks, after=9)
    world.start()
    hold.wait()
    process = world.coordinator.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        hold.release()
        time.sleep(seconds)  # the interruption itself
    finally:
        os.kill(process.pid, signal.SIGCONT)
    world.finish()
    world.expect_undisturbed()
    world.note(f"it was suspended for {seconds} s")


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["ram-fed", pytest.param("ra-fed", marks=pytest.mark.slow)])
def test_coordinator_that_ends_in_an_open_round(worlds: Worlds, how: str, rule: str) -> None:
    """The coordinator ends when one device has its receipt and another is uploading"""
    world = worlds.make(chunk_bytes=1024, rule=rule)
    open_round(world)
    end(world.coordinator, how)
    for hold in world.proxy("one").holds:
        hold.release()
    world.coordinator.start()
    resumed = world.coordinator.wait_for("resumed", round=1)
    assert "with 1 of 2 movements" in resumed.content["message"]
    outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.rounds == [1, 2, 3]
    assert outcome.receipts["two"]["counted"] == 3
    assert len(list(world.device("two").find("training", round=1))) == 1
    world.note(f"it was {how} and resumed the same round")


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.slow)])
def test_coordinator_that_ends_between_rounds(worlds: Worlds, how: str) -> None:
    """The coordinator ends after a round closed and before any bid for the next"""
    world = worlds.make()
    holds = [world.proxy(name).hold(is_message(Bid, round=2)) for name in ("one", "two")]
    world.start()
    for hold in holds:
        hold.wait()
    end(world.coordinator, how)
    for hold in holds:
        hold.release()
    world.coordinator.start()
    world.coordinator.wait_for("resumed", round=2)
    outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.rounds == [1, 2, 3]
    world.note(f"it was {how} and resumed the same round: its devices bid again")


@pytest.mark.slow
def test_coordinator_killed_in_every_round(worlds: Worlds) -> None:
    """The coordinator is killed (`kill -9`) in every round, when one device has its receipt"""
    world = worlds.make(rounds=4, chunk_bytes=1024)
    one, two = world.devices
    bids = [world.proxy("one").hold(is_message(Bid, round=round)) for round in range(1, 5)]
    world.start()
    for round, bid in enumerate(bids, 1):
        bid.wait()
        hold = world.proxy("one").hold(upload_chunks, after=5)
        bid.release()
        hold.wait()
        two.wait_for("receipt", round=round)
        world.coordinator.kill()
        hold.release()
        world.coordinator.start()
        one.wait_for("receipt", round=round)
    outcome = world.finish()
    world.expect_undisturbed()
    assert outcome.rounds == [1, 2, 3, 4]


@pytest.mark.slow
def test_asynchronous_coordinator_killed(worlds: Worlds) -> None:
    """In an asynchronous run, the coordinator is killed (`kill -9`) while devices train"""
    world = worlds.make(rounds=8, steps=2000, rule="fed-raa", asynchronous=True)
    holds = [world.proxy(name).hold(is_message(Offer), after=1) for name in ("one", "two")]
    world.start()
    world.coordinator.wait_for("movement", match="counted")
    for device in world.devices:
        first = device.wait_for("training")
        device.wait_for("receipt", outcome="counted")
        device.wait_for("training", after=first)  # perhaps before the receipt came
    world.coordinator.kill()
    for hold in holds:
        hold.release()
    world.coordinator.start()
    outcome = world.finish()
    assert sum(each["counted"] for each in outcome.receipts.values()) == 8
    world.note("every receipt is for an update in the model")


@pytest.mark.slow
def test_coordinator_whose_clock_goes_back(worlds: Worlds) -> None:
    """The coordinator's clock is an hour ahead; after a kill and a restart it is an hour behind"""
    world = worlds.make(chunk_bytes=1024)
    coordinator = world.coordinator
    coordinator.skew_clock(3600)
    open_round(world)
    coordinator.kill()
    for hold in world.proxy("one").holds:
        hold.release()
    coordinator.skew_clock(-3600)
    coordinator.start()
    world.finish()
    world.expect_undisturbed()
    world.note("devices noticed the restart")
