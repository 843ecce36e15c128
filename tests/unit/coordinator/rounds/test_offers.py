"""What devices offer: no room for what is of no use, and a disk that fails costs nobody a round."""

from __future__ import annotations

import os
from typing import Any

import pytest

from coordinator.aggregate.rules import RULES
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.folder import MOVEMENTS, UPLOADS
from coordinator.service.outgoing.outlet import MAX_EARLIER
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.transfer import Credit
from edge_sdk.transport.uploads import Outgoing
from tests.unit.coordinator.service.service_world import (
    ScriptedDevice,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)


def offer_to_a_full_disk(world: World, device: ScriptedDevice, round: int, **options: Any) -> None:
    """What is kept has nowhere to go, for a moment; then the same is offered once more."""
    movements, receipts = world.folder / MOVEMENTS, list(device.receipts)
    movements.rename(world.folder / "elsewhere")
    device.send(round, **options)
    assert device.receipts == receipts
    (world.folder / "elsewhere").rename(movements)
    device.send(round, **options)


@pytest.mark.parametrize(
    ("config", "others", "wait_s", "outcome"),
    [
        (rounds_config(rounds=1), 1.0, 0, "counted"),
        (rounds_config(rule=RULES["ram-fed"](), rounds=3), 1.0, 101, "memory"),
        (fragments_config(updates=1), None, 0, "counted"),
    ],
    ids=["in time", "late", "asynchronous"],
)
def test_movement_that_could_not_be_stored_counts_when_it_comes_again(
    worlds: Worlds,
    config: RoundsConfig | FragmentsConfig,
    others: float | None,
    wait_s: float,
    outcome: str,
) -> None:
    world = worlds.make(config)
    world.add("other", level=lambda number: others if number == 1 else None)
    one = world.add("one", sends=False)
    world.settle()
    world.wait(wait_s)
    round = min(one.opened)
    offer_to_a_full_disk(world, one, round)
    synchronous = isinstance(config, RoundsConfig)
    kept = [(round, "kept")] if synchronous and outcome == "counted" else []
    assert one.receipts == [*kept, (round, outcome)]
    assert world.service.finished == (outcome == "counted")
    if outcome == "memory":
        assert world.state.keeping_late == frozenset()


# -- offers of no use ----------------------------------------------------------------------------


def credits_of(device: ScriptedDevice, outgoing: Outgoing) -> list[Credit]:
    upload = outgoing.offer.upload
    return [each for each in device.heard if isinstance(each, Credit) and each.upload == upload]


def trains_once(round: int) -> float | None:
    """The next rounds have only silent devices, and so wait for them."""
    return 1.0 if round == 1 else None


@pytest.mark.parametrize(("round", "answers"), [(3, None), (2**31, None), (1, 3), (2, 3)])
def test_offer_for_a_round_that_has_not_begun_gets_no_room(
    worlds: Worlds, round: int, answers: int | None
) -> None:
    config = rounds_config(rule=RULES["ram-fed"](), rounds=9)
    world = worlds.make(config)
    world.add("fast", level=trains_once)
    slow = world.add("slow", sends=False)
    world.settle()
    world.wait(101)
    assert world.state.round == 2
    sent = slow.offer_bytes(b"x" * 3000, round, answers=answers)
    world.settle()
    assert slow.receipts == [(answers or round, "rejected")]
    assert credits_of(slow, sent) == []
    assert os.listdir(world.folder / UPLOADS) == []


@pytest.mark.parametrize(
    ("rule", "device", "outcome"),
    [("ram-fed", "skips", "rejected"), ("ra-fed", "slow", "late"), ("ra-fed", "skips", "rejected")],
)
def test_offer_for_a_closed_round_that_has_no_use_for_it_gets_no_room(
    worlds: Worlds, rule: str, device: str, outcome: str
) -> None:
    world = worlds.make(rounds_config(rule=RULES[rule](), rounds=9, min_devices=3))
    devices = {
        "fast": world.add("fast", level=trains_once),
        "slow": world.add("slow", sends=False),
        "skips": world.add("skips", level=lambda _: None),
    }
    world.settle()
    world.wait(101)
    assert world.state.round == 2
    sent = devices[device].offer_bytes(b"x" * 3000, 1)
    world.settle()
    assert devices[device].receipts == [(1, outcome)]
    assert credits_of(devices[device], sent) == []


def test_offer_after_the_end_gets_no_room_even_where_movements_are_remembered(
    worlds: Worlds,
) -> None:
    world = worlds.make(rounds_config(rule=RULES["ram-fed"](), rounds=1))
    world.add("fast")
    slow = world.add("slow", sends=False)
    world.settle()
    world.wait(101)
    assert world.service.finished
    sent = slow.send(1)
    assert slow.receipts == [(1, "late")]
    assert credits_of(slow, sent) == []
    world.stop()


# -- versions that asynchronous devices may be evaluating ----------------------------------------


def model_chunks(opened: RoundOpen) -> set[bytes]:
    assert opened.model is not None
    return set(opened.model.chunks)


def asynchronous_world(worlds: Worlds) -> tuple[World, ScriptedDevice, RoundOpen]:
    """A device has trained from version 0, and then skips; another one goes on."""
    world = worlds.make(fragments_config(updates=99, train_deadline_s=1e6, rest_s=1e6, bid_s=1e6))
    first = world.add("first", level=lambda number: 1.0 if number <= 2 else None)
    other = world.add("other", sends=False)
    world.settle()
    assert world.service.model.version == 1
    assert other.movements
    return world, first, first.opened[min(first.opened)]


def advance(world: World, device: ScriptedDevice, times: int) -> None:
    """The device's movements come, one after the other, each from the newest version."""
    for _ in range(times):
        world.clock.now += 1e3  # time enough to publish
        device.send(max(device.movements))


def test_asynchronous_version_is_held_for_a_device_that_may_evaluate_it(worlds: Worlds) -> None:
    world, _, opened = asynchronous_world(worlds)
    advance(world, world.devices[1], 4)
    assert model_chunks(opened) <= world.chunks.keys()


def test_asynchronous_version_is_not_held_for_a_device_that_left(worlds: Worlds) -> None:
    world, first, opened = asynchronous_world(worlds)
    world.leave(first)
    world.settle()
    advance(world, world.devices[0], 4)
    assert not model_chunks(opened) & world.chunks.keys()


def test_asynchronous_versions_that_are_held_are_few(worlds: Worlds) -> None:
    world, _, opened = asynchronous_world(worlds)
    for number in range(MAX_EARLIER):
        assert model_chunks(opened) <= world.chunks.keys()
        world.clock.now += 1e3  # time enough to publish
        answers = iter((1.0,))  # it trains once, from the newest version
        world.add(f"device-{number}", level=lambda _, answers=answers: next(answers, None))
        world.settle()
    assert world.service.model.version == 1 + MAX_EARLIER
    advance(world, world.devices[1], 2)
    assert not model_chunks(opened) & world.chunks.keys()
