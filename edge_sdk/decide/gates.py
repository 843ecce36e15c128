"""Conditions under which a device trains at all, checked before a round and during it.

    gate       closed when                                       if unknown
    ---------  ------------------------------------------------  ---------------------------------
    battery    below the floor and not charging                  closed: it may be almost empty
    heat       throttled, status moderate or above, or within    open: the kernel slows a hot
               the margin of a trip point                        processor down by itself
    network    metered, unless the owner allows it               open: wired boards do not say
    memory     programs wait for memory (PSI)                    open: levels are weighed by free
                                                                 memory
    hours      within the owner's quiet hours                    –

A device known to have no battery runs on mains, so its first gate is open. The thresholds 30 % and
*moderate* are those of Android's own federated computing; the others are ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from edge_sdk.machine.snapshot import Snapshot, Zone
from edge_sdk.program.settings import (
    ConfigError,
    Example,
    Percent,
    Share,
    Spelling,
    Within,
    check_fields,
)

GateName = Literal["battery", "heat", "network", "memory", "hours"]

MODERATE = 2
"""Android's thermal status at which background work should stop."""
DAY_MINUTES = 24 * 60
TRIPS = ("passive", "hot", "critical")
"""Trip points at which the system slows down or worse; fans start at others."""


def parse_hours(text: str) -> tuple[int, int]:
    """Hours of the day as people write them, `22:30-07:00`. Raises `ValueError`."""
    match = re.fullmatch(r"(\d{1,2}):(\d\d)\s*-\s*(\d{1,2}):(\d\d)", text.strip())
    if match is None:
        raise ValueError(f"{text!r}: write hours like 22:30-07:00")
    hour, minute, last_hour, last_minute = map(int, match.groups())
    if max(hour, last_hour) > 23 or max(minute, last_minute) > 59:
        raise ValueError(f"{text!r}: a day has 24 hours of 60 minutes")
    return 60 * hour + minute, 60 * last_hour + last_minute


