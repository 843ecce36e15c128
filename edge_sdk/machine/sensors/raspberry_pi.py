"""The firmware of a Raspberry Pi: throttling and undervoltage.

It has no power sensor; a device profile supplies the power.
"""

from __future__ import annotations

import re
from dataclasses import replace

from edge_sdk.machine.sensors.commands import Command
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.thermal import read_heat
from edge_sdk.machine.snapshot import Heat, Power, Snapshot

PLATFORM = "sys/devices/platform"
HWMON = "sys/class/hwmon"

UNDERVOLTAGE = 1 << 0
SLOWED_DOWN = 1 << 1 | 1 << 2 | 1 << 3
"""Frequency capped, throttled, soft temperature limit. Bits from 16 on describe the past."""


def is_raspberry_pi(model: str) -> bool:
    """True for a device tree's model such as `Raspberry Pi 5 Model B Rev 1.0`."""
    return model.startswith("Raspberry Pi")


def read_flags(files: Files) -> Snapshot:
    """Read the firmware's flags, from the file its driver has provided since Linux 4.14."""
    for chip in files.names(PLATFORM, "soc*") or ():
        for device in files.names(f"{PLATFORM}/{chip}", "*firmware*") or ():
            path = f"{PLATFORM}/{chip}/{device}/get_throttled"
            content = files.text(path)
            if content is not None:
                if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", content):
                    return _told(int(content, 16))
                files.tell(path, f"{content[:40]!r} is not a set of flags")
    return Snapshot()


def read_undervoltage(files: Files) -> Snapshot:
    """Read the alarm of the driver `rpi_volt`: the supply was too weak in the last seconds."""
    for name in files.names(HWMON) or ():
        if files.text(f"{HWMON}/{name}/name") == "rpi_volt":
            alarm = files.number(f"{HWMON}/{name}/in0_lcrit_alarm")
            return Snapshot(power=Power(undervoltage=None if alarm is None else alarm > 0))
    return Snapshot()


def read_zones(files: Files) -> Snapshot:
    """Read temperatures alone: here the firmware slows down, and Linux does not see it."""
    heat = read_heat(files).heat
    return Snapshot(heat=replace(heat, throttling=None))


def vcgencmd(files: Files) -> Command:
    """The firmware's flags, if there is no file for them. Needs the group `video`."""

    def parse(output: str) -> Snapshot:
        match = re.fullmatch(r"throttled=0x([0-9a-fA-F]{1,8})", output.strip())
        if match is None:
            raise ValueError(output[:80])
        return _told(int(match[1], 16))

    return Command(
        argv=("vcgencmd", "get_throttled"),
        program=files.program,
        parse=parse,
        fills=("heat.throttling", "power.undervoltage"),
        every_s=5.0,
    )


def _told(flags: int) -> Snapshot:
    return Snapshot(
        heat=Heat(throttling=bool(flags & SLOWED_DOWN)),
        power=Power(undervoltage=bool(flags & UNDERVOLTAGE)),
    )
