"""Bodies of simulated devices: time, battery, warmth and gates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.simulate.fleet.body import Body, Nature
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.decide.emulation.fleet import FleetMember
from edge_sdk.decide.gates import Limits
from edge_sdk.machine.board import find_board

HOUR_S = 3600.0
COLD = Limits(battery_floor=0, heat_margin_c=0)


def body(board: str = "pixel_4", *, day: dict[str, Any] | None = None, **kind: Any) -> Body:
    kind.setdefault("battery_percent", (50.0, 50.0))
    if find_board(board).battery is None:
        kind["battery_percent"] = None
    made = DeviceKind(board=find_board(board), **kind)
    return Body(Nature(made, DevicePopulation(kinds=(made,), **(day or {}))), "one", 0)


def test_battery_and_time_are_those_of_an_emulated_device() -> None:
    hours, load, work = (22 * 60 + 30, 6 * 60), 0.25, 3.0
    member = FleetMember(
        board=find_board("redmi_7a"),
        battery_percent=40,
        charging_hours=hours,
        background_load=load,
    )
    emulation = Emulation(member, work=work, starts=21 * 60)
    policy = Policy(limits=Limits(battery_floor=0))
    ours = body(
        "redmi_7a",
        day={"work": work, "starts": 21 * 60},
        battery_percent=(40.0, 40.0),
        charging_hours=hours,
        background_load=(load, load),
        policy=policy,
    )
    for macs, wait_s in [(2e12, 500.0), (5e11, 3 * HOUR_S), (9e12, 9 * HOUR_S), (1e12, 1.0)]:
        emulation.trained(macs)
        assert ours.train(macs, 10) == 10
        until_s = emulation.clock() + wait_s
        emulation.wait_until(until_s)
        ours.wait_until(until_s)
        assert ours.now_s == pytest.approx(emulation.clock())
        assert ours.battery_j == pytest.approx(emulation.moment.battery_j)
        assert ours.train_s == pytest.approx(emulation.moment.train_s)
        assert ours.snapshot().battery.charging is emulation.snapshot().battery.charging
        assert ours.snapshot().battery.percent == pytest.approx(emulation.percent)
        assert ours.snapshot().memory == emulation.snapshot().memory
        assert ours.snapshot().network == emulation.snapshot().network


def test_habits_are_drawn_from_the_name_and_the_seed() -> None:
    kind = DeviceKind(
        board=find_board("pixel_4"),
        count=50,
        battery_percent=(20.0, 90.0),
        spread_minutes=90,
        background_load=(0.0, 0.5),
    )
    nature = Nature(kind, DevicePopulation(kinds=(kind,)))
    made = [Body(nature, f"pixel-4-{number:02}", 3) for number in range(50)]
    again = Body(nature, "pixel-4-07", 3)
    assert (again.battery_j, again.load, again.shift) == (
        made[7].battery_j,
        made[7].load,
        made[7].shift,
    )
    capacity = nature.capacity_j
    assert capacity is not None
    percents = [100 * (each.battery_j or 0) / capacity for each in made]
    assert 20 <= min(percents) < 35 < 75 < max(percents) <= 90
    assert {math.copysign(1, each.shift) for each in made} == {1, -1}
    assert max(abs(each.shift) for each in made) <= 90


def test_training_warms_and_rest_cools() -> None:
    ours = body("redmi_note_8" if find_board("redmi_note_8").heat.throttle_c else "pixel_4")
    nature = ours.nature
    assert nature.throttle_c is not None
    ours = body(nature.kind.board.name, policy=Policy(limits=COLD), day={"warm_s": 300.0})
    per_s = nature.macs_per_s
    assert ours.train(0.99 * 300 * per_s, 100) == 100
    assert ours.warmth == pytest.approx(0.99, abs=0.01)
    warm = ours.warmth
    ours.wait_until(ours.now_s + 300)
    assert ours.warmth == pytest.approx(warm / math.e)


def test_hot_board_is_slower_by_its_sustained_ratio() -> None:
    name = next(
        name
        for name in ("raspberry_pi_4", "raspberry_pi_3b_plus", "raspberry_pi_5")
        if find_board(name).heat.sustained_ratio is not None
    )
    ours = body(name, policy=Policy(limits=Limits(heat_margin_c=0, battery_floor=0)))
    nature = ours.nature
    ours.warmth = 1.0
    cold_s = ours.train_time_s(1e9)
    ours._train(1e9)  # the gate would stop it: it is hot
    assert ours.train_s == pytest.approx(cold_s / nature.sustained)


def test_gate_that_closes_stops_training_after_the_step() -> None:
    ours = body(battery_percent=(31.0, 31.0))
    nature = ours.nature
    capacity = nature.capacity_j
    assert capacity is not None
    # One percent of the battery lasts for so many seconds of training.
    seconds = 0.01 * capacity / nature.train_w
    done = ours.train(4 * seconds * nature.macs_per_s, 400)
    assert done == pytest.approx(100, abs=1)
    assert ours.train_s == pytest.approx(seconds, rel=0.02)
    gate = ours.gate()
    assert gate is not None
    assert gate.name == "battery"


def test_metered_hours_and_charging_hours_follow_the_clock() -> None:
    ours = body(
        network="mobile",
        wifi_hours=(18 * 60, 8 * 60),
        charging_hours=(23 * 60, 7 * 60),
        day={"starts": 17 * 60},
    )
    seen = []
    for hour in (0, 2, 7, 13, 16):
        ours.wait_until(hour * HOUR_S)
        seen.append((ours.metered, ours.charging))
    assert seen == [(True, False), (False, False), (False, True), (False, True), (True, False)]


def test_lowest_charge_is_kept_after_the_battery_is_full_again() -> None:
    ours = body(
        "pixel_4",
        day={"starts": 20 * 60},
        battery_percent=(30.0, 30.0),
        charging_hours=(23 * 60, 7 * 60),
        policy=Policy(limits=COLD),
    )
    assert ours.lowest_percent == pytest.approx(30.0)
    charges = []
    for _ in range(12):
        ours.train(1e12, 10)
        charges.append(ours.snapshot().battery.percent or 0.0)
        ours.wait_until(ours.now_s + HOUR_S)
        charges.append(ours.snapshot().battery.percent or 0.0)
    assert charges[-1] > 90
    # The charger comes while it waits, so that the lowest charge may lie between two looks.
    assert ours.lowest_percent is not None
    assert 0 < ours.lowest_percent <= min(charges) < 30
    assert ours.lowest_percent == pytest.approx(min(charges), abs=1.0)


def test_training_that_a_gate_stops_does_not_count_what_it_did_not_draw() -> None:
    floor = Limits(battery_floor=49.0, heat_margin_c=0)
    ours = body("pixel_4", policy=Policy(limits=floor))
    assert ours.train(1e15, 1000) < 1000
    assert ours.lowest_percent == pytest.approx(ours.snapshot().battery.percent)


def test_device_without_a_battery_has_no_lowest_charge() -> None:
    assert body("raspberry_pi_5").lowest_percent is None