Hours = Annotated[
    tuple[int, int],
    Spelling(
        lambda value, _: parse_hours(value) if isinstance(value, str) else parse_hours(""),
        "hours of the local day, such as 22:30-07:00",
        lambda hours: "-".join(f"{each // 60:02}:{each % 60:02}" for each in hours),
    ),
    Example("22:30-07:00"),
]
"""From and to, in minutes of the local day; may span midnight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on what training may take from the device, and when. Raises `ConfigError`."""

    battery_floor: Percent = 30.0
    """Percent of the battery below which the device trains only while charging."""
    battery_share: Share = 0.1
    """Share of a full battery that training may use per day."""
    energy_wh_per_day: Annotated[float | None, Within(least=0), Example(1.5)] = None
    """Watt-hours that training on battery may use per day, in place of `battery_share`."""
    heat_margin_c: Percent = 10.0
    """Degrees to stay below the temperature at which the system slows down."""
    memory_share: Share = 0.8
    """Share of the available memory that training may take."""
    memory_pressure: Percent = 10.0
    """Percent of the last 10 s in which programs waited for memory, above which nothing is
    trained."""
    allow_metered: bool = False
    """Train over networks whose traffic costs money."""
    quiet_hours: Hours | None = None
    """Hours of the local day in which nothing is trained."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.quiet_hours is not None and not all(
            0 <= minute < DAY_MINUTES for minute in self.quiet_hours
        ):
            raise ConfigError(f"quiet_hours = {self.quiet_hours}: must be minutes of a day")


@dataclass(frozen=True, slots=True)
class Gate:
    """The current state of one condition."""

    name: GateName
    open: bool
    reason: str
    """Observation and threshold, such as `battery 24 % < 30 % and not charging`."""


NOT_METERED = Gate("network", True, "the network is not metered")
NO_PRESSURE = Gate("memory", True, "memory pressure not known")
NO_QUIET_HOURS = Gate("hours", True, "no quiet hours")


def check_gates(limits: Limits, snapshot: Snapshot, minute: int) -> list[Gate]:
    """Check all gates, in the order in which they are reported. `minute`: of the local day."""
    return [
        _battery(limits, snapshot),
        _heat(limits, snapshot),
        _network(limits, snapshot),
        _memory(limits, snapshot),
        _hours(limits, minute),
    ]


def closed_gate(limits: Limits, snapshot: Snapshot, minute: int) -> Gate | None:
    """Return the first closed gate; None: all are open."""
    return next((gate for gate in check_gates(limits, snapshot, minute) if not gate.open), None)


def _battery(limits: Limits, snapshot: Snapshot) -> Gate:
    battery, floor = snapshot.battery, limits.battery_floor
    if battery.present is False:
        return Gate("battery", True, "no battery: runs on mains")
    if battery.charging:
        return Gate("battery", True, f"battery {_percent(battery.percent)} and charging")
    plug = "not charging" if battery.charging is False else "not known to be charging"
    if battery.percent is None:
        return Gate("battery", floor == 0, f"battery not known, {plug}")
    if battery.percent < floor:
        return Gate("battery", False, f"battery {_percent(battery.percent, floor)} and {plug}")
    return Gate("battery", True, f"battery {battery.percent:.0f} % ≥ {floor:g} %, {plug}")


def _percent(value: float | None, floor: float | None = None) -> str:
    if value is None:
        return "not known"
    if floor is None:
        return f"{value:.0f} %"
    digits = next((n for n in range(4) if f"{value:.{n}f}" != f"{floor:.{n}f}"), 4)
    return f"{value:.{digits}f} % < {floor:g} %"  # never "30 % < 30 %"


def _heat(limits: Limits, snapshot: Snapshot) -> Gate:
    heat = snapshot.heat
    if heat.status is not None and heat.status >= MODERATE:
        return Gate("heat", False, f"thermal status {heat.status} ≥ {MODERATE} (moderate)")
    if heat.throttling:
        return Gate("heat", False, "the processor is slowed down by heat")
    nearest: tuple[float, str] | None = None
    for zone, trip in _trips(heat.zones or ()):
        most = trip - limits.heat_margin_c
        if zone.celsius >= most:
            reason = (
                f"{zone.name} {zone.celsius:.0f} °C ≥ {most:.0f} °C, "
                f"{limits.heat_margin_c:g} below its trip point"
            )
            return Gate("heat", False, reason)
        seen = f"{zone.name} {zone.celsius:.0f} °C < {most:.0f} °C"
        nearest = min(nearest or (most - zone.celsius, seen), (most - zone.celsius, seen))
    if nearest is not None:
        return Gate("heat", True, nearest[1])
    known = heat.status is not None or heat.throttling is not None
    return Gate("heat", True, "not throttled" if known else "heat not known")


def _trips(zones: tuple[Zone, ...]) -> Iterator[tuple[Zone, float]]:
    """Yield zones with the lowest temperature at which they make the system slow down."""
    for zone in zones:
        marks = [trip.celsius for trip in zone.trips if trip.kind in TRIPS]
        if marks:
            yield zone, min(marks)


def _network(limits: Limits, snapshot: Snapshot) -> Gate:
    metered = snapshot.network.metered
    if metered is None:
        return Gate("network", True, "not known whether the network is metered")
    if not metered:
        return NOT_METERED
    if limits.allow_metered:
        return Gate("network", True, "the network is metered, and the owner allows that")
    return Gate("network", False, "the network is metered")


def _memory(limits: Limits, snapshot: Snapshot) -> Gate:
    pressure, most = snapshot.memory.pressure, limits.memory_pressure
    if pressure is None:
        return NO_PRESSURE
    sign = ">" if pressure > most else "≤"
    seen = f"memory pressure {pressure:.1f} % {sign} {most:g} %"
    return Gate("memory", pressure <= most, seen)


def _hours(limits: Limits, minute: int) -> Gate:
    if limits.quiet_hours is None:
        return NO_QUIET_HOURS
    start, end = limits.quiet_hours
    quiet = start <= minute < end if start <= end else minute >= start or minute < end
    hours = f"{_clock(start)}-{_clock(end)}"
    if quiet:
        return Gate("hours", False, f"{_clock(minute)} is within the quiet hours {hours}")
    return Gate("hours", True, f"{_clock(minute)} is outside the quiet hours {hours}")


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
