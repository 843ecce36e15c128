"""Heat in Linux's /sys/class/thermal: zones, their trip points, and throttling.

Types and trip points are read once a minute, temperatures and states every time: a phone has eighty
zones with a dozen files each.
"""

from __future__ import annotations

import re
from functools import partial

from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.snapshot import Heat, Snapshot, Trip, Zone

THERMAL = "sys/class/thermal"

MIN_MILLI, MAX_MILLI = 1_000, 150_000
"""Credible readings, in 1/1000 °C. Disabled sensors report 0, −256 or −274 °C; zones of phones that
are not temperatures at all (currents, percents) are mostly outside too."""

SLOWS_DOWN = re.compile(r"cpufreq|devfreq|throttle|balanced|^Processor$")
"""Cooling devices that reduce speed, unlike fans."""


def read_heat(files: Files) -> Snapshot:
    """Read all readable zones, and if any cooling device slows down the processor."""
    zones = []
    for name in files.names(THERMAL, "thermal_zone*") or ():
        folder = f"{THERMAL}/{name}"
        milli = files.number(f"{folder}/temp")
        if milli is not None and MIN_MILLI <= milli <= MAX_MILLI:
            kind, trips = files.lasting(folder, partial(_described, files, folder))
            zones.append(Zone(name=kind or name, celsius=milli / 1000, trips=trips))
    states = [
        files.number(f"{THERMAL}/{name}/cur_state")
        for name in files.names(THERMAL, "cooling_device*") or ()
        if files.lasting(f"{THERMAL}/{name}", partial(_slows_down, files, f"{THERMAL}/{name}"))
    ]
    known = [state > 0 for state in states if state is not None]
    return Snapshot(heat=Heat(zones=tuple(zones) or None, throttling=any(known) if known else None))


def _described(files: Files, folder: str) -> tuple[str | None, tuple[Trip, ...]]:
    """Return a zone's type and trip points."""
    return files.text(f"{folder}/type"), _trips(files, folder)


def _slows_down(files: Files, folder: str) -> bool:
    return bool(SLOWS_DOWN.search(files.text(f"{folder}/type") or ""))


def _trips(files: Files, folder: str) -> tuple[Trip, ...]:
    trips = []
    for name in files.names(folder, "trip_point_*_temp") or ():
        milli = files.number(f"{folder}/{name}")
        kind = files.text(f"{folder}/{name.removesuffix('_temp')}_type")
        # Disabled trips are at −274 °C or at the largest number.
        if milli is not None and kind and MIN_MILLI <= milli <= MAX_MILLI:
            trips.append(Trip(kind=kind, celsius=milli / 1000))
    return tuple(sorted(trips, key=lambda trip: trip.celsius))
