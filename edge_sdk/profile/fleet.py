"""A fleet: devices that are emulated together, each a profile and the state it starts in.

A fleet is a TOML file with one table `[[members]]` per device; docs/devices.md describes it. What
is in it is a scenario somebody chose, so its numbers need no source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from edge_sdk.profile.board import (
    LIMITS,
    Board,
    BoardError,
    Link,
    check_keys,
    find_board,
    load_board,
    nearest,
    read_toml,
    shipped,
)
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.topics import check_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A device of a fleet as it starts. Raises `BoardError` for a state that cannot be."""

    name: str
    """Unique in its fleet."""
    board: Board
    battery_percent: float | None = None
    """0 to 100; None exactly for boards without a battery, which are on mains."""
    charging: bool = False
    background_load: float = 0.0
    """Share of the CPU that others use, 0 to below 1."""
    network: Link = "wifi"
    up_mbit_s: float | None = None
    """None: what the profile says is usual, if it does."""
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
        if not 0 <= self.background_load < 1:
            raise BoardError(f"background_load = {self.background_load}: must be 0 to below 1")
        if self.network not in get_args(Link):
            known = ", ".join(get_args(Link))
            raise BoardError(f"network = {self.network!r}: must be one of {known}")
        for key in ("up_mbit_s", "down_mbit_s"):
            _check(self, key, *LIMITS[key])

    @property
    def metered(self) -> bool:
        """Whether traffic costs money: on mobile networks."""
        return self.network == "mobile"


def load_fleet(path: Path) -> tuple[Member, ...]:
    """The members in a file, in its order. Raises `BoardError`: which file, member and key."""
    content = read_toml(path)
    try:
        return _read_fleet(content, path.parent)
    except BoardError as error:
        raise BoardError(f"{path}: {error}") from error


def find_fleet(name: str) -> tuple[Member, ...]:
    """A fleet that ships with the project, such as `mixed`. Raises `BoardError`."""
    folder = shipped() / "fleets"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in names:
        raise BoardError(f"there is no fleet {name!r}{nearest(name, names)}")
    return load_fleet(folder / f"{name}.toml")


_NUMBERS = ("battery_percent", "background_load", "up_mbit_s", "down_mbit_s")
_KEYS = ("device", *(each.name for each in fields(Member) if each.name != "board"))


def _read_fleet(content: Mapping[str, Any], folder: Path) -> tuple[Member, ...]:
    check_keys(content, ["members"])
    tables = content.get("members")
    if not isinstance(tables, list) or not tables:
        raise BoardError("members: give at least one device, as a table [[members]]")
    members: dict[str, Member] = {}
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


def _read_member(table: Mapping[str, Any], folder: Path) -> Member:
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
    for key in ("name", "network"):
        if not isinstance(values.get(key, ""), str):
            raise BoardError(f"{key} = {values[key]!r}: must be a text in quotes")
    values.setdefault("name", board.name.replace("_", "-"))
    return Member(board=board, **values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check(member: Member, key: str, least: float, greatest: float) -> None:
    value = getattr(member, key)
    if value is not None and not least <= value <= greatest:
        raise BoardError(f"{key} = {value}: must be from {least:g} to {greatest:g}")
