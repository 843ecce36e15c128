"""A fleet: devices that are emulated together, each a profile and its initial state.

A fleet is a TOML file: the passing of time and the amount of work, then one table `[[members]]`
per device; docs/devices.md describes it. Its contents are a chosen scenario, so its numbers need no
source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from edge_sdk.decide.gates import DAY_MINUTES, parse_hours
from edge_sdk.machine.board import (
    LIMITS,
    Board,
    BoardError,
    LinkKind,
    check_keys,
    find_board,
    load_board,
    nearest,
    read_toml,
    shipped,
)
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import check_device


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A device of a fleet as it starts. Raises `BoardError` for an impossible state."""

    name: str
    """Unique in its fleet."""
    board: Board
    battery_percent: float | None = None
    """0 to 100; None exactly for boards without a battery, which are on mains."""
    charging: bool = False
    charging_hours: tuple[int, int] | None = None
    """Start and end, in minutes of the day, of its time on the charger; None: as `charging`."""
    background_load: float = 0.0
    """Share of the CPU that other programs use, 0 to below 1."""
    network: LinkKind = "wifi"
    wifi_hours: tuple[int, int] | None = None
    """Start and end, in minutes of the day, of Wi-Fi for a device on a mobile network."""
    up_mbit_s: float | None = None
    """None: the usual value in the profile, if any."""
    down_mbit_s: float | None = None

    def __post_init__(self) -> None:
        try:
            check_device(self.name)
        except MessageError as error:
            raise BoardError(f"name: {error}") from error
        if (self.battery_percent is None) != (self.board.battery is None):
            has = "has no battery" if self.board.battery is None else "has a battery"
            raise BoardError(f"battery_percent = {self.battery_percent}: {self.board.name} {has}")
        _check(self, "battery_percent", 0, 100)
        if self.charging and self.board.battery is None:
            raise BoardError(f"charging = true: {self.board.name} has no battery")
        if self.charging_hours is not None and (self.charging or self.board.battery is None):
            why = "it always charges" if self.charging else f"{self.board.name} has no battery"
            raise BoardError(f"charging_hours: {why}")
        if self.wifi_hours is not None and self.network != "mobile":
            raise BoardError(f'wifi_hours: for network = "mobile", not {self.network!r}')
        if not 0 <= self.background_load < 1:
            raise BoardError(f"background_load = {self.background_load}: must be 0 to below 1")
        if self.network not in get_args(LinkKind):
            known = ", ".join(get_args(LinkKind))
            raise BoardError(f"network = {self.network!r}: must be one of {known}")
        for key in ("up_mbit_s", "down_mbit_s"):
            _check(self, key, *LIMITS[key])

    @property
    def metered(self) -> bool:
        """True if traffic costs money outside `wifi_hours`: on mobile networks."""
        return self.network == "mobile"

    def charges_at(self, minute: int) -> bool:
        """True if it is on its charger in this minute of the day."""
        return self.charging or _is_within(self.charging_hours, minute)

    def metered_at(self, minute: int) -> bool:
        """True if traffic costs money in this minute of the day."""
        return self.metered and not _is_within(self.wifi_hours, minute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Members and their schedule. Raises `BoardError` for impossible values."""

    members: tuple[FleetMember, ...]
    """Members in the order of the file, with unique names."""
    work: float = 1.0
    """Number of a device's steps that one step of the run stands for."""
    interval_s: float = 600.0
    """Seconds between the starts of two rounds."""
    deadline_s: float = 600.0
    """Seconds for fetching, training and sending in a round."""
    starts: int = 12 * 60
    """Start of the first round, in minutes of the day."""

    def __post_init__(self) -> None:
        if not self.members:
            raise BoardError("members: give at least one device, as a table [[members]]")
        for key, (least, greatest) in _SCENARIO.items():
            _check(self, key, least, greatest)
        if not 0 <= self.starts < DAY_MINUTES:
            raise BoardError(f"starts = {self.starts}: must be a minute of the day")

    def __iter__(self) -> Iterator[FleetMember]:
        """Iterate over its members."""
        return iter(self.members)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self.members)

    def __getitem__(self, index: int) -> FleetMember:
        """Return one of its members."""
        return self.members[index]

    def find(self, name: str) -> FleetMember:
        """Return the member of this name. Raises `BoardError`."""
        named = {member.name: member for member in self.members}
        if name not in named:
            raise BoardError(f"the fleet has no member {name!r}{nearest(name, named)}")
        return named[name]


