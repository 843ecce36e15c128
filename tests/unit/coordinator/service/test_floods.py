"""Hostile devices against the real service: bounded, told once, and nobody else is harmed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from coordinator.run.folder import UPLOADS
from coordinator.service.admission.limits import CONTROL, MUTED_S, OFFER, USELESS
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.messages.transfer import (
    Complaint,
    Credit,
    Evaluation,
    Presence,
    Want,
)
from edge_sdk.protocol.messages.wire import encode_message
from edge_sdk.transport.uploads import pack_chunk
from tests.messages import make_outgoing
from tests.unit.coordinator.service.service_world import (
    CHUNK_BYTES,
    TOPICS,
    ScriptedDevice,
    World,
    Worlds,
    rounds_config,
)


def bomb() -> bytes:
    """As large as a message may be; it would become a hundred times as much."""
    return b"\x82\xa1v\x01\xa4type\xdc\x0f\xf0" + b"\x80" * 4080


Send = Callable[[World, ScriptedDevice, int], None]


def send_garbage(world: World, evil: ScriptedDevice, number: int) -> None:
    random = np.random.default_rng(number)
    evil.link.publish(TOPICS.up_control("evil"), random.bytes(50))


def send_bombs(world: World, evil: ScriptedDevice, number: int) -> None:
    evil.link.publish(TOPICS.up_control("evil"), bomb())


def send_versions(world: World, evil: ScriptedDevice, number: int) -> None:
    content = {"v": 2 + number, "type": "bid", "device": "evil"}
    evil.link.publish(TOPICS.up_control("evil"), msgpack.packb(content))


def send_bids(world: World, evil: ScriptedDevice, number: int) -> None:
    run = world.run.about.run
    evil.tell(Bid(device="evil", round=1, level=0.5, reason=f"{number}", run=run))


def send_presences(world: World, evil: ScriptedDevice, number: int) -> None:
    here = Presence(name="evil", session=2 + number, online=bool(number % 2))
    evil.link.publish(TOPICS.presence("evil"), encode_message(here))


def send_wants(world: World, evil: ScriptedDevice, number: int) -> None:
    hashes = tuple(world.chunks)[:64]
    evil.tell(Want(device="evil", chunks=hashes))


def send_evaluations(world: World, evil: ScriptedDevice, number: int) -> None:
    said = Evaluation(
        device="evil", run=world.run.about.run, round=1, samples=1, loss=0.0, accuracy=1.0
    )
    evil.tell(said)


def send_offers(world: World, evil: ScriptedDevice, number: int) -> None:
    offer = make_outgoing(device="evil", run=world.run.about.run).offer
    evil.tell(replace(offer, upload=number.to_bytes(16, "little"), size=1500))


def send_chunks(world: World, evil: ScriptedDevice, number: int) -> None:
    piece = pack_chunk(b"never offered ..", number, bytes(CHUNK_BYTES))
    evil.link.publish(TOPICS.up_chunk("evil"), piece, bulk=True)


FLOODS = [
    send_garbage,
    send_bombs,
    send_versions,
    send_bids,
    send_presences,
    send_wants,
    send_evaluations,
    send_offers,
    send_chunks,
]


@pytest.mark.parametrize("send", FLOODS, ids=lambda send: send.__name__)
def test_flood_costs_nobody_else_anything(
    worlds: Worlds, send: Send, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    world = worlds.make(rounds_config(rounds=2, min_devices=3, away_s=100.0))
    one, two = world.add("one"), world.add("two", sends=False)
    evil = world.add("evil", sends=False)
    world.settle()
    for number in range(1000):
        send(world, evil, number)
        if number % 100 == 99:
            world.settle()
    two.send(1)
    assert one.receipts == two.receipts == [(1, "kept")]
    assert len(evil.all(Complaint)) == 1
    world.wait(60)  # its limits are back
    evil.send(1)
    assert evil.receipts == [(1, "kept"), (1, "counted")]
    assert world.state.round == 2
    about_evil = [record for record in caplog.records if "evil" in record.getMessage()]
    assert len(about_evil) <= 5
    assert len(os.listdir(world.folder / UPLOADS)) <= 2


def test_flood_is_answered_only_as_often_as_is_allowed(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=2))
    evil = world.add("evil", sends=False)
    world.add("one")
    world.settle()
    before = len(evil.heard)
    for number in range(600):
        send_offers(world, evil, number)
        world.settle()
    credits = [each for each in evil.heard[before:] if isinstance(each, Credit)]
    assert 0 < len(credits) <= OFFER.burst
    assert len(evil.heard) - before <= len(credits) + 1
    world.clock.now += 600
    for _ in range(1000):
        send_bids(world, evil, 0)
        world.settle()
    assert len(evil.heard) - before <= CONTROL.burst + OFFER.burst + 2


def test_sender_of_useless_chunks_is_muted_and_comes_back(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    evil = world.add("evil", sends=False)
    world.add("one")
    world.settle()
    for number in range(int(USELESS.burst) + 50):
        send_chunks(world, evil, number)
        world.settle()
    (complaint,) = evil.all(Complaint)
    assert "too many useless chunks" in complaint.reason
    world.wait(MUTED_S + 1)
    evil.send(1)
    assert evil.verdicts == [(1, "counted")]
    assert world.service.finished


def test_made_up_names_fill_the_register_and_nothing_more(
    worlds: Worlds, caplog: pytest.LogCaptureFixture
) -> None:
    world = worlds.make(rounds_config(rounds=1), max_devices=20)
    one, two = world.add("one"), world.add("two", sends=False)
    world.settle()
    evil = world.broker.open_link(name="evil", deliver=lambda _: None)
    for number in range(200):
        name = f"name{number}"
        here = encode_message(Presence(name=name, session=1, online=True))
        evil.publish(TOPICS.presence(name), here)
        evil.publish(TOPICS.up_control(name), b"garbage")
        evil.publish(TOPICS.up_chunk(name), pack_chunk(bytes(16), 0, b"x"), bulk=True)
        if number % 20 == 0:
            world.settle()
    world.settle()
    assert len(world.state.devices) == 20
    assert {"one", "two"} <= world.state.devices
    full = [record for record in caplog.records if "max_devices" in record.getMessage()]
    assert len(full) == 1
    two.send(1)
    assert one.verdicts == two.verdicts == [(1, "counted")]
    world.stop()
    # They are remembered, so that a restart does not make room for others.
    world.start()
    world.publish(
        TOPICS.presence("late"), encode_message(Presence(name="late", session=1, online=True))
    )
    assert len(world.state.devices) == 20


def test_device_without_an_assignment_gets_no_room(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(rounds=1))
    one = world.add("one", sends=False)
    world.add("two", sends=False)
    world.settle()
    late = world.add("late")
    world.settle()
    mine = replace(one.movements[1], device="late")
    late.offer_bytes(encode_movement(mine), 1)
    world.settle()
    assert late.verdicts == [(1, "rejected")]
    assert not any(isinstance(each, Credit) for each in late.heard)
    assert os.listdir(world.folder / UPLOADS) == []
