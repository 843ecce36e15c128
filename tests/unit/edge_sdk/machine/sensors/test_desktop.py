"""macOS and Windows: what commands print there, and psutil, which is the same everywhere."""

from __future__ import annotations

import json
import plistlib
import time

import pytest

from edge_sdk.machine.probe import choose_probe
from edge_sdk.machine.sensors.desktop import (
    PsutilSources,
    parse_ioreg,
    parse_pmset,
    parse_powershell,
)
from edge_sdk.machine.snapshot import Zone
from tests.waiting import HANGS_S

M2 = {
    "Voltage": 11_400,
    "InstantAmperage": 18_446_744_073_709_550_616,  # −1000
    "Amperage": 18_446_744_073_709_550_600,
    "AppleRawMaxCapacity": 4_400,
    "MaxCapacity": 100,
    "CurrentCapacity": 63,
    "ExternalConnected": False,
    "IsCharging": False,
    "Temperature": 3_035,
}
INTEL = {
    "Voltage": 12_000,
    "Amperage": -1_500,
    "MaxCapacity": 6_000,
    "ExternalConnected": False,
    "Temperature": 2_999,
}


def ioreg_output(**changes: object) -> str:
    return plistlib.dumps([{**M2, **changes}]).decode()


def test_mac_battery_of_apples_own_chips() -> None:
    snapshot = parse_ioreg(ioreg_output())
    assert snapshot.battery.watts == pytest.approx(11.4)
    assert snapshot.battery.capacity_wh == pytest.approx(50.16)
    assert snapshot.heat.zones == (Zone(name="battery", celsius=30.35),)


def test_mac_battery_of_intel() -> None:
    battery = parse_ioreg(plistlib.dumps([INTEL]).decode()).battery
    assert battery.watts == pytest.approx(18.0)
    assert battery.capacity_wh == pytest.approx(72.0)


def test_mac_battery_that_charges_has_no_watts() -> None:
    output = ioreg_output(ExternalConnected=True, InstantAmperage=2_000)
    assert parse_ioreg(output).battery.watts is None


def test_mac_without_a_battery() -> None:
    assert parse_ioreg("").known() == {}


@pytest.mark.parametrize(
    ("output", "throttling"),
    [
        (
            "2026-11-17 10:00:00 +0100 CPU Power notify\n"
            "\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 8\n\tCPU_Speed_Limit \t= 48\n",
            True,
        ),
        ("\tCPU_Scheduler_Limit \t= 100\n\tCPU_Speed_Limit \t= 100\n", False),
        (
            "Note: No thermal warning level has been recorded\n"
            "Note: No performance warning level has been recorded\n"
            "Note: No CPU power status has been recorded\n",
            False,
        ),
        ("", None),
    ],
)
def test_mac_says_whether_it_throttles(output: str, throttling: bool | None) -> None:
    assert parse_pmset(output).heat.throttling is throttling


@pytest.mark.parametrize(
    ("cost", "metered"),
    [("Unrestricted", False), ("Fixed", True), ("Variable", True), ("Unknown", None), ("", None)],
)
def test_windows_battery_and_network(cost: str, metered: bool | None) -> None:
    said = {"discharge_mw": [6_000, 1_500], "full_mwh": [40_000, 20_000], "cost": cost}
    snapshot = parse_powershell(json.dumps(said))
    assert snapshot.battery.watts == 7.5
    assert snapshot.battery.capacity_wh == 60.0
    assert snapshot.network.metered is metered


def test_windows_without_a_battery_or_on_mains() -> None:
    desktop = {"discharge_mw": [], "full_mwh": [], "cost": ""}
    assert parse_powershell(json.dumps(desktop)).known() == {}
    plugged_in = {"discharge_mw": [0], "full_mwh": [50_000], "cost": ""}
    assert parse_powershell(json.dumps(plugged_in)).battery.watts is None


def test_psutil_tells_of_this_machine() -> None:
    sources = PsutilSources(time.monotonic)
    assert (sources.cpu().cpu.cores or 0) >= 1
    memory = sources.memory().memory
    assert memory.total_bytes is not None
    assert memory.available_bytes is not None
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert sources.battery().battery.present is not None
    assert sources.network().network.up_bytes_per_s is None


@pytest.mark.parametrize("name", ["macos", "windows"])
def test_probes_of_other_systems_run_anywhere(name: str) -> None:
    probe = choose_probe(name="macos" if name == "macos" else "windows")
    snapshot = probe.snapshot()
    assert probe.settle(HANGS_S)  # their commands are not installed here, or they end
    assert snapshot.memory.available_bytes
    assert snapshot.cpu.cores
    probe.close()
