"""Rows of devices: what is known of each, as mappings that are replaced and never changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, overload

from coordinator.rounds.arrivals import REFUSED as REFUSED_CODE
from coordinator.rounds.report import SILENT as SILENT_CODE
from coordinator.service.overview.lines import OverviewRow
from coordinator.service.overview.strip import (
    LATE,
    REFUSED,
    SILENT,
    Strip,
    skipped_mark,
    trained_mark,
)
from edge_sdk.protocol.messages.round import Outcome

MOST_ROUNDS = 200
"""Rounds of a device that are kept."""
MOST_ENTRIES = 100_000
"""Rounds of all devices together that are kept, as far as each has its last `LEAST_ROUNDS`."""
LEAST_ROUNDS = 20

PAUSED_CODE = "paused"
"""Code of the skip of a device that its owner paused."""

_NEW: OverviewRow = {
    "present": False,
    "state": "idle",
    "level": None,
    "reason": None,
    "code": None,
    "round": None,
    "last_seen": None,
    "last_error": None,
    "last_error_time": None,
    "battery": None,
    "charging": None,
    "temperature_c": None,
    "memory_free_mb": None,
    "memory_mb": None,
    "bytes_up": 0,
    "bytes_down": 0,
    "train_s": 0.0,
    "joules": None,
    "energy_today_j": None,
    "energy_budget_j": None,
    "trained": 0,
    "skipped": 0,
    "late": 0,
    "rejected": 0,
    "contribution": 0.0,
    "staleness": None,
    "samples": None,
    "quarantined": None,
    "labels": {},
    "profile": None,
    "version": None,
}
_OWN = {"_counted": 0, "_newest": None, "_barred": None}
"""Facts that only other columns are made of: movements that counted, the round of the newest of
them, and why the device may not take part."""


COLUMNS = ("device", *_NEW, "sequence")
"""Keys of a row as others see it."""


@overload
def printable(text: str) -> str: ...
@overload
def printable(text: None) -> None: ...
def printable(text: str | None) -> str | None:
    """Return text of a device without characters that could steer a terminal."""
    if text is None or text.isprintable():
        return text
    return "".join(each if each.isprintable() else " " for each in text)


def new_row(device: str) -> OverviewRow:
    """Return the row of a device of which nothing is known."""
    return {"device": device, **_NEW, **_OWN, "sequence": 0}


def shown(row: Mapping[str, Any], *, counted: int, newest: int) -> OverviewRow:
    """Return a row as others see it.

    `counted` is the number of movements that counted of all devices, `newest` the newest round that
    closed.
    """
    found = dict(row)
    for name in _OWN:
        del found[name]
    made = row["_newest"]
    found["contribution"] = round(row["_counted"] / counted, 6) if counted else 0.0
    found["staleness"] = None if made is None else max(0, newest - made)
    found["state"] = state_of(row)
    if row["_barred"] is not None:
        found["reason"], found["code"] = row["_barred"], "barred"
    found["labels"] = dict(row["labels"])
    return found


def state_of(row: Mapping[str, Any]) -> str:
    """Return the state of a device in one word."""
    if row["quarantined"] is not None:
        return "quarantined"
    if row["_barred"] is not None:
        return "barred"
    if not row["present"]:
        return "offline"
    if row["state"] == "skipped" and row["code"] == PAUSED_CODE:
        return "paused"
    return str(row["state"])


class DeviceRounds:
    """The last rounds of one device: its entries and its strip."""

    __slots__ = ("entries", "strip")

    def __init__(self) -> None:
        self.entries: deque[OverviewRow] = deque(maxlen=MOST_ROUNDS)
        self.strip = Strip()

    def add(self, entry: OverviewRow, place: int, most: int) -> None:
        """Add an entry for the round at a place, and keep at most so many."""
        self.entries.append(entry)
        while len(self.entries) > most:
            self.entries.popleft()
        self.strip.mark(place, _mark(entry))

    def correct(self, round: int, place: int | None, outcome: str, reason: str) -> None:
        """Note the outcome of a movement that came after its round had closed."""
        late = outcome in (Outcome.LATE.value, Outcome.MEMORY.value)
        if place is not None:
            self.strip.mark(place, LATE if late else REFUSED)
        for number, entry in enumerate(self.entries):
            if entry["round"] == round and entry["outcome"] != Outcome.COUNTED.value:
                why = printable(reason) or entry["reason"]
                changed = {**entry, "outcome": outcome, "reason": why}
                self.entries[number] = changed
                return


def round_entry(round: int, part: Mapping[str, Any]) -> OverviewRow:
    """Return the entry of a device in a round, from its part in the line of history."""
    level, code = part["level"], part.get("code")
    return {
        "round": round,
        "level": level,
        "reason": printable(part["reason"]),
        "code": None if level is not None else code,
        "outcome": outcome_of(level, code),
        "loss": part["loss"],
        "bytes_up": part["bytes_up"],
        "bytes_down": part["bytes_down"],
        "train_s": part["train_s"],
        "joules": part.get("energy_j"),
    }


def outcome_of(level: float | None, code: str | None) -> str:
    """Return the outcome of a device's part in a round: that of its movement, or none."""
    if level is not None:
        return Outcome.COUNTED.value
    if code in (SILENT_CODE, REFUSED_CODE):
        return str(code)
    return "skipped"


def _mark(entry: Mapping[str, Any]) -> str:
    if entry["level"] is not None:
        return trained_mark(entry["level"])
    return {SILENT_CODE: SILENT, REFUSED_CODE: REFUSED}.get(
        entry["outcome"], skipped_mark(entry["code"])
    )


def after_round(
    row: Mapping[str, Any], entry: Mapping[str, Any], time: float | None
) -> OverviewRow:
    """Return the changes of a device's row once a round with its part closed."""
    trained = entry["level"] is not None
    joules = row["joules"]
    if entry["joules"] is not None:
        joules = (joules or 0.0) + entry["joules"]
    changes: OverviewRow = {
        "level": entry["level"],
        "reason": entry["reason"],
        "code": entry["code"],
        "bytes_up": row["bytes_up"] + entry["bytes_up"],
        "bytes_down": row["bytes_down"] + entry["bytes_down"],
        "train_s": row["train_s"] + entry["train_s"],
        "joules": joules,
        "trained": row["trained"] + trained,
        "skipped": row["skipped"] + (not trained),
    }
    if row["last_seen"] is None:
        changes["last_seen"] = time
    if trained:
        changes |= {"_counted": row["_counted"] + 1, "_newest": entry["round"]}
    return changes
