"""Heat in Linux's /sys/class/thermal: zones, their trip points, and throttling."""

from __future__ import annotations

import re

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
            kind = files.text(f"{folder}/type") or name
            zones.append(Zone(name=kind, celsius=milli / 1000, trips=_trips(files, folder)))
    states = [
        files.number(f"{THERMAL}/{name}/cur_state")
        for name in files.names(THERMAL, "cooling_device*") or ()
        if SLOWS_DOWN.search(files.text(f"{THERMAL}/{name}/type") or "")
    ]
    known = [state > 0 for state in states if state is not None]
    return Snapshot(heat=Heat(zones=tuple(zones) or None, throttling=any(known) if known else None))


def _trips(files: Files, folder: str) -> tuple[Trip, ...]:
    trips = []
    for name in files.names(folder, "trip_point_*_temp") or ():
        milli = files.number(f"{folder}/{name}")
        kind = files.text(f"{folder}/{name.removesuffix('_temp')}_type")
        # Disabled trips are at −274 °C or at the largest number.
        if milli is not None and kind and MIN_MILLI <= milli <= MAX_MILLI:
            trips.append(Trip(kind=kind, celsius=milli / 1000))
    return tuple(sorted(trips, key=lambda trip: trip.celsius))
