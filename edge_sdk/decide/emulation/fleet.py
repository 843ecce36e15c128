"""A fleet: devices that are emulated together, each a profile and its initial state.

A fleet is a TOML file: the passing of time and the amount of work, then one table `[[members]]`
per device; docs/devices.md describes it. Its contents are a chosen scenario, so its numbers need no
source.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from edge_sdk.decide.gates import DAY_MINUTES, Hours
from edge_sdk.machine.board import LIMITS, Board, LinkKind, find_board, load_board, shipped
from edge_sdk.program.settings import (
    Example,
    Percent,
    Spelling,
    Within,
    check_fields,
    nearest,
    read_table,
    read_toml,
)
from edge_sdk.protocol.errors import ConfigError, MessageError
from edge_sdk.protocol.messages.topics import check_device


def _read_board(value: Any, folder: Path) -> Board:
    if not isinstance(value, str):
        raise TypeError
    return load_board(folder / value) if value.endswith(".toml") else find_board(value)


def _read_minute(value: Any, _: Path) -> int:
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    return 60 * int(match[1]) + int(match[2])


BoardProfile = Annotated[
    Board,
    Spelling(
        _read_board,
        "the name of a profile, or a file that ends in .toml",
        lambda board: board.name,
    ),
    Example("pixel_4"),
]
Minute = Annotated[
    int,
    Spelling(
        _read_minute,
        "a time of the day, such as 17:00",
        lambda minute: f"{minute // 60:02}:{minute % 60:02}",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """A device of a fleet as it starts. Raises `ConfigError` for an impossible state."""

    board: BoardProfile
    """Profile of the device: a name from docs/devices.md, or a file relative to the fleet's."""
    name: str = ""
    """Name of the device, unique in its fleet; without it, that of the profile."""
    battery_percent: Annotated[Percent | None, Example(80)] = None
    """Charge of the battery; devices without one, which are on mains, have none."""
    charging: bool = False
    """On its charger all the time."""
    charging_hours: Hours | None = None
    """Hours of the day on the charger; without it, as `charging` says."""
    background_load: Annotated[float, Within(least=0, below=1)] = 0.0
    """Share of the CPU that other programs use."""
    network: LinkKind = "wifi"
    """Network it is on; mobile ones are metered."""
    wifi_hours: Hours | None = None
    """Hours of the day in which a device on a mobile network has Wi-Fi."""
    up_mbit_s: Annotated[float | None, LIMITS["up_mbit_s"], Example(8)] = None
    """Megabits per second that it sends; without it, what the profile says is usual."""
    down_mbit_s: Annotated[float | None, LIMITS["down_mbit_s"], Example(40)] = None
    """Megabits per second that it receives; without it, what the profile says is usual."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.board.name.replace("_", "-"))
        try:
            check_device(self.name)
        except MessageError as error:
            raise ConfigError(f"name: {error}") from error
        check_fields(self)
        if (self.battery_percent is None) != (self.board.battery is None):
            has = "has no battery" if self.board.battery is None else "has a battery"
            raise ConfigError(f"battery_percent = {self.battery_percent}: {self.board.name} {has}")
        if self.charging and self.board.battery is None:
            raise ConfigError(f"charging = true: {self.board.name} has no battery")
        if self.charging_hours is not None and (self.charging or self.board.battery is None):
            why = "it always charges" if self.charging else f"{self.board.name} has no battery"
            raise ConfigError(f"charging_hours: {why}")
        if self.wifi_hours is not None and self.network != "mobile":
            raise ConfigError(f'wifi_hours: for network = "mobile", not {self.network!r}')

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
    """Members and their schedule. Raises `ConfigError` for impossible values."""

    members: tuple[FleetMember, ...]
    """The devices, in the order of the file."""
    work: Annotated[float, Within(least=1e-3, most=1e9)] = 1.0
    """Steps of a device that one step of the run stands for."""
    interval_s: Annotated[float, Within(least=1, most=7 * 86_400)] = 600.0
    """Seconds between the beginnings of two rounds."""
    deadline_s: Annotated[float, Within(least=1, most=7 * 86_400)] = 600.0
    """Seconds for fetching, training and sending in a round."""
    starts: Minute = 12 * 60
    """Time of the day at which the first round begins."""

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError("members: give at least one device, as a table [[members]]")
        check_fields(self)
        if not 0 <= self.starts < DAY_MINUTES:
            raise ConfigError(f"starts = {self.starts}: must be a minute of the day")
        names = [member.name for member in self.members]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(
                    f"members[{index}].name = {name!r}: another member has it; choose one"
                )

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
        """Return the member of this name. Raises `ConfigError`."""
        named = {member.name: member for member in self.members}
        if name not in named:
            raise ConfigError(f"the fleet has no member {name!r}{nearest(name, named)}")
        return named[name]


def load_fleet(path: str | Path) -> Fleet:
    """The fleet in a file. Raises `ConfigError`: which file, member and key."""
    return read_table(Fleet, read_toml(path), label=f"{path}: ", base=Path(path).parent)


def find_fleet(name: str) -> Fleet:
    """Load a fleet that ships with the project, such as `mixed`. Raises `ConfigError`."""
    return load_fleet(shipped_fleet(name))


def shipped_fleet(name: str) -> Path:
    """Return the file of a fleet that ships with the project. Raises `ConfigError`."""
    folder = shipped() / "fleets"
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in names:
        raise ConfigError(f"there is no fleet {name!r}{nearest(name, names)}")
    return folder / f"{name}.toml"


def _is_within(hours: tuple[int, int] | None, minute: int) -> bool:
    if hours is None:
        return False
    start, end = hours
    return start <= minute < end if start <= end else minute >= start or minute < end