def load_fleet(path: Path) -> Fleet:
    """Load a fleet from a file. Raises `BoardError`, which names file, member and key."""
    content = read_toml(path)
    try:
        return _read_fleet(content, path.parent)
    except BoardError as error:
        raise BoardError(f"{path}: {error}") from error


def find_fleet(name: str) -> Fleet:
    """Load a fleet that ships with the project, such as `mixed`. Raises `BoardError`."""
    return load_fleet(shipped_fleet(name))


def shipped_fleet(name: str) -> Path:
    """Return the file of a fleet that ships with the project. Raises `BoardError`."""
    folder = shipped() / "fleets"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in names:
        raise BoardError(f"there is no fleet {name!r}{nearest(name, names)}")
    return folder / f"{name}.toml"


_SCENARIO: dict[str, tuple[float, float]] = {
    "work": (1e-3, 1e9),
    "interval_s": (1, 7 * 86_400),
    "deadline_s": (1, 7 * 86_400),
}
"""Settings of a fleet besides its members, with their smallest and largest sensible values."""
_NUMBERS = ("battery_percent", "background_load", "up_mbit_s", "down_mbit_s")
_HOURS = ("charging_hours", "wifi_hours")
_KEYS = ("device", *(each.name for each in fields(FleetMember) if each.name != "board"))


def _read_fleet(content: Mapping[str, Any], folder: Path) -> Fleet:
    check_keys(content, [each.name for each in fields(Fleet)])
    tables = content.get("members", [])
    if not isinstance(tables, list):
        raise BoardError("members: give at least one device, as a table [[members]]")
    values = {key: value for key, value in content.items() if key != "members"}
    for key in _SCENARIO:
        if key in values and not _is_number(values[key]):
            raise BoardError(f"{key} = {values[key]!r}: must be a number")
    if "starts" in values:
        values["starts"] = _minute(values["starts"])
    return Fleet(members=_read_members(tables, folder), **values)


def _read_members(tables: list[Any], folder: Path) -> tuple[FleetMember, ...]:
    members: dict[str, FleetMember] = {}
    for index, table in enumerate(tables):
        where = f"members[{index}]"
        if not isinstance(table, dict):
            raise BoardError(f"{where} = {table!r}: must be a table [[members]]")
        check_keys(table, _KEYS, where)
        try:
            member = _read_member(table, folder)
        except BoardError as error:
            raise BoardError(f"{where}.{error}") from error
        if member.name in members:
            raise BoardError(f"{where}.name = {member.name!r}: another member has it; choose one")
        members[member.name] = member
    return tuple(members.values())


def _minute(text: Any) -> int:
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text) if isinstance(text, str) else None
    if match is None:
        raise BoardError(f'starts = {text!r}: must be a time of the day, such as "17:00"')
    return 60 * int(match[1]) + int(match[2])


def _read_member(table: Mapping[str, Any], folder: Path) -> FleetMember:
    values = dict(table)
    device = values.pop("device", None)
    if not isinstance(device, str):
        raise BoardError(f"device = {device!r}: must name a profile, or a file ending in .toml")
    try:
        board = load_board(folder / device) if device.endswith(".toml") else find_board(device)
    except BoardError as error:
        raise BoardError(f"device: {error}") from error
    for key in _NUMBERS:
        if key in values and not _is_number(values[key]):
            raise BoardError(f"{key} = {values[key]!r}: must be a number")
    if not isinstance(values.get("charging", False), bool):
        raise BoardError(f"charging = {values['charging']!r}: must be true or false")
    for key in ("name", "network", *_HOURS):
        if not isinstance(values.get(key, ""), str):
            raise BoardError(f"{key} = {values[key]!r}: must be a text in quotes")
    for key in _HOURS:
        if key in values:
            values[key] = _hours(key, values[key])
    values.setdefault("name", board.name.replace("_", "-"))
    return FleetMember(board=board, **values)


def _is_within(hours: tuple[int, int] | None, minute: int) -> bool:
    if hours is None:
        return False
    start, end = hours
    return start <= minute < end if start <= end else minute >= start or minute < end


def _hours(key: str, text: str) -> tuple[int, int]:
    try:
        return parse_hours(text)
    except ValueError as error:
        raise BoardError(f"{key} = {error}") from error


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(member: FleetMember | Fleet, key: str, least: float, greatest: float) -> None:
    value = getattr(member, key)
    if value is not None and not least <= value <= greatest:
        raise BoardError(f"{key} = {value}: must be from {least:g} to {greatest:g}")
