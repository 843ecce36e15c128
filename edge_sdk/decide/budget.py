"""The energy budget of training, and the schedule of the rounds it allows.

A device's owner sets a number of joules for every day. The joules left today are divided over the
rounds left today; a round that costs more than its share is trained only now and then: in a share
`p` of rounds (CCFL; docs/algorithms.md, *Skips*).

`History` is what must be remembered between rounds. It is a value: the same history and the same
round give the same answer, on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_sdk.program.records import replace

DAY_S = 86_400.0
MARGIN = 1.25
"""A prediction may be off by this factor before it is renewed, so that much must be left."""
SMOOTHING = 0.3
"""Weight of the newest interval between rounds."""
OFTEN = 0.1
"""Share of skips without a young enough movement that is worth a warning."""
SLACK = 1e-9
DONE = 1 - SLACK
"""Slightly below 1: ten tenths are one, whatever their float64 sum is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """A device's memory of past rounds. Times are in seconds of one clock."""

    turn: float | None = None
    """Accumulated shares of rounds, in [0, 1); None: no round yet."""
    skipped: int = 0
    """Rounds since the last one trained."""
    day_from_s: float | None = None
    """Start of the current day of the budget; None: no round yet."""
    spent_j: float = 0.0
    """Joules spent in the current day."""
    opened_s: float | None = None
    """Time at which the newest round was heard of."""
    interval_s: float | None = None
    """Smoothed interval between rounds; None: fewer than two were heard of."""

    def heard(self, now_s: float) -> History:
        """Note that a round opens now. A clock that went back resets nothing: joules stay spent."""
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

    def today_j(self, now_s: float) -> float:
        """Joules spent in the day that it is at this time; a round need not have opened in it."""
        over = self.day_from_s is not None and now_s - self.day_from_s >= DAY_S
        return 0.0 if over else self.spent_j

    def spent(self, joules: float) -> History:
        """Note that training took this much energy, whatever its result."""
        return replace(self, spent_j=self.spent_j + joules)

    def rounds_left(self, in_run: int | None) -> float:
        """Rounds that may still come today, including this one; at least 1.

        `in_run`: rounds left in the run; None: unknown. When nothing is known yet, the answer is
        this one: the rest of the day's energy bounds its cost, not this guess.
        """
        known = [] if in_run is None else [float(in_run)]
        if not (self.interval_s is None or self.opened_s is None or self.day_from_s is None):
            left_s = max(0.0, self.day_from_s + DAY_S - self.opened_s)
            known.append(1 + math.floor(left_s / self.interval_s))
        return max(1.0, min(known, default=1.0))


@dataclass(frozen=True, slots=True)
class Allowance:
    """Energy for training, per day; None: unlimited."""

    joules_per_day: float | None = None

    def left_j(self, history: History) -> float:
        """Joules that may still be spent today."""
        if self.joules_per_day is None:
            return math.inf
        return max(0.0, self.joules_per_day - history.spent_j)

    def share(self, joules: float, history: History, in_run: int | None) -> float:
        """Share `p` of rounds in which this many joules are affordable, in [0, 1].

        0 when they exceed what is left today, with a margin for the error of a prediction.
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
    """Round-robin: decide if this round is one of the share `p`; returns the new history too.

    Shares add up, and a whole one is a round: over any number of rounds the device trains
    the sum of their `p`, give or take one. `phase`, in [0, 1), differs between devices, so that
    they do not all train in the same rounds.
    """
    turn = (phase if history.turn is None else history.turn) + p
    if turn >= DONE:
        return True, replace(history, turn=max(0.0, turn - 1))
    return False, replace(history, turn=turn)


def common_turn(round: int, p: float) -> bool:
    """Round-robin in step: decide if this round is one of the share `p`, the same on all devices.

    It is where `⌈p · round⌉` grows: in the first round, and then once every `1/p` rounds. A device
    that is asked in some rounds alone, or whose share changes, keeps to the rhythm of all.
    """
    return math.ceil(p * round - SLACK) > math.ceil(p * (round - 1) - SLACK)


def outlived_share(p: float, within: int, *, even: bool) -> float:
    """Share of a device's skips in which its last movement is more than `within` rounds old.

    `even`: it trains once every `1/p` rounds, else with probability `p`: then a skip comes `a`
    rounds after the last training with probability `p (1 − p)^(a − 1)`.
    """
    if not even:
        return (1 - p) ** within
    skips = 1 / p - 1
    return max(0.0, 1 - within / skips) if skips > 0 else 0.0
