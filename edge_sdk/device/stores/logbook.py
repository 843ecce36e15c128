"""Notes of what a device does in one task, for its owner: now, lately and in all.

    <state_dir>/<task>/<device>/logbook.json

The loop and the training thread write, anybody reads. The file is replaced after rounds and
receipts, at most once a second, and after every error and at the end, without waiting for the disk:
after a crash it tells what was so a moment before. Nothing in it is needed to go on, and nothing of
it leaves the device.

Text of the coordinator stands in here as it came; whoever shows it has to clean it.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from edge_sdk.device.machine import DevicePhase
from edge_sdk.program.files import write_whole
from edge_sdk.protocol.messages.round import Bid, Movement, Receipt

log = logging.getLogger(__name__)

FILE = "logbook.json"
ROUNDS = 200
"""Rounds that are remembered."""
VERDICTS = 5
MOST_CHARACTERS = 500
SOON_S = 1.0
"""Least seconds between two versions of the file that rounds and receipts make."""
SAVE_S = 10.0
"""Most seconds between two versions of the file while bytes come and go."""

ROW: dict[str, Any] = {
    **{"run": "", "round": 0, "time": 0.0, "level": None, "reason": None, "code": None},
    **{"outcome": None, "loss": None, "train_s": None},
}
"""A round: `outcome` is `waits` from the movement to its receipt, then that of the receipt."""

FAILURES = frozenset({"failed", "data", "plan"})
"""Codes of skips that tell of an error."""

T = TypeVar("T")


class Logbook:
    """The notes of one task. For any number of threads."""

    def __init__(
        self,
        task: str,
        folder: Path,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`folder`: the device's for this task. Goes on from what it has."""
        self.task = task
        self._path = folder / FILE
        self._wall = wall
        self._lock = RLock()
        before = read_logbook(folder) or {}
        self._rounds: deque[dict[str, Any]] = deque(_list(before, "rounds"), ROUNDS)
        self._verdicts: deque[dict[str, Any]] = deque(_list(before, "verdicts"), VERDICTS)
        self._counts = {name: _count(before, name) for name in ("trained", "skipped")}
        known = _table(before, "bytes")
        self._bytes = {name: _count(known, name) for name in ("up", "down")}
        self._today = {name: _count(known, f"{name}_today") for name in ("up", "down")}
        day = (known or {}).get("day")
        self._day = day if isinstance(day, str) else ""
        self._error = _table(before, "error")
        self._decision = _table(before, "decision")
        self._work, self._step, self._steps, self._round = DevicePhase.IDLE, 0, 0, 0
        self._since = self._started = wall()
        self._run = self._broker = self._reason = ""
        self._session: int | None = None
        self._connected = False
        self._coordinator: bool | None = None
        self._uploads = (0, 0)
        self._ended: dict[str, Any] | None = None
        self._saved_s = 0.0
        self._unsaved = False
        self._minute = -1
        """The minute in which somebody looked what day it is."""

    # -- the loop -------------------------------------------------------------------------------

    def starts(self, session: int, broker: str) -> None:
        """Note a start of the program."""
        with self._lock:
            self._session, self._broker, self._ended = session, broker, None
            self.save()

    def link(self, *, connected: bool, reason: str = "") -> None:
        """Note that the link to the broker works, or why it does not."""
        with self._lock:
            self._connected, self._reason = connected, reason[:MOST_CHARACTERS]
            self.save()

    def coordinator(self, *, online: bool) -> None:
        """Note that the task's coordinator is there, or away."""
        with self._lock:
            self._coordinator = online

    def uploads(self, under_way: int, waiting: int) -> None:
        """Note how many uploads have not arrived, and how many have and wait for a receipt."""
        with self._lock:
            self._uploads = (under_way, waiting)

    def sent(self, size: int) -> None:
        """Count bytes that were handed to the link."""
        self._count_bytes("up", size)

    def received(self, size: int) -> None:
        """Count bytes that came."""
        self._count_bytes("down", size)

    def ends(self, code: int, words: str) -> None:
        """Note the end of the program."""
        with self._lock:
            self._ended = {"time": self._wall(), "code": code, "words": words[:MOST_CHARACTERS]}
            self._connected = False
            self.save()

    # -- the training thread -----------------------------------------------------------------

    def takes_part(self, run: str) -> None:
        """Note the run; rounds of another one are numbered anew."""
        with self._lock:
            self._run = run

    def phase(self, phase: DevicePhase, round: int = 0) -> None:
        """Note the step of a round that the device has reached."""
        with self._lock:
            if phase is not self._work:
                self._work, self._since, self._step = phase, self._wall(), 0
            self._round = round or self._round

    def steps(self, batches: Iterable[T], count: int) -> Iterator[T]:
        """Yield the batches of a training, and count the steps that they are taken for."""
        self._steps = count
        for self._step, batch in enumerate(batches, 1):
            yield batch

    def bid(self, bid: Bid) -> None:
        """Note an answer to a round: a level, a skip, or an offer that is withdrawn."""
        with self._lock:
            row = self._row(bid.round)
            told = {"level": bid.level, "reason": bid.reason, "code": bid.code}
            self._decision = {"round": bid.round, **told, "time": self._wall()}
            if bid.level is None and row["outcome"] is None:
                self._counts["skipped"] += row["code"] is None or row["level"] is not None
            row.update(told)
            if bid.level is None and bid.code not in FAILURES:
                self._had_round(row)
            self._save_soon()

    def made(self, movement: Movement) -> None:
        """Note a movement that was made."""
        with self._lock:
            self._counts["trained"] += 1
            row = self._row(movement.round)
            row.update(outcome="waits", loss=movement.loss, train_s=movement.train_s)
            self._had_round(row)
            self._save_soon()

    def receipt(self, receipt: Receipt) -> None:
        """Note what became of a movement."""
        with self._lock:
            outcome, reason = receipt.outcome.value, receipt.reason[:MOST_CHARACTERS]
            self._row(receipt.round)["outcome"] = outcome
            told = {"round": receipt.round, "outcome": outcome, "reason": reason}
            self._verdicts.append({**told, "time": self._wall()})
            self._save_soon()

    # -- anybody -----------------------------------------------------------------------------

    def error(self, words: str) -> None:
        """Note a warning or an error of the program."""
        with self._lock:
            self._error = {"time": self._wall(), "words": words[:MOST_CHARACTERS]}
            self.save()

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The last rounds, the oldest first."""
        with self._lock:
            return [dict(row) for row in self._rounds]

    def to_dict(self) -> dict[str, Any]:
        """Write everything that is known now."""
        with self._lock:
            self._turn_day()
            training = self._work is DevicePhase.TRAINING
            return {
                "task": self.task,
                "phase": self._phase(),
                "since": self._since,
                "run": self._run or None,
                "round": self._round or None,
                "step": self._step if training else None,
                "steps": self._steps if training else None,
                "decision": self._decision,
                "trained": self._counts["trained"],
                "skipped": self._counts["skipped"],
                "verdicts": [dict(each) for each in self._verdicts],
                "rounds": self.rounds,
                "bytes": {
                    **self._bytes,
                    **{f"{name}_today": size for name, size in self._today.items()},
                    "day": self._day,
                },
                "error": self._error,
                "broker": {
                    "address": self._broker or None,
                    "connected": self._connected,
                    "reason": self._reason or None,
                },
                "coordinator": self._coordinator,
                "session": self._session,
                "started": self._started,
                "time": self._wall(),
                "ended": self._ended,
            }

    def save_due(self) -> None:
        """Replace the file if it is a while behind; to be called every few seconds."""
        with self._lock:
            if self._unsaved:
                self._save_soon()

    def _save_soon(self) -> None:
        self._unsaved = 0 <= self._wall() - self._saved_s < SOON_S
        if not self._unsaved:
            self.save()

    def save(self) -> None:
        """Replace the file; a disk that is full costs nothing but these notes."""
        self._saved_s, self._unsaved = self._wall(), False
        try:
            write_whole(self._path, json.dumps(self.to_dict()).encode(), synced=False)
        except (OSError, ValueError) as error:
            log.debug("%s cannot be written: %s", self._path, error)

    def _phase(self) -> str:
        under_way, waiting = self._uploads
        if self._work is not DevicePhase.IDLE:
            bids = self._work in (DevicePhase.DECIDING, DevicePhase.BIDDING)
            return "bidding" if bids else self._work.value
        if self._ended is not None:
            return "ended"
        if not self._connected:
            return "waiting for the broker"
        if under_way:
            return "uploading"
        if waiting:
            return "waiting for a receipt"
        if not self._run or self._coordinator is False:
            return "waiting for the coordinator"
        return "resting"

    def _had_round(self, row: Mapping[str, Any]) -> None:
        """Drop an error from before a round that was trained, or skipped for no failure."""
        noted = None if self._error is None else self._error.get("time")
        if isinstance(noted, int | float) and noted < row["time"]:
            self._error = None

    def _row(self, round: int) -> dict[str, Any]:
        row: dict[str, Any]
        for row in reversed(self._rounds):
            if (row["round"], row["run"]) == (round, self._run):
                return row
        row = {**ROW, "run": self._run, "round": round, "time": self._wall()}
        self._rounds.append(row)
        return row

    def _count_bytes(self, name: str, size: int) -> None:
        with self._lock:
            self._turn_day()
            self._bytes[name] += size
            self._today[name] += size
            if not 0 <= self._wall() - self._saved_s < SAVE_S:
                self.save()

    def _turn_day(self) -> None:
        minute = int(self._wall() // 60)
        if minute == self._minute:
            return
        self._minute = minute
        day = datetime.fromtimestamp(self._wall()).date().isoformat()
        if day != self._day:
            self._day, self._today = day, dict.fromkeys(self._today, 0)


def read_logbook(folder: Path) -> dict[str, Any] | None:
    """Read the notes of a program that may not run; None: there are none, or they are damaged."""
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        log.debug("%s cannot be read: %s", folder / FILE, error)
        return None
    return content if isinstance(content, dict) else None


def _list(content: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = content.get(name)
    rows = found if isinstance(found, list) else []
    return [
        {**ROW, **each}
        for each in rows
        if isinstance(each, dict) and isinstance(each.get("round"), int)
    ]


def _table(content: dict[str, Any], name: str) -> dict[str, Any] | None:
    found = content.get(name)
    return found if isinstance(found, dict) else None


def _count(content: dict[str, Any] | None, name: str) -> int:
    found = (content or {}).get(name)
    return found if isinstance(found, int) and found >= 0 else 0
