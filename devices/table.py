"""The tables of docs/devices.md, from the profiles: `python -m devices.table`.

It reads the files as they are; `edge_sdk.machine.board` makes sure that they are sound.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

MARKS = {"measured": "m", "datasheet": "s", "derived": "d", "assumed": "a"}
"""Suffix of a number, for its provenance."""

NUMBERS = {
    "RAM, MB": "memory.memory_mb",
    "for one process": "memory.app_mb",
    "speed, all cores": "speed.speed_ratio",
    "one core": "speed.one_core_ratio",
    "idle, W": "power.idle_w",
    "training, W": "power.train_w",
    "battery, Wh": "battery.battery_wh",
    "up, Mbit/s": "network.up_mbit_s",
    "down": "network.down_mbit_s",
    "throttles, °C": "heat.throttle_c",
}
"""Columns after device and cores, each with its key."""


def read_profiles(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Read the profiles of a folder, by name, in alphabetical order."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    return {
        path.stem: toml.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*/*.toml"), key=lambda path: path.stem)
        if path.parent.name != "fleets"
    }


def device_table(profiles: dict[str, dict[str, Any]]) -> str:
    """Return one row per device; a number is followed by its mark, a missing one is a dash."""
    rows = [["device", "cores", *NUMBERS], ["---", "---", *("--:" for _ in NUMBERS)]]
    for name, profile in profiles.items():
        numbers = [_number(profile, key) for key in NUMBERS.values()]
        rows.append([f"{profile['title']} (`{name}`)", _cores(profile), *numbers])
    return _render(rows)


def provenance_table(profiles: dict[str, dict[str, Any]]) -> str:
    """Count, for every key, the profiles that measured, cited, derived and assumed it."""
    counts: dict[str, Counter[str]] = {}
    for profile in profiles.values():
        for key, provenance in _provenances(profile):
            counts.setdefault(key, Counter())[provenance] += 1
    rows = [["key", *MARKS], ["---", *("--:" for _ in MARKS)]]
    rows += [
        [f"`{key}`", *(str(counts[key][each] or "–") for each in MARKS)]
        for key in sorted(counts, key=lambda key: (-counts[key]["assumed"], key))
    ]
    return _render(rows)


def tables() -> str:
    """Return the text between the markers of docs/devices.md."""
    profiles = read_profiles()
    return f"{device_table(profiles)}\n\n{provenance_table(profiles)}"


def _number(profile: dict[str, Any], key: str) -> str:
    section, _, name = key.partition(".")
    quantity = profile.get(section, {}).get(name)
    if quantity is None:
        return "–"
    return f"{quantity['value']:g} {MARKS[quantity['provenance']]}"


def _cores(profile: dict[str, Any]) -> str:
    return " + ".join(
        f"{each['count']['value']} × {each['ghz']['value']:g} GHz"
        if "ghz" in each
        else f"{each['count']['value']}"
        for each in profile["cores"]
    )


def _provenances(table: Any, key: str = "") -> list[tuple[str, str]]:
    if isinstance(table, list):
        return [found for each in table for found in _provenances(each, key)]
    if not isinstance(table, dict):
        return []
    if "provenance" in table:
        return [(key, table["provenance"])]
    return [
        found
        for name, inner in table.items()
        for found in _provenances(inner, f"{key}.{name}" if key else name)
    ]


def _render(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(tables())
