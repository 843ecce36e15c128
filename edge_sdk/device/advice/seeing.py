"""The state of a device in words, with units: for `explain`, and for the view of `status --watch`.

Each function takes a part of `Snapshot.to_dict`, in which unknown values are left out or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from edge_sdk.machine.snapshot import Snapshot

MB = 1e6
THERMAL = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
"""Android's thermal statuses, by number."""


def seen_lines(snapshot: Snapshot) -> Iterator[str]:
    """Write what is known of a device, a line for each part, with the age of its oldest value."""
    seen = snapshot.to_dict()
    for part, words in _WORDS.items():
        known = words(seen.get(part) or {})
        if known:
            ages = [age for path, age in snapshot.ages_s.items() if path.startswith(f"{part}.")]
            age = max(ages, default=0.0)
            yield f"{part:<8} {known}{f'  ({age:.0f} s ago)' if age >= 1 else ''}"


def core_words(cpu: Mapping[str, Any]) -> str:
    """Say how many cores there are, and of which kinds if they differ."""
    cores, classes = cpu.get("cores"), cpu.get("classes") or ()
    text = "" if cores is None else f"{cores:g} core{'' if cores == 1 else 's'}"
    if len(classes) < 2:
        return text
    kinds = " + ".join(f"{each['cores']}{_clock(each.get('max_mhz'))}" for each in classes)
    return f"{text} ({kinds})".strip()


def heat_words(heat: Mapping[str, Any], most: int | None = None) -> str:
    """Say how warm the warmest zones are; `most`: of so many, None: of all."""
    zones = sorted(heat.get("zones") or (), key=lambda zone: -float(zone["celsius"]))[:most]
    return ", ".join(f"{zone['name']} {zone['celsius']:.0f} °C" for zone in zones)


def charging_words(battery: Mapping[str, Any]) -> str:
    """Say if the battery is charging; empty: not known."""
    known = battery.get("charging")
    return "" if known is None else "charging" if known else "not charging"


def _cpu(cpu: Mapping[str, Any]) -> str:
    mhz, max_mhz = cpu.get("mhz"), cpu.get("max_mhz")
    clock = _said(mhz, "{:,.0f} MHz")
    if max_mhz is not None:
        clock = f"{clock} of {max_mhz:,.0f} MHz" if clock else f"up to {max_mhz:,.0f} MHz"
    return _joined(
        core_words(cpu),
        _said(cpu.get("busy"), "{:.0%} busy"),
        clock,
        _said(cpu.get("load"), "{:.1f} programs at work (mean of a minute)"),
        _said(cpu.get("pressure"), "pressure {:.0f} % (programs waiting for a core)"),
    )


def _memory(memory: Mapping[str, Any]) -> str:
    total, free = memory.get("total_bytes"), memory.get("available_bytes")
    return _joined(
        "" if total is None else f"{total / MB:,.0f} MB",
        "" if free is None else f"{free / MB:,.0f} MB free",
        _said(memory.get("pressure"), "pressure {:.0f} % (programs waiting for memory)"),
        "shared with the GPU" if memory.get("unified") else "",
    )


def _battery(battery: Mapping[str, Any]) -> str:
    if battery.get("present") is False:
        return "none: on mains"
    return _joined(
        _said(battery.get("percent"), "{:.0f} %"),
        charging_words(battery),
        _said(battery.get("watts"), "{:.1f} W drawn"),
        _said(battery.get("capacity_wh"), "{:.1f} Wh when full"),
    )


def _heat(heat: Mapping[str, Any]) -> str:
    throttling, status = heat.get("throttling"), heat.get("status")
    return _joined(
        heat_words(heat),
        "" if throttling is None else "slowed down" if throttling else "not slowed down",
        "" if status is None else f"thermal status {THERMAL[status]}",
    )


def _power(power: Mapping[str, Any]) -> str:
    return _joined(
        _said(power.get("total_watts"), "{:.1f} W"),
        *(f"{name} {watts:.1f} W" for name, watts in (power.get("rails") or {}).items()),
        "the supply is too weak" if power.get("undervoltage") else "",
        _said(power.get("mode"), "mode {}"),
    )


def _gpu(gpu: Mapping[str, Any]) -> str:
    return _said(gpu.get("busy"), "{:.0%} busy")


def _network(network: Mapping[str, Any]) -> str:
    metered = network.get("metered")
    return _joined(
        "" if metered is None else "metered" if metered else "not metered",
        *(
            "" if speed is None else f"{speed / 1e3:,.0f} KB/s {way}"
            for way, speed in (
                ("up", network.get("up_bytes_per_s")),
                ("down", network.get("down_bytes_per_s")),
            )
        ),
    )


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "cpu": _cpu,
    "memory": _memory,
    "battery": _battery,
    "heat": _heat,
    "power": _power,
    "gpu": _gpu,
    "network": _network,
}


def _clock(mhz: float | None) -> str:
    return "" if mhz is None else f" × {mhz:,.0f} MHz"


def _said(value: Any, words: str) -> str:
    """Put a value into words; empty: it is not known."""
    return "" if value is None else words.format(value)


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
