"""Connections that are cut, slow, delayed, or open but dead."""

from __future__ import annotations

import threading

import pytest

from edge_sdk.protocol.messages.round import Assignment, Bid
from tests.interruptions.proxy import Packet, Proxy
from tests.interruptions.world import Worlds, is_message, upload_chunks


def cut_every(proxy: Proxy, messages: int, times: int) -> None:
    """Cut all connections of a proxy whenever so many more messages have passed."""
    passed = cuts = 0

    def tamper(packet: Packet) -> list[Packet]:
        nonlocal passed, cuts
        passed += 1
        if passed % messages == 0 and cuts < times:
            cuts += 1
            proxy.cut()
        return [packet]

    proxy.tamper = tamper


@pytest.mark.parametrize("times", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_connection_cut_again_and_again(worlds: Worlds, times: int) -> None:
    """A device's connections are cut after every 40 messages"""
    world = worlds.make(chunk_bytes=1024)
    cut_every(world.proxy("one"), 40, times)
    world.start()
    one = world.device("one")
    world.finish()
    world.expect_undisturbed()
    cuts = len(list(one.find("disconnected")))
    assert cuts > 0
    assert len(list(one.find("training"))) == 3
    world.note(f"{cuts} cuts; every round was trained once")


@pytest.mark.slow
def test_connections_of_everybody_cut(worlds: Worlds) -> None:
    """The connections of all devices and the coordinator are cut repeatedly"""
    world = worlds.make(chunk_bytes=1024)
    for number, name in enumerate(("one", "two", "coordinator")):
        cut_every(world.proxy(name), 60 + 7 * number, 4)
    world.start()
    world.finish()
    world.expect_undisturbed()
    cuts = sum(len(list(each.find("disconnected"))) for each in world.devices)
    world.note(f"devices lost their connection {cuts} times")


@pytest.mark.slow
def test_late_messages(worlds: Worlds) -> None:
    """Everything to and from a device takes 0.4 s each way"""
    world = worlds.make(chunk_bytes=1024)
    world.proxy("one").delay_s = 0.4
    world.start()
    world.finish()
    world.expect_undisturbed()
    sent = world.proxy("one").seen(upload_chunks)
    assert sent == 3 * 20
    world.note(f"{sent} chunks were sent for {sent}: none twice")


@pytest.mark.slow
def test_slow_link_is_not_taken_for_a_dead_one(worlds: Worlds) -> None:
    """A device's link carries 12 KB/s: a chunk takes longer than twice the keepalive"""
    world = worlds.make(rounds=1, units=1024, chunk_bytes=131_072, keepalive_s=4, train_s=240)
    proxy = world.proxy("one")
    proxy.bytes_per_s = 12_000
    world.start()
    one = world.device("one")
    world.finish()
    world.expect_undisturbed()
    assert not list(one.find("disconnected"))
    size = one.wait_for("offered").content["bytes"]
    assert size > 65_536 * 4
    assert proxy.bytes["up"] < 1.1 * size
    world.note(f"{size:,} bytes went up in {proxy.bytes['up']:,}, on one connection")


@pytest.mark.parametrize("at", ["bid", pytest.param("upload", marks=pytest.mark.slow)])
def test_half_open_connection_is_noticed(worlds: Worlds, at: str) -> None:
    """A device's connections stay open but carry nothing, as when a router loses its state"""
    world = worlds.make(chunk_bytes=1024, keepalive_s=2)
    proxy = world.proxy("one")
    match = is_message(Assignment, round=2) if at == "bid" else upload_chunks
    hold = proxy.hold(match, after=0 if at == "bid" else 26)
    world.start()
    one = world.device("one")
    hold.wait()
    proxy.blackhole(new_ones=False)
    hold.release()
    lost = one.wait_for("disconnected", match="no sign of life")
    one.wait_for("connected", after=lost)
    world.finish()
    world.expect_undisturbed()
    world.note("the keepalive noticed; messages in flight were sent again")


def test_link_that_sends_nothing_after_a_reconnect_is_noticed(worlds: Worlds) -> None:
    """After a reconnect, everything a device sends is acknowledged by the broker but lost"""
    world = worlds.make(keepalive_s=3)
    proxy = world.proxy("one")

    def lose(packet: Packet) -> list[Packet] | None:
        return None if packet.direction == "up" else [packet]

    bid = world.proxy("two").hold(is_message(Bid, round=2))
    world.start()
    one = world.device("one")
    bid.wait()
    one.wait_for("receipt", round=1)
    proxy.tamper = lose
    proxy.cut()
    noticed = one.wait_for("no_echo")
    proxy.tamper = None
    one.wait_for("connected", after=noticed)
    bid.release()
    world.finish()
    world.expect_undisturbed()
    world.note("its presence did not come back, so it reconnected and sent everything again")


@pytest.mark.slow
def test_network_gone_for_long(worlds: Worlds) -> None:
    """A device has no network for 20 s during an upload"""
    world = worlds.make(chunk_bytes=1024)
    proxy = world.proxy("one")
    hold = proxy.hold(upload_chunks, after=9)
    world.start()
    one = world.device("one")
    hold.wait()
    proxy.refuse()
    one.wait_for("disconnected")
    threading.Timer(20.0, proxy.accept).start()
    hold.release()
    world.finish()
    world.expect_undisturbed()
    assert len(list(one.find("training", round=1))) == 1
