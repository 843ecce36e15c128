"""The one training of a device that takes part in several tasks: turns, for threads and on disk.

Each task has a `Seat`, used by the thread that trains it. See `edge_sdk.decide.turns` for who goes
first. What is kept on disk is who was served when, so that a restart favours nobody.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TypeVar

from edge_sdk.decide.turns import Obstacle, TaskTurns
from edge_sdk.program.files import make_folder, write_whole

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_WAIT_S = 10.0
"""Longest wait for the turn, in seconds, before a round is skipped."""
WAIT_SHARE = 0.25
"""Largest share of the time for bids that is spent on that wait."""
LEASE = 2.0
"""Times for bids after which an offer without an assignment yields to other tasks."""
LOOK_S = 0.2
"""Seconds between two looks at what may end a wait."""
ANOTHER = "another task of this device is trained now"
"""Reason for the coordinator, which learns nothing of the device's other tasks."""


class TrainingSlot:
    """The turns of a device's tasks."""

    def __init__(
        self,
        priorities: Mapping[str, int],
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`priorities`: the lower number goes first. `path`: the file that keeps who was served."""
        self._turns = TaskTurns(priorities, _load(path, priorities))
        self._path = path
        self._clock = clock
        self._changed = Condition()
        self._lost: dict[str, Callable[[], None]] = {}

    @property
    def training(self) -> str | None:
        """The task that is trained now; None: none is."""
        with self._changed:
            return self._turns.training

    def seat(self, task: str, lost: Callable[[], None]) -> Seat:
        """The seat of one task. `lost` is called when its offer yields to another task."""
        self._lost[task] = lost
        return Seat(self, task)

    def waive(self, task: str) -> None:
        """Owe a task nothing: its coordinator is gone. For any thread."""
        self.change(lambda turns, _: turns.waive(task))

    def ask(self, task: str) -> tuple[Obstacle | None, float]:
        """Ask once; return what is in the way, and the time of the clock."""
        with self._changed:
            now, before = self._clock(), self._turns.holder
            obstacle = self._turns.ask(task, now)
            loser = self._lost.get(before or "") if before not in (None, task) else None
            self._changed.notify_all()
        if obstacle is None and loser is not None:
            loser()
        return obstacle, now

    def wait(self, timeout_s: float) -> None:
        """Wait for a change."""
        with self._changed:
            self._changed.wait(max(0.0, min(LOOK_S, timeout_s)))

    def change(self, work: Callable[[TaskTurns, float], T], *, kept: bool = False) -> T:
        """Do something with the turns, and tell who waits. `kept`: it changes who was served."""
        with self._changed:
            before = self._turns.served
            result = work(self._turns, self._clock())
            self._changed.notify_all()
            if kept and self._turns.served != before:
                self._save()
        return result

    def _save(self) -> None:
        try:
            make_folder(self._path.parent)
            write_whole(self._path, json.dumps(self._turns.served).encode())
        except OSError as error:
            log.warning("which task was served last is lost with this program: %s", error)


class Seat:
    """One task's side of the slot. For the thread that trains it."""

    def __init__(self, slot: TrainingSlot, task: str) -> None:
        self._slot = slot
        self._task = task

    def claim(self, bid_s: float, give_up: Callable[[], bool]) -> Obstacle | None:
        """Ask for the turn for a round whose bids are awaited for `bid_s`; None: it is granted.

        Waits for a part of that time if it has to, and until `give_up` says so.
        """
        until: float | None = None
        while True:
            obstacle, now = self._slot.ask(self._task)
            if obstacle is None:
                return None
            if until is None:
                until = now + min(MOST_WAIT_S, WAIT_SHARE * bid_s)
            if now >= until or give_up():
                self._slot.change(lambda turns, now: turns.refuse(self._task, now))
                return obstacle
            self._slot.wait(until - now)

    def begin(self) -> bool:
        """Begin to train what was offered; False if the turn was lost."""
        return self._slot.change(lambda turns, _: turns.begin(self._task), kept=True)

    def offer(self, bid_s: float) -> None:
        """Note that the device offers to train, in a round whose bids are awaited for `bid_s`."""
        lease_s = LEASE * bid_s
        self._slot.change(lambda turns, now: turns.offer(self._task, now, lease_s))

    @property
    def disturbs(self) -> bool:
        """True while another task is trained."""
        return self._slot.training not in (None, self._task)

    def release(self) -> None:
        """Give the turn back; harmless without it."""
        self._slot.change(lambda turns, _: turns.end(self._task), kept=True)

    def leave(self) -> None:
        """Give up the turn and every claim to it."""
        self._slot.change(lambda turns, _: turns.leave(self._task), kept=True)

    @property
    def holds(self) -> bool:
        """True while this task has the turn."""
        return self._slot.change(lambda turns, _: turns.holder == self._task)

    @contextmanager
    def occupied(self) -> Iterator[None]:
        """Have the turn in this block, for work that is no training, if it is free."""
        got = self._slot.change(lambda turns, now: turns.occupy(self._task, now))
        try:
            yield
        finally:
            if got:
                self.release()


def _load(path: Path, known: Mapping[str, int]) -> dict[str, int]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: number
            for name, number in content.items()
            if name in known
            and isinstance(number, int)
            and not isinstance(number, bool)
            and number > 0
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        log.warning("%s cannot be read, so no task counts as served: %s", path, error)
        return {}
