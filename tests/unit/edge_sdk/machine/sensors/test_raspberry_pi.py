from __future__ import annotations

from pathlib import Path

import pytest

from edge_sdk.machine.probe import choose_probe
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.raspberry_pi import read_undervoltage, vcgencmd
from tests.unit.edge_sdk.machine.machines import (
    build,
    cooling,
    program,
    raspberry_pi_3b_plus,
    raspberry_pi_5,
    raspberry_pi_zero_2w,
)
from tests.waiting import HANGS_S

FLAGS = "sys/devices/platform/soc/soc:firmware/get_throttled"


def test_pi_5_at_rest(tmp_path: Path) -> None:
    probe = choose_probe(raspberry_pi_5(tmp_path))
    snapshot = probe.snapshot()
    assert probe.name == "raspberry-pi"
    assert snapshot.heat.throttling is False
    assert snapshot.power.undervoltage is False
    assert snapshot.power.total_watts is None
    assert snapshot.battery.present is False
    assert [(each.name, each.celsius) for each in snapshot.heat.zones or ()] == [
        ("cpu-thermal", 47.2)
    ]
    assert (snapshot.cpu.cores, snapshot.cpu.max_mhz, snapshot.cpu.mhz) == (4, 2400, 1500)


def test_pi_3b_plus_hot_and_on_a_weak_supply(tmp_path: Path) -> None:
    snapshot = choose_probe(raspberry_pi_3b_plus(tmp_path)).snapshot()
    assert snapshot.heat.throttling is True
    assert snapshot.power.undervoltage is True


@pytest.mark.parametrize(
    ("flags", "throttling", "undervoltage"),
    [
        ("0", False, False),
        ("50000", False, False),
        ("1", False, True),
        ("2", True, False),
        ("4", True, False),
        ("8", True, False),
        ("50005", True, True),
        ("0x50005", True, True),
        ("", None, None),
        ("throttled", None, None),
    ],
)
def test_flags_of_the_past_do_not_count(
    tmp_path: Path, flags: str, throttling: bool | None, undervoltage: bool | None
) -> None:
    snapshot = choose_probe(build(raspberry_pi_zero_2w(tmp_path), {FLAGS: flags})).snapshot()
    assert snapshot.heat.throttling is throttling
    assert snapshot.power.undervoltage is undervoltage


def test_alarm_of_the_voltage_driver(tmp_path: Path) -> None:
    raspberry_pi_5(tmp_path)
    build(tmp_path, {"sys/class/hwmon/hwmon2/in0_lcrit_alarm": "1\n"})
    assert read_undervoltage(Files(tmp_path)).power.undervoltage is True


def test_pi_without_the_file_asks_the_firmware(tmp_path: Path) -> None:
    # Linux's own view of throttling is not the firmware's.
    build(raspberry_pi_zero_2w(tmp_path), cooling(0, "thermal-cpufreq-0", 0))
    program(tmp_path, "vcgencmd", 'test "$1" = get_throttled && echo throttled=0x50005')
    probe = choose_probe(tmp_path)
    assert probe.snapshot().heat.throttling is None
    assert probe.settle(HANGS_S)
    snapshot = probe.snapshot()
    assert snapshot.heat.throttling is True
    assert snapshot.power.undervoltage is True
    assert snapshot.age_s("heat.throttling") is not None
    probe.close()


def test_answer_of_the_firmware_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="error=2"):
        vcgencmd(Files()).parse('error=2 error_msg="Invalid arguments"')
