"""Fleets: devices and the state they start in; mistakes are named with file, member and key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edge_sdk.decide.emulation.fleet import Fleet, FleetMember, find_fleet, load_fleet
from edge_sdk.machine.board import find_board, write_board
from edge_sdk.protocol.errors import ConfigError

TWO = """
work = 900
interval_s = 1800.5
deadline_s = 300
starts = "17:05"

[[members]]
board = "pixel_4"
battery_percent = 33
charging = true
background_load = 0.25
network = "mobile"
up_mbit_s = 8
down_mbit_s = 40.5

[[members]]
board = "jetson_nano"
name = "roof"
"""


HOURS = """
[[members]]
board = "pixel_6"
battery_percent = 24
charging_hours = "22:30-06:00"
network = "mobile"
wifi_hours = "08:00-17:00"
"""


def load(folder: Path, text: str) -> Fleet:
    path = folder / "fleet.toml"
    path.write_text(text, encoding="utf-8")
    return load_fleet(path)


def test_members_are_read_in_order(tmp_path: Path) -> None:
    assert load(tmp_path, TWO).members == (
        FleetMember(
            name="pixel-4",
            board=find_board("pixel_4"),
            battery_percent=33,
            charging=True,
            background_load=0.25,
            network="mobile",
            up_mbit_s=8,
            down_mbit_s=40.5,
        ),
        FleetMember(name="roof", board=find_board("jetson_nano")),
    )


def test_scenario_is_read_and_has_defaults(tmp_path: Path) -> None:
    fleet = load(tmp_path, TWO)
    assert (fleet.work, fleet.interval_s, fleet.deadline_s) == (900, 1800.5, 300)
    assert fleet.starts == 17 * 60 + 5
    plain = load(tmp_path, '[[members]]\nboard = "jetson_nano"')
    assert plain == Fleet(
        members=(FleetMember(name="jetson-nano", board=find_board("jetson_nano")),)
    )
    assert plain.work == 1


def test_members_are_found_by_name(tmp_path: Path) -> None:
    fleet = load(tmp_path, TWO)
    assert fleet.find("roof") is fleet[1]
    with pytest.raises(ConfigError, match=r"has no member 'rof'; did you mean 'roof'\?"):
        fleet.find("rof")


@pytest.mark.parametrize(
    ("time", "charges", "metered"),
    [
        ("22:29", False, True),
        ("22:30", True, True),
        ("00:00", True, True),
        ("05:59", True, True),
        ("06:00", False, True),
        ("08:00", False, False),
        ("16:59", False, False),
        ("17:00", False, True),
    ],
)
def test_hours_of_a_member_may_span_midnight(
    tmp_path: Path, time: str, charges: bool, metered: bool
) -> None:
    (member,) = load(tmp_path, HOURS)
    minute = 60 * int(time[:2]) + int(time[3:])
    assert (member.charges_at(minute), member.metered_at(minute)) == (charges, metered)


def test_member_without_hours_is_always_the_same(tmp_path: Path) -> None:
    phone, board = load(tmp_path, TWO)
    for minute in (0, 700, 1439):
        assert (phone.charges_at(minute), phone.metered_at(minute)) == (True, True)
        assert (board.charges_at(minute), board.metered_at(minute)) == (False, False)


def test_only_mobile_networks_are_metered(tmp_path: Path) -> None:
    phone, board = load(tmp_path, TWO)
    assert phone.metered
    assert not board.metered


def test_profile_beside_the_fleet_is_found(tmp_path: Path) -> None:
    write_board(tmp_path / "own.toml", find_board("raspberry_pi_5"))
    (member,) = load(tmp_path, '[[members]]\nboard = "own.toml"')
    assert member.board == find_board("raspberry_pi_5")
    assert member.name == "raspberry-pi-5"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"pixel_4"', '"pixel_44"', "members[0].board: there is no profile 'pixel_44'; did you"),
        ('board = "pixel_4"\n', "", "members[0].board = None: must name a profile"),
        ('"pixel_4"', '"no.toml"', "no.toml is not there"),
        ("charging", "charged", "members[0].charged is not a known key; did you mean 'charging'?"),
        ("true", '"yes"', "members[0].charging = 'yes': must be true or false"),
        ("33", "133", "members[0].battery_percent = 133: must be from 0 to 100"),
        ("33", "nan", "members[0].battery_percent = nan: must be a number"),
        ("33", "true", "members[0].battery_percent = True: must be a number"),
        ("battery_percent = 33\n", "", "members[0].battery_percent = None: pixel_4 has a battery"),
        ("0.25", "1", "members[0].background_load = 1: must be 0 to below 1"),
        ('"mobile"', '"lte"', "members[0].network = 'lte': must be one of wifi, ethernet, mobile"),
        ('"mobile"', "4", "members[0].network = 4: must be a text in quotes"),
        ("= 8\n", "= 0\n", "members[0].up_mbit_s = 0: must be from 0.001"),
        ('"roof"', '"roof"\nbattery_percent = 9', "[1].battery_percent = 9: jetson_nano has no"),
        ('"roof"', '"roof"\ncharging = true', "[1].charging = true: jetson_nano has no battery"),
        ('"roof"', '"Roof"', "members[1].name: 'Roof' cannot name a device"),
        ('"roof"', '"coordinator"', "members[1].name: 'coordinator' cannot name a device"),
        ('"roof"', '"pixel-4"', "members[1].name = 'pixel-4': another member has it"),
        ('"roof"', "5", "members[1].name = 5: must be a text in quotes"),
        ("= 900", "= 0", "work = 0: must be from 0.001 to"),
        ("= 900", '= "900"', "work = '900': must be a number"),
        ("1800.5", "inf", "interval_s = inf: must be a number"),
        ("= 300", "= 0.1", "deadline_s = 0.1: must be from 1 to"),
        ("17:05", "25:05", "starts = '25:05': must be a time of the day, such as"),
        ('"17:05"', "17", "starts = 17: must be a time of the day, such as"),
        ("interval_s", "interval", "interval is not a known key; did you mean 'interval_s'?"),
        (TWO, "", "members: give at least one device"),
        (TWO, "members = 3", "members: give at least one device"),
        (TWO, "members = [3]", "members[0] = 3: must be a table"),
        (TWO, "devices = []", "devices is not a known key"),
    ],
)  # fmt: skip
def test_mistake_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert TWO.count(old) == 1
    with pytest.raises(ConfigError, match=re.escape(complaint)) as error:
        load(tmp_path, TWO.replace(old, new))
    assert str(error.value).startswith(f"{tmp_path}/fleet.toml: ")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("22:30-06:00", "22:30", "members[0].charging_hours = '22:30': write hours like"),
        ("22:30-06:00", "22:30-26:00", "members[0].charging_hours = '22:30-26:00': a day has 24"),
        ('"22:30-06:00"', "7", "members[0].charging_hours = 7: must be a text in quotes"),
        ("24", "24\ncharging = true", "members[0].charging_hours: it always charges"),
        ('"pixel_6"\nbattery_percent = 24', '"jetson_nano"', "charging_hours: jetson_nano has no"),
        ('"mobile"', '"wifi"', "members[0].wifi_hours: for network = \"mobile\", not 'wifi'"),
    ],
)
def test_mistake_of_hours_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert HOURS.count(old) == 1
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load(tmp_path, HOURS.replace(old, new))


def test_broken_profile_of_a_member_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('name = "own"')
    with pytest.raises(ConfigError, match=r"fleet.toml: members\[0\]\.board: .*own.toml: title is"):
        load(tmp_path, '[[members]]\nboard = "own.toml"')


def test_shipped_fleet_is_found_by_name() -> None:
    assert len(find_fleet("mixed")) == 8
    with pytest.raises(ConfigError, match=r"no fleet 'mixt'; did you mean 'mixed'\?"):
        find_fleet("mixt")
