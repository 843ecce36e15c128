"""The audit of a run: who asked what of it, and when.

    audit.jsonl    one line per command: id, time, by, what, details

Lines are only ever appended, with their checksums. A command's line is on disk before the command
is answered; one that a crash kept from being written is written at the next start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import ConfigError
from coordinator.run.folder import ABOUT, is_run
from coordinator.run.history import news_of
from coordinator.run.lines import Lines, read_lines

AUDIT = "audit.jsonl"
MOVING = "(pack --move)"
"""End of the author of a stop after which the run goes on elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A command that a run accepted."""

    id: str
    """Tells it from all others."""
    time: float
    """Seconds since 1970."""
    by: str
    """Account that asked for it; `run.toml`, if an edit of that file undid a change."""
    what: str
    """Name of the command."""
    details: Mapping[str, Any]

    @property
    def words(self) -> str:
        """The command for people, without its author and time."""
        return order_words(self.what, self.details)


def is_moving(entry: AuditEntry | None) -> bool:
    """True for a stop after which the run goes on elsewhere."""
    return entry is not None and entry.what == "stop" and entry.by.endswith(MOVING)


def order_words(what: str, details: Mapping[str, Any]) -> str:
    """Return a command in words, such as `learning_rate 0.1 → 0.05`."""
    match what:
        case "set" | "rounds":
            was, value = (_value(details.get(each)) for each in ("was", "value"))
            return f"{details.get('name')} {was} → {value}"
        case "pause":
            return "paused"
        case "resume":
            return "resumed"
        case "stop":
            return "stopped now" if details.get("when") == "now" else "stopped after this round"
        case "quarantine":
            reason = details.get("reason")
            return f"quarantined {details.get('device')}{f': {reason}' if reason else ''}"
        case "allow":
            return f"allowed {details.get('device')} again"
        case "forget":
            return f"forgot {details.get('device')}"
        case _:
            return what


def words_of(line: Mapping[str, Any]) -> str | None:
    """Return the words of a line of history that is no round; None: it is one, or not known."""
    if (order := line.get("steered")) is not None:
        return f"{order_words(order['what'], order['details'])} ({order['by']})"
    return news_of(line)


def _value(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


class Audit:
    """The file, as the only process sees it that writes there."""

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder / AUDIT)

    def put(self, entry: AuditEntry) -> None:
        """Append an entry, unless it is there. Damaged lines are left to readers."""
        size = self._lines.trim()
        if entry.id.encode() not in self._lines.read(0, size):
            self._lines.append(asdict(entry))


def read_audit(folder: Path, since: int = 0) -> Iterator[dict[str, Any]]:
    """Read a run's audit behind the first `since` lines, even if the run is open elsewhere.

    Each line has its number, from 1. Raises `ConfigError`, and `RunError` for a damaged line.
    """
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run's folder: it has no {ABOUT}")
    for number, line in enumerate(read_lines(folder / AUDIT), 1):
        if number > since:
            yield {"number": number, **line}
