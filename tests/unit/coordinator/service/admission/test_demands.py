"""Who may take part in a run: demands, and devices that do not meet them."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.errors import ConfigError
from coordinator.service.admission.demands import UNTOLD, Demands
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import Outcome, Receipt, RoundOpen
from edge_sdk.protocol.messages.transfer import Complaint
from tests.unit.coordinator.service.service_world import (
    ScriptedDevice,
    World,
    Worlds,
    fragments_config,
    rounds_config,
)

BERLIN = Demands(labels={"site": "berlin"})


@pytest.mark.parametrize(
    ("demands", "condition", "why"),
    [
        ({}, {}, None),
        ({"labels": {"site": "berlin"}}, {"labels": {"site": "berlin", "x": "y"}}, None),
        ({"labels": {"site": "berlin"}}, {}, "site = 'berlin', and it has none"),
        ({"labels": {"site": "berlin"}}, {"labels": {"site": "oslo"}}, "and it has 'oslo'"),
        ({"min_memory_mb": 1000}, {"memory_mb": 1000.0}, None),
        ({"min_memory_mb": 1000}, {"memory_mb": 999.0}, "needs 1000 MB of memory, and it has 999"),
        ({"min_memory_mb": 1000}, {}, "does not know its own"),
        ({"profiles": ("pi",)}, {"profile": "pi"}, None),
        ({"profiles": ("pi", "nano")}, {"profile": "phone"}, "profiles pi, nano, and it is phone"),
        ({"profiles": ("pi",)}, {}, "names none"),
    ],
)
def test_device_fits_if_it_meets_all_demands(
    demands: dict[str, Any], condition: dict[str, Any], why: str | None
) -> None:
    found = Demands(**demands).objection(Condition(device="pi", **condition))
    assert (found is None) is (why is None)
    assert why is None or why in str(found)


def test_demands_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="labels: "):
        Demands(labels={"Site": "berlin"})
    with pytest.raises(ConfigError, match="min_memory_mb"):
        Demands(min_memory_mb=0)


def tell(device: ScriptedDevice, **condition: Any) -> None:
    device.tell(Condition(device=device.name, **condition))
    device.world.settle()


def states(world: World) -> dict[str, str]:
    return {row["device"]: row["state"] for row in world.service.overview.devices()}


def test_barred_device_is_no_member_of_rounds_and_is_told_why(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=2), demands=BERLIN)
    one, two, three = (world.add(name) for name in ("one", "two", "three"))
    world.settle()
    assert set(states(world).values()) == {"barred"}
    tell(one, labels={"site": "berlin"})
    tell(three, labels={"site": "oslo"})
    status = world.service.overview.status()
    assert status["state"] == "waiting"
    world.wait(1.5)
    words = world.service.overview.status()["waits_for"]
    assert words.startswith("devices: 1 of 2 are here")
    assert words.endswith("barred: three, two ([devices])")
    assert world.present == {"one"}
    tell(two, labels={"site": "berlin"})
    assert len(world.history) == 2
    assert {part["device"] for line in world.history for part in line["devices"]} == {"one", "two"}
    assert states(world)["three"] == "barred"
    row = world.service.overview.device("three")
    assert row["reason"].endswith("label site = 'berlin', and it has 'oslo'")
    declined = [each for each in three.all(Receipt) if each.outcome is Outcome.REJECTED]
    assert declined
    assert all(each.reason == row["reason"] for each in declined)
    assert row["reason"] in three.all(Complaint)[0].reason


def test_device_that_tells_nothing_is_told_what_to_do(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1, rounds=1), demands=BERLIN)
    silent, one = world.add("silent"), world.add("one")
    world.settle()
    tell(one, labels={"site": "berlin"})
    (receipt,) = silent.all(Receipt)
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, UNTOLD)
    assert [part["device"] for part in world.history[0]["devices"]] == ["one"]


def test_device_that_fits_no_more_leaves_the_round(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1, rounds=1, away_s=5.0), demands=BERLIN)
    one = world.add("one", sends=False)
    world.settle()
    tell(one, labels={"site": "berlin"})
    assert world.present == {"one"}
    tell(one, labels={"site": "oslo"})
    assert world.present == set()
    assert states(world) == {"one": "barred"}
    tell(one, labels={"site": "berlin"})
    assert world.present == {"one"}


def test_run_without_demands_asks_for_nothing(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1, rounds=1))
    world.add("one")
    world.settle()
    assert len(world.history) == 1


def test_asynchronous_run_asks_only_those_who_fit(worlds: Worlds) -> None:
    world = worlds.make(fragments_config(min_devices=1, updates=2), demands=BERLIN)
    one, two = world.add("one"), world.add("two")
    world.settle()
    assert not one.all(RoundOpen)
    tell(one, labels={"site": "berlin"})
    assert one.all(RoundOpen)
    assert not two.all(RoundOpen)
    assert {part["device"] for line in world.history for part in line["devices"]} == {"one"}


def test_restarted_coordinator_lets_nobody_in_before_it_knows_them(worlds: Worlds) -> None:
    world = worlds.make(rounds_config(min_devices=1, rounds=3), demands=BERLIN)
    one = world.add("one", sends=False)
    world.settle()
    tell(one, labels={"site": "berlin"})
    world.restart()
    assert states(world) == {"one": "barred"}
    tell(one, labels={"site": "berlin"})
    assert states(world)["one"] != "barred"
