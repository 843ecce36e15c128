"""Reads finished rounds from the coordinator's history."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.protocol.messages.round import Outcome


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A round that ended at `at_s`, wall-clock time, and the number of movements it counted."""

    round: int
    at_s: float
    movements: int


class HistoryTail:
    """A growing history; every line is read once, since those of many devices are long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._closed: list[ClosedRound] = []

    def closed(self) -> list[ClosedRound]:
        """Return all finished rounds, oldest first."""
        if self._path.is_file():
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                # A line that is still being written is read next time.
                lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read_bytes += len(line)
                    self._closed.append(_closed_round(line))
        return list(self._closed)


def _closed_round(line: bytes) -> ClosedRound:
    entry = json.loads(line)
    return ClosedRound(entry["round"], entry["time"], entry["movements"][Outcome.COUNTED.value])
