"""The history of a run: one line for every closed round, and one for other news.

A round's line is part of its checkpoint, together with the place in the file where it belongs. So a
crash loses no line and writes none twice: the next start puts down what is missing (`settle`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.checksums import seal_json
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.lines import PRIVATE, TAIL_BYTES, Lines
from edge_sdk.program.files import append_line

Entry = Mapping[str, Any]


class RunHistory(Lines):
    """The file of a run's history."""

    def settle(self, at: int, entry: Entry | None) -> None:
        """Make sure that the line of a checkpoint stands in its place, `at` bytes from the start.

        At the end of the file, whatever a crash or a power cut left of it is replaced. Raises
        `RunError` if earlier lines are missing or later ones follow another line.
        """
        line, there = _line(entry), self.size
        if there >= at and self.read(at, len(line)) == line:
            return
        if not at <= there <= at + len(line):
            raise RunError(
                f"{self.path} is damaged: the line of the newest checkpoint belongs at byte {at}, "
                f"and something else is there; {repair_advice(self.path.parent)}"
            )
        self.cut(at)
        append_line(self.path, line, mode=PRIVATE)

    def check_newest(self, at: int, entry: Entry | None, round: int) -> None:
        """Raise `RunError` if lines behind that of a checkpoint tell of later checkpoints."""
        later: int | None = None
        for each in self.entries(at + len(_line(entry))):
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

    def last(self) -> dict[str, Any]:
        """Return the last line; nothing if there is none, or it is damaged."""
        end = self.trim()
        tail = self.read(start := max(0, end - TAIL_BYTES), end - start)
        try:
            return next(self.entries(start + tail.rfind(b"\n", 0, -1) + 1), {})
        except RunError:
            return {}


def _line(entry: Entry | None) -> bytes:
    return b"" if entry is None else seal_json(entry)
