"""The history of a run: one line for every closed round, and one for other news.

A round's line is part of its checkpoint, together with the place in the file where it belongs. So a
crash loses no line and writes none twice: the next start puts down what is missing (`settle`).
Other news may have been appended in between; the line then follows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from coordinator.checksums import DamagedBytes, open_json, seal_json
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.lines import PRIVATE, TAIL_BYTES, Lines
from edge_sdk.program.files import append_line

Entry = Mapping[str, Any]


class RunHistory(Lines):
    """The file of a run's history."""

    def has(self, at: int, entry: Entry | None) -> bool:
        """True if the line of a checkpoint was appended, `at` bytes from the start or behind."""
        return entry is not None and _line(entry) in self._behind(at)

    def settle(self, at: int, entry: Entry | None) -> None:
        """Make sure that the line of a checkpoint is there, `at` bytes from the start or behind.

        At the end of the file, whatever a crash or a power cut left of it is replaced. Raises
        `RunError` if earlier lines are missing, or if lines are damaged that others follow.
        """
        line, behind = _line(entry), self._behind(at)
        if self.size >= at and (not line or line in behind):
            return
        whole = list(takewhile(_is_whole, behind))
        left = b"".join(behind[len(whole) :])
        if self.size < at or len(left) > len(line) or any(map(_is_whole, behind[len(whole) :])):
            raise RunError(
                f"{self.path} is damaged: the line of the newest checkpoint belongs at byte {at}, "
                f"and something else is there; {repair_advice(self.path.parent)}"
            )
        self.cut(at + sum(map(len, whole)))
        append_line(self.path, line, mode=PRIVATE)

    def check_newest(self, at: int, entry: Entry | None, round: int) -> None:
        """Raise `RunError` if lines behind that of a checkpoint tell of later checkpoints.

        Damaged lines are left to `settle` and to readers.
        """
        own, later = _line(entry), None
        for line in self._behind(at):
            each = open_json(line) if line != own and _is_whole(line) else {}
            back = each.get("rolled_back")
            if back is not None:
                later = None if back["to"] == round else later
            elif "digest" in each and later is None:
                later = each["round"]
        if later is not None:
            raise RunError(
                f"the newest checkpoint is that of round {round}, but {self.path} tells of round "
                f"{later}, whose checkpoint is missing: restore it from a backup, or go on without "
                f"it (tessera-coordinator rollback {self.path.parent} --to-round {round})"
            )

    def _behind(self, at: int) -> list[bytes]:
        """Return the lines from a place on, the last one perhaps cut short."""
        return self.read(at, max(0, self.size - at)).splitlines(keepends=True)

    def last(self) -> dict[str, Any]:
        """Return the last line; nothing if there is none, or it is damaged."""
        end = self.trim()
        tail = self.read(start := max(0, end - TAIL_BYTES), end - start)
        try:
            return next(self.entries(start + tail.rfind(b"\n", 0, -1) + 1), {})
        except RunError:
            return {}


def news_of(entry: Entry) -> str | None:
    """Return the words of a line that is no round; None: it is a round."""
    if (back := entry.get("rolled_back")) is not None:
        return f"went back from round {back['from']} to round {back['to']}"
    if (gone := entry.get("forgotten")) is not None:
        return (
            f"forgot {gone['device']} after round {gone['round']} ({gone['by']}, {gone['time']}): "
            f"{gone['blocks']} blocks in memory"
        )
    return words if isinstance(words := entry.get("event"), str) else None


def _is_whole(line: bytes) -> bool:
    try:
        open_json(line)
    except DamagedBytes:
        return False
    return True


def _line(entry: Entry | None) -> bytes:
    return b"" if entry is None else seal_json(entry)
