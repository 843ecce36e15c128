"""How much energy training may take, and how the rounds that it allows are spread.

A device's owner gives a number of joules for every day. What is left of a day's joules is shared
out over the rounds that are left of it; a round that costs more than its share is trained only now
and then: in a share `p` of rounds (CCFL; docs/algorithms.md, *Skips*).

`History` is what has to be remembered between rounds. It is a value: the same history and the same
round give the same answer, on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DAY_S = 86_400.0
MARGIN = 1.25
"""A prediction may be off by this much before it is made anew, so as much has to be left."""
SMOOTHING = 0.3
"""Weight of the newest interval between rounds."""
DONE = 1 - 1e-9
"""Ten tenths are one, whatever their float64 sum is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a device remembers of rounds gone by. Times are in seconds of one clock."""

    turn: float | None = None
    """Shares of rounds that were saved up, in [0, 1); None: no round yet."""
    skipped: int = 0
    """Rounds since the last one trained."""
    day_from_s: float | None = None
    """When the present day of the budget began; None: no round yet."""
    spent_j: float = 0.0
    """In the present day."""
    opened_s: float | None = None
    """When the newest round was heard of."""
    interval_s: float | None = None
    """Between rounds, smoothed; None: fewer than two were heard of."""

    def heard(self, now_s: float) -> History:
        """A round opens now. A clock that went back begins nothing anew: joules stay spent."""
        start, spent = self.day_from_s, self.spent_j
        if start is None or now_s < start:
            start = now_s
        elif now_s - start >= DAY_S:
            start, spent = start + DAY_S * math.floor((now_s - start) / DAY_S), 0.0
        interval = self.interval_s
        if self.opened_s is not None and now_s > self.opened_s:
            new = now_s - self.opened_s
            interval = new if interval is None else interval + SMOOTHING * (new - interval)
        return replace(self, day_from_s=start, spent_j=spent, opened_s=now_s, interval_s=interval)

    def spent(self, joules: float) -> History:
        """Training took so much energy, whatever became of it."""
        return replace(self, spent_j=self.spent_j + joules)

    def rounds_left(self, in_run: int | None) -> float:
        """How many rounds may still come today, the present one included; at least 1.

        `in_run`: how many the run has left; None: nobody knows. When nothing is known yet, this
        one: what a day may cost is bounded by what is left of it, not by this guess.
        """
        known = [] if in_run is None else [float(in_run)]
        if not (self.interval_s is None or self.opened_s is None or self.day_from_s is None):
            left_s = max(0.0, self.day_from_s + DAY_S - self.opened_s)
            known.append(1 + math.floor(left_s / self.interval_s))
        return max(1.0, min(known, default=1.0))


@dataclass(frozen=True, slots=True)
class Allowance:
    """Energy for training, per day; None: as much as it takes."""

    joules_per_day: float | None = None

    def left_j(self, history: History) -> float:
        """What may still be spent today."""
        if self.joules_per_day is None:
            return math.inf
        return max(0.0, self.joules_per_day - history.spent_j)

    def share(self, joules: float, history: History, in_run: int | None) -> float:
        """The share `p` of rounds in which so many joules can be afforded, in [0, 1].

        0 when they are more than is left today, with a margin for what a prediction can be off.
        """
        left = self.left_j(history)
        if math.isinf(left):
            return 1.0
        if left <= 0 or MARGIN * joules > left:
            return 0.0
        if joules <= 0:
            return 1.0
        return min(1.0, left / history.rounds_left(in_run) / (MARGIN * joules))


def take_turn(history: History, p: float, phase: float) -> tuple[bool, History]:
    """Round-robin: whether this round is one of the share `p`, and the history after it.

    Shares add up, and a whole one is a round: over any number of rounds the device trains
    the sum of their `p`, give or take one. `phase`, in [0, 1), differs between devices, so that
    they do not all train in the same rounds.
    """
    turn = (phase if history.turn is None else history.turn) + p
    if turn >= DONE:
        return True, replace(history, turn=max(0.0, turn - 1))
    return False, replace(history, turn=turn)
