"""Lines of a run's history as rows of rounds, and sums over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.run.steering.audit import words_of

Entry = Mapping[str, Any]
OverviewRow = dict[str, Any]

SUMS = ("seconds", "bytes_up", "bytes_down", "trained", "skipped", "late", "rejected")


def is_round(entry: Entry) -> bool:
    """True if a line of history is that of a closed round."""
    return "trained_coverage_min" in entry


def round_row(entry: Entry) -> OverviewRow:
    """Return the row of a closed round."""
    devices, outcomes = entry["devices"], entry.get("movements") or {}
    trained = sum(each["level"] is not None for each in devices)
    return {
        "round": entry["round"],
        "time": entry.get("time"),
        "accuracy": entry.get("accuracy"),
        "levels": [
            {"level": each["level"], "accuracy": each["accuracy"]}
            for each in entry.get("levels", ())
        ],
        "seconds": entry["seconds"],
        "joules": joules_of(devices),
        "bytes_up": sum(each["bytes_up"] for each in devices),
        "bytes_down": sum(each["bytes_down"] for each in devices),
        "trained": trained,
        "skipped": len(devices) - trained,
        "late": outcomes.get("late", 0) + outcomes.get("memory", 0),
        "rejected": outcomes.get("rejected", 0),
        "coverage_min": entry["coverage_min"],
        "oldest_memory": entry.get("oldest_memory"),
        "digest": entry.get("digest"),
        "event": None,
    }


def joules_of(devices: list[Entry]) -> float | None:
    """Return the joules that training took; None if no device knows."""
    known = [each["energy_j"] for each in devices if each.get("energy_j") is not None]
    return sum(known) if known else None


def event_row(entry: Entry, round: int) -> OverviewRow:
    """Return the row of a line that is no round, after this round."""
    row: OverviewRow = dict.fromkeys(
        ("time", "accuracy", "seconds", "joules", "coverage_min", "oldest_memory", "digest")
    )
    row |= {"round": round, "levels": [], "event": event_words(entry)}
    row |= dict.fromkeys(("bytes_up", "bytes_down", "trained", "skipped", "late", "rejected"), 0)
    time = entry.get("steered", entry).get("time")
    row["time"] = time if isinstance(time, (int, float)) else None
    return row


def event_words(entry: Entry) -> str:
    """Say what a line of history tells that is no round."""
    if (gone := entry.get("forgotten")) is not None:
        return f"forgot {gone['device']} ({gone['by']})"
    return words_of(entry) or ", ".join(str(key) for key in entry if key != "time") or "a note"


@dataclass(slots=True)
class RunTotals:
    """Sums over all closed rounds of a run, those that were undone included: they were spent."""

    seconds: float = 0.0
    joules: float | None = None
    """None: no device ever said."""
    bytes_up: int = 0
    bytes_down: int = 0
    trained: int = 0
    skipped: int = 0
    late: int = 0
    rejected: int = 0

    def add(self, row: OverviewRow) -> None:
        """Add a round."""
        for name in SUMS:
            setattr(self, name, getattr(self, name) + row[name])
        if row["joules"] is not None:
            self.joules = (self.joules or 0.0) + row["joules"]
