"""Sensors of a phone, for a program in Termux: battery and Wi-Fi, through the app Termux:API.

Android hides /proc/stat, /proc/net and most of /sys from programs; memory, affinity and often
clocks are readable. A host app can push the rest, and knows it better.
"""

from __future__ import annotations

import json
from typing import Any

from edge_sdk.machine.sensors.commands import Command
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux import power_supply
from edge_sdk.machine.snapshot import Battery, Heat, Network, Snapshot, Zone

IN_MILLIAMPERES = 10_000
"""Phones report µA, some mA. No phone runs a program on 10 mA, and none draws 10 A."""


def is_android(files: Files) -> bool:
    """True if the program that starts every Android app exists."""
    return files.exists("system/bin/app_process") or files.exists("system/build.prop")


def read_battery(files: Files) -> Snapshot:
    """Read the kernel's files where visible. Every phone has a battery, so none seen is unknown."""
    seen = power_supply.read_battery(files)
    return seen if seen.battery.present else Snapshot()


def battery_status(files: Files) -> Command:
    """`termux-battery-status`, which can take seconds, and hangs if the app is missing."""
    return Command(
        argv=("termux-battery-status",),
        program=files.program,
        parse=parse_battery,
        fills=("battery.percent", "battery.charging"),
    )


def wifi_info(files: Files) -> Command:
    """`termux-wifi-connectioninfo`: a phone without Wi-Fi uses its mobile network."""
    return Command(
        argv=("termux-wifi-connectioninfo",),
        program=files.program,
        parse=parse_wifi,
        fills=("network.metered",),
    )


def parse_battery(output: str) -> Snapshot:
    """Read the battery, and its temperature as a zone. Raises `ValueError` for other output."""
    said = _object(output)
    plugged, status = said.get("plugged"), said.get("status")
    charging = None
    if status == "DISCHARGING" or plugged == "UNPLUGGED":
        charging = False
    elif status in ("CHARGING", "FULL") or (status == "NOT_CHARGING" and isinstance(plugged, str)):
        charging = True
    celsius = _number(said, "temperature")
    # Without a sensor, Android reports 0 or a number far below.
    zones = (Zone(name="battery", celsius=celsius),) if celsius and celsius > -50 else None
    return Snapshot(
        battery=Battery(
            present=said.get("present") is not False,
            percent=_number(said, "percentage"),
            charging=charging,
            watts=_watts(said) if charging is False else None,
        ),
        heat=Heat(zones=zones),
    )


def parse_wifi(output: str) -> Snapshot:
    """Metered without Wi-Fi; with Wi-Fi unknown, because it may be a hotspot."""
    state = _object(output).get("supplicant_state")
    off = isinstance(state, str) and state in ("DISCONNECTED", "INACTIVE", "INTERFACE_DISABLED")
    return Snapshot(network=Network(metered=True if off else None))


def _watts(said: dict[str, Any]) -> float | None:
    """Newer versions report a voltage, in mV; the sign of the current depends on the phone."""
    millivolts, current = _number(said, "voltage"), _number(said, "current")
    if millivolts is None or current is None or not 2_000 <= millivolts <= 20_000:
        return None
    milliamperes = abs(current) if abs(current) < IN_MILLIAMPERES else abs(current) / 1000
    return millivolts * milliamperes / 1e6


def _object(output: str) -> dict[str, Any]:
    said = json.loads(output)
    if not isinstance(said, dict):
        raise ValueError(f"no object: {output[:80]!r}")
    return said


def _number(said: dict[str, Any], key: str) -> float | None:
    value = said.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
