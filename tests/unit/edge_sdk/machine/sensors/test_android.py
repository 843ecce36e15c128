from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edge_sdk.machine.probe import LocalProbe, choose_probe
from edge_sdk.machine.sensors.android import battery_status, parse_battery, parse_wifi
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.system import LinuxSources
from edge_sdk.machine.snapshot import Battery, Zone
from tests.unit.edge_sdk.machine.machines import NO_SUPPLIES, build, pixel_6, program, supply
from tests.waiting import HANGS_S, until

OLD = """{
  "health": "GOOD",
  "percentage": 59,
  "plugged": "UNPLUGGED",
  "status": "DISCHARGING",
  "temperature": 27.200000762939453,
  "current": -693
}
"""
NEW = """{
  "present": true,
  "technology": "Li-ion",
  "health": "GOOD",
  "plugged": "UNPLUGGED",
  "status": "DISCHARGING",
  "temperature": 31.5,
  "voltage": 3900,
  "current": -512000,
  "current_average": -480000,
  "percentage": 45,
  "level": 45,
  "scale": 100,
  "charge_counter": 2100000,
  "energy": null,
  "cycle": 231
}
"""
TERMUX = "data/data/com.termux/files/usr/bin"


def test_battery_of_an_older_version_has_no_watts() -> None:
    snapshot = parse_battery(OLD)
    assert snapshot.battery == Battery(present=True, percent=59.0, charging=False)
    (zone,) = snapshot.heat.zones or ()
    assert zone.name == "battery"
    assert zone.celsius == pytest.approx(27.2)


def test_battery_of_a_newer_version() -> None:
    snapshot = parse_battery(NEW)
    assert snapshot.battery.watts == pytest.approx(3.9 * 0.512)
    assert snapshot.heat.zones == (Zone(name="battery", celsius=31.5),)


@pytest.mark.parametrize("current", [-512, 512, -512_000, 512_000])
def test_current_of_any_sign_and_unit(current: int) -> None:
    said = NEW.replace("-512000", str(current))
    assert parse_battery(said).battery.watts == pytest.approx(3.9 * 0.512)


@pytest.mark.parametrize(
    ("status", "plugged", "charging"),
    [
        ("CHARGING", "PLUGGED_AC", True),
        ("FULL", "PLUGGED_WIRELESS", True),
        ("NOT_CHARGING", "PLUGGED_USB", True),
        ("NOT_CHARGING", "UNPLUGGED", False),
        ("DISCHARGING", "PLUGGED_USB", False),
        ("UNKNOWN", "PLUGGED_AC", None),
    ],
)
def test_charging_is_being_fed_and_not_drained(
    status: str, plugged: str, charging: bool | None
) -> None:
    said = NEW.replace("DISCHARGING", status).replace('"UNPLUGGED"', f'"{plugged}"')
    battery = parse_battery(said).battery
    assert battery.charging is charging
    assert (battery.watts is not None) == (charging is False)


@pytest.mark.parametrize("output", ["", "[]", "3", '"x"', "Error: Termux:API is not installed"])
def test_battery_that_makes_no_sense_is_refused(output: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - JSON's or ours
        parse_battery(output)


def test_temperature_without_a_sensor_is_unknown() -> None:
    assert parse_battery('{"temperature": 0.0}').heat.zones is None
    assert parse_battery('{"temperature": -214748364.8}').heat.zones is None


@pytest.mark.parametrize(
    ("state", "metered"),
    [("COMPLETED", None), ("DISCONNECTED", True), ("SCANNING", None), ("INACTIVE", True)],
)
def test_phone_off_wifi_is_metered(state: str, metered: bool | None) -> None:
    said = f'{{"bssid": "02:00:00:00:00:00", "rssi": -127, "supplicant_state": "{state}"}}'
    assert parse_wifi(said).network.metered is metered


def test_phone_without_termux_api(tmp_path: Path) -> None:
    probe = choose_probe(pixel_6(tmp_path))
    snapshot = probe.snapshot()
    assert probe.name == "android"
    assert snapshot.cpu.cores == 8
    assert snapshot.memory.available_bytes == 3_100_000 * 1024
    assert (snapshot.cpu.load, snapshot.cpu.busy) == (None, None)
    assert snapshot.battery == Battery()
    assert probe.settle(HANGS_S)
    assert probe.snapshot().battery == Battery()


def test_phone_with_termux_api(tmp_path: Path) -> None:
    # Supplies that a program may list but that are hidden from it are no proof of no battery.
    build(pixel_6(tmp_path), NO_SUPPLIES)
    program(tmp_path, "termux-battery-status", f"cat <<'END'\n{NEW}END", TERMUX)
    program(tmp_path, "termux-wifi-connectioninfo", 'echo {\\"supplicant_state\\": 3}', TERMUX)
    probe = choose_probe(tmp_path)
    assert probe.snapshot().battery == Battery()
    assert probe.settle(HANGS_S)
    snapshot = probe.snapshot()
    assert (snapshot.battery.present, snapshot.battery.percent) == (True, 45.0)
    assert snapshot.network.metered is None
    probe.close()


def test_phone_that_shows_its_battery_is_not_asked(tmp_path: Path) -> None:
    pixel_6(tmp_path)
    build(tmp_path, supply("battery", type="Battery", status="Charging", capacity=77))
    asked = tmp_path / "asked"
    program(tmp_path, "termux-battery-status", f"touch {asked}; echo '{{}}'", TERMUX)
    probe = choose_probe(tmp_path)
    assert probe.snapshot().battery == Battery(present=True, percent=77.0, charging=True)
    assert probe.settle(HANGS_S)
    assert not asked.exists()


def test_hanging_command_on_the_path_does_not_delay_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command never ends, nor does its child, which holds its output open."""
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    folder = program(tmp_path, "termux-battery-status", script, "bin").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    files = Files()
    sources = LinuxSources(files, time.monotonic)
    probe = LocalProbe("android", [sources.memory], [battery_status(files)])
    for _ in range(3):
        # While the command runs: a snapshot that waited for it would never come back.
        assert probe.snapshot().battery.percent is None
    until(pids.exists)
    assert not probe.settle(0)
    assert probe.snapshot().memory.available_bytes
    probe.close()
    assert probe.settle(HANGS_S)
    for pid in pids.read_text().split():
        wait_until_gone(int(pid))


def wait_until_gone(pid: int) -> None:
    """A killed orphan may stay a zombie until it is reaped by whoever inherits it."""

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone, lambda: f"process {pid} is still there")
