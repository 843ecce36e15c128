"""The strip of a device: one character for each of the last rounds."""

from __future__ import annotations

import math

from coordinator.rounds.arrivals import REFUSED as REFUSED_CODE
from coordinator.rounds.report import SILENT as SILENT_CODE

LEGEND = {
    "9": "trained the whole model, or more than 90 % of it",
    **{f"{tenth}": f"trained up to {tenth + 1}0 %" for tenth in range(8, 0, -1)},
    "b": "skipped: battery or energy",
    "h": "skipped: heat",
    "m": "skipped: memory",
    "n": "skipped: network",
    "t": "skipped: time",
    "p": "skipped: by policy, or in turn",
    "s": "skipped for another reason",
    "l": "late",
    "r": "refused",
    "o": "offered, but silent",
    ".": "not asked, or absent",
}
"""Meaning of each character."""

LATE, REFUSED, SILENT, ABSENT = "l", "r", "o", "."

OF_CODE = {
    "battery": "b",
    "energy": "b",
    "heat": "h",
    "memory": "m",
    "memory-pressure": "m",
    "network": "n",
    "hours": "t",
    "deadline": "t",
    "owner": "p",
    "paused": "p",
    "task": "p",
    "schedule": "p",
    "gap": "p",
    "whole": "p",
    "growing": "p",
    SILENT_CODE: SILENT,
    REFUSED_CODE: REFUSED,
}
"""Character of each cause of a skip; those of others are `s`."""

HELD = 512
"""Rounds that a strip reaches back."""


def trained_mark(level: float) -> str:
    """Return the character of a level that was trained."""
    return "9" if level > 0.9 else f"{max(1, math.ceil(10 * level - 1e-9) - 1)}"


def skipped_mark(code: str | None) -> str:
    """Return the character of a skip with this cause."""
    return OF_CODE.get(code or "", "s")


class Strip:
    """The marks of one device in a ring: round number `n` of those that closed has place `n`."""

    __slots__ = ("_last", "_ring")

    def __init__(self) -> None:
        self._ring = bytearray(ABSENT.encode() * HELD)
        self._last = -1

    def mark(self, place: int, mark: str) -> None:
        """Set the mark of a place, which is not `HELD` or more before the newest one."""
        for passed in range(max(self._last + 1, place - HELD + 1), place + 1):
            self._ring[passed % HELD] = ord(ABSENT)
        self._last = max(self._last, place)
        self._ring[place % HELD] = ord(mark)

    def read(self, first: int, behind: int) -> str:
        """Return the marks from a place to another, which lie within `HELD` of the end."""
        since, upto = max(first, self._last - HELD + 1), min(behind, self._last + 1)
        if since >= upto:
            return ABSENT * (behind - first)
        start, end = since % HELD, (upto - 1) % HELD + 1
        ring = self._ring
        known = ring[start:end] if start < end else ring[start:] + ring[:end]
        return ABSENT * (since - first) + known.decode() + ABSENT * (behind - upto)
