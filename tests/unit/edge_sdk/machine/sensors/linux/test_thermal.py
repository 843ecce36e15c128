from __future__ import annotations

from pathlib import Path

from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.thermal import read_heat
from edge_sdk.machine.snapshot import Heat, Trip, Zone
from tests.unit.edge_sdk.machine.machines import build, cooling, jetson_orin_nano, laptop, zone


def heat(root: Path) -> Heat:
    return read_heat(Files(root)).heat


def test_zones_with_trips_and_without_sensors_that_are_off(tmp_path: Path) -> None:
    assert heat(jetson_orin_nano(tmp_path)) == Heat(
        zones=(
            Zone(
                name="cpu-thermal",
                celsius=99.1,
                trips=(
                    Trip(kind="passive", celsius=99.0),
                    Trip(kind="critical", celsius=104.5),
                ),
            ),
            Zone(name="gpu-thermal", celsius=97.5),
        ),
        throttling=True,
    )


def test_trips_that_are_off_and_zones_that_are_no_temperatures_are_left_out(tmp_path: Path) -> None:
    build(laptop(tmp_path), zone(2, "ibat", 1_300_000), zone(3, "soc", 85))
    assert heat(tmp_path) == Heat(
        zones=(Zone(name="acpitz", celsius=52.0, trips=(Trip(kind="critical", celsius=103.0),)),),
        throttling=False,
    )


def test_fans_do_not_slow_down(tmp_path: Path) -> None:
    assert heat(build(tmp_path, cooling(0, "pwm-fan", 3))) == Heat()
    assert heat(build(tmp_path, cooling(1, "thermal-cpufreq-1", 1))).throttling is True


def test_zones_are_in_order_of_their_numbers(tmp_path: Path) -> None:
    build(tmp_path, *(zone(number, f"z{number}", 40_000) for number in (10, 2, 0)))
    assert [each.name for each in heat(tmp_path).zones or ()] == ["z0", "z2", "z10"]


def test_heat_without_any_files_is_unknown(tmp_path: Path) -> None:
    assert heat(tmp_path) == Heat()
