from __future__ import annotations

from pathlib import Path

import pytest

from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.power_supply import read_battery
from edge_sdk.machine.snapshot import Battery
from tests.unit.edge_sdk.machine.machines import NO_SUPPLIES, build, laptop, supply


def battery(root: Path) -> Battery:
    return read_battery(Files(root)).battery


def test_battery_of_a_laptop(tmp_path: Path) -> None:
    assert battery(laptop(tmp_path)) == Battery(
        present=True, percent=63.0, charging=False, watts=8.45, capacity_wh=50.0
    )


def test_no_battery_is_known_where_supplies_are_shown(tmp_path: Path) -> None:
    assert battery(build(tmp_path, NO_SUPPLIES)) == Battery(present=False)
    build(tmp_path, supply("AC", type="Mains", online=1))
    build(tmp_path, supply("mouse", type="Battery", scope="Device", capacity=4))
    build(tmp_path, supply("BAT1", type="Battery", present=0))
    assert battery(tmp_path) == Battery(present=False)


def test_no_battery_is_not_concluded_from_nothing(tmp_path: Path) -> None:
    assert battery(tmp_path) == Battery()
    build(tmp_path, supply("thing", online=1))
    assert battery(tmp_path) == Battery()


@pytest.mark.parametrize("sign", [1, -1])
def test_watts_come_from_volts_and_amperes_of_any_sign(tmp_path: Path, sign: int) -> None:
    build(
        tmp_path,
        supply(
            "battery",
            type="Battery",
            status="Discharging",
            capacity=80,
            voltage_now=3_800_000,
            current_now=sign * 500_000,
            charge_full=4_000_000,
            voltage_min_design=3_850_000,
        ),
    )
    found = battery(tmp_path)
    assert found.watts == pytest.approx(1.9)
    assert found.capacity_wh == pytest.approx(15.4)


@pytest.mark.parametrize(
    ("status", "online", "charging"),
    [
        ("Charging", 1, True),
        ("Charging", None, True),
        ("Full", 1, True),
        ("Full", None, True),
        ("Full", 0, False),
        ("Not charging", 1, True),
        ("Not charging", 0, False),
        ("Not charging", None, None),
        ("Unknown", 1, True),
        ("Unknown", None, None),
        ("Discharging", 1, False),
        ("gibberish", None, None),
    ],
)
def test_charging_is_being_fed_and_not_drained(
    tmp_path: Path, status: str, online: int | None, charging: bool | None
) -> None:
    build(tmp_path, supply("BAT0", type="Battery", status=status, capacity=50, power_now=1_000_000))
    if online is not None:
        build(tmp_path, supply("USB", type="USB", online=online))
    found = battery(tmp_path)
    assert found.charging is charging
    assert found.watts == (1.0 if charging is False else None)


def test_two_batteries_count_as_one_by_energy(tmp_path: Path) -> None:
    build(
        tmp_path,
        supply("BAT0", type="Battery", status="Discharging", capacity=100, energy_full=20_000_000),
        supply("BAT1", type="Battery", status="Unknown", capacity=40, energy_full=60_000_000),
        supply("BAT0", power_now=3_000_000),
        supply("BAT1", power_now=2_000_000),
    )
    assert battery(tmp_path) == Battery(
        present=True, percent=55.0, charging=False, watts=5.0, capacity_wh=80.0
    )


def test_two_batteries_of_unknown_size_are_as_full_as_the_emptier(tmp_path: Path) -> None:
    build(
        tmp_path,
        supply("BAT0", type="Battery", status="Discharging", capacity=90),
        supply("BAT1", type="Battery", status="Discharging", capacity=20, energy_full=1_000_000),
    )
    found = battery(tmp_path)
    assert (found.percent, found.watts, found.capacity_wh) == (20.0, None, None)
