"""The turns of a device's tasks: at most one of them trains at a time.

A task asks for the turn when a round of its opens, and has it until it skips or its training is
over.

    ask ──▶ granted: deciding ──offer──▶ offered ──begin──▶ training ──end──▶ free
        └─▶ an obstacle: wait and ask again, or `refuse` the round, and go before others next time

Rules:
- The turn goes to the task with the highest priority, and among equals to the one longest not
  served, of all that wait for it or are owed it.
- Neither training nor a decision is interrupted for another task. A mere offer yields to a task of
  higher priority, or to anybody once its lease is over: no assignment came.
- A task that had to refuse a round is owed the turn until it gets it, until it let twice the time
  between its rounds pass without asking, or until its coordinator is gone. Until then, tasks that
  come after it are not granted any. So among tasks of one priority nobody is served twice while
  another one, whose rounds keep coming, is not served at all. A task of lower priority is served
  when those above leave it room.

No I/O and no clock here; `TrainingSlot` is for threads and keeps on disk who was served when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PATIENCE_S = 300.0
"""Seconds that a task is owed the turn when the time between its rounds is not known yet."""
LEAST_PATIENCE_S, MOST_PATIENCE_S = 30.0, 3_600.0

TurnStage = Literal["deciding", "offered", "training"]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The task that keeps another one from training."""

    task: str
    training: bool
    """True: it trains now; False: it has offered to, or goes first."""


@dataclass(slots=True, eq=False)
class _Contender:
    name: str
    priority: int
    """The lower, the earlier."""
    served: int = 0
    """Number of its last training among those of all tasks; 0: it never trained."""
    waits: bool = False
    owed_until_s: float = -math.inf
    asked_s: float | None = None
    interval_s: float | None = None

    @property
    def rank(self) -> tuple[int, int, str]:
        return self.priority, self.served, self.name


class TaskTurns:
    """The turns of some tasks. Time comes in with every call, in seconds of one clock."""

    def __init__(
        self, priorities: Mapping[str, int], served: Mapping[str, int] | None = None
    ) -> None:
        """`priorities`: the lower number goes first. `served`: what `served` returned before."""
        known = served or {}
        self._tasks = {
            name: _Contender(name, priority, known.get(name, 0))
            for name, priority in priorities.items()
        }
        self._count = max([0, *known.values()])
        self._holder: _Contender | None = None
        self._stage: TurnStage = "deciding"
        self._counts = True
        self._lease_s = -math.inf

    @property
    def holder(self) -> str | None:
        """The task that has the turn; None: nobody."""
        return None if self._holder is None else self._holder.name

    @property
    def training(self) -> str | None:
        """The task that trains; None: nobody."""
        return self.holder if self._stage == "training" else None

    @property
    def served(self) -> dict[str, int]:
        """Numbers by which tasks were served last, the highest most recently."""
        return {each.name: each.served for each in self._tasks.values() if each.served}

    def ask(self, task: str, now: float) -> Obstacle | None:
        """Ask for the turn for a round; None: it is granted.

        Whoever asks waits, until the turn is granted or the round refused. A task that has the turn
        gives it back by asking.
        """
        own = self._tasks[task]
        self.end(task)
        if not own.waits:
            self._note_round(own, now)
        own.waits = True
        if self._holder is not None and not self._yields(own, now):
            return Obstacle(self._holder.name, self.training is not None)
        first = min(
            (
                each
                for each in self._tasks.values()
                if (each.waits or each.owed_until_s > now) and each is not self._holder
            ),
            key=lambda each: each.rank,
        )
        if first is not own:
            return Obstacle(first.name, training=False)
        own.waits, own.owed_until_s = False, -math.inf
        self._holder, self._stage, self._counts = own, "deciding", True
        return None

    def occupy(self, task: str, now: float) -> bool:
        """Take the free turn for work that is no training of a round; False if it is not free.

        An offer whose lease is over does not keep it.
        """
        if self._holder is not None and not self._is_stale(now):
            return False
        self._holder, self._stage, self._counts = self._tasks[task], "training", False
        return True

    def offer(self, task: str, now: float, lease_s: float) -> None:
        """Note that the device has offered to train; without an assignment, good for `lease_s`."""
        if self.holder == task and self._stage == "deciding":
            self._stage, self._lease_s = "offered", now + lease_s

    def refuse(self, task: str, now: float) -> None:
        """Note that a task that asked waits no longer: it skips the round."""
        own = self._tasks[task]
        if own.waits:
            patience_s = PATIENCE_S if own.interval_s is None else 2 * own.interval_s
            own.waits = False
            own.owed_until_s = now + min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, patience_s))

    def begin(self, task: str) -> bool:
        """Turn an offer into training; False if the task has lost the turn."""
        if self.holder != task:
            return False
        self._stage = "training"
        self._serve(self._tasks[task])
        return True

    def end(self, task: str) -> None:
        """Give the turn back; harmless for a task that does not have it."""
        if self.holder == task:
            if self._stage == "training" and self._counts:
                self._serve(self._tasks[task])
            self._holder, self._stage = None, "deciding"

    def waive(self, task: str) -> None:
        """Owe a task nothing: its coordinator is gone, and with it its rounds."""
        self._tasks[task].owed_until_s = -math.inf

    def leave(self, task: str) -> None:
        """Give everything back: the task's rounds are over, or paused."""
        self.end(task)
        own = self._tasks[task]
        own.waits, own.owed_until_s = False, -math.inf

    def _serve(self, own: _Contender) -> None:
        self._count += 1
        own.served = self._count

    def _yields(self, own: _Contender, now: float) -> bool:
        """True if the offer of the present holder yields to this task."""
        holder = self._holder
        if holder is None or self._stage != "offered":
            return False
        return self._is_stale(now) or own.priority < holder.priority

    def _is_stale(self, now: float) -> bool:
        return self._stage == "offered" and now >= self._lease_s

    def _note_round(self, own: _Contender, now: float) -> None:
        if own.asked_s is not None and now > own.asked_s:
            own.interval_s = now - own.asked_s
        own.asked_s = now
