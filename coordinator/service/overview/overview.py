"""The overview of a run: a snapshot for its operator that answers at any time.

Rules:
- The loop's thread tells it what happens (`Onlooker`); any thread reads. Both hold one lock for a
  moment, never for work: what a reader gets, it makes of values that are replaced and never
  changed. So a read never waits for the loop, not even while a round is committed.
- Telling costs the same however many devices there are; only the opening and the close of a round
  cost something for each of its devices.
- `sequence` grows with every change. A row has the sequence of its last change; the columns
  `contribution` and `staleness` are worked out when it is read, and do not change it.
- Totals are sums over all lines of history, those of undone rounds included. In memory are the last
  `HELD_ROUNDS` rounds, as many characters of each device's strip, and of each device its last 200
  rounds (fewer with more than 500 devices: together about 100,000 entries).
- Text that came from devices is untrusted. Here it loses what is not printable, so that it cannot
  steer a terminal; whoever puts it into a page must escape it all the same.
"""

from __future__ import annotations

import difflib
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from coordinator.errors import ConfigError
from coordinator.rounds.fleet import FleetRecord
from coordinator.rounds.reputation import quarantined
from coordinator.service.overview.blocks import BlockMap
from coordinator.service.overview.facts import RunFacts
from coordinator.service.overview.lines import (
    OverviewRow,
    RunTotals,
    event_row,
    is_round,
    round_row,
)
from coordinator.service.overview.onlooker import Onlooker
from coordinator.service.overview.rows import (
    LEAST_ROUNDS,
    MOST_ENTRIES,
    MOST_ROUNDS,
    DeviceRounds,
    after_round,
    new_row,
    printable,
    round_entry,
    shown,
    state_of,
)
from coordinator.service.overview.strip import HELD, LEGEND
from edge_sdk import __version__
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import Bid, Outcome, Receipt

HELD_ROUNDS = HELD
"""Rounds that are kept in memory."""
FAILURES = frozenset({"failed", "data", "plan"})
"""Codes of skips that tell of an error of the device."""

Clock = Callable[[], float]


class Overview(Onlooker):
    """What the operator of a run sees. Any thread may read it."""

    watches = True

    def __init__(
        self,
        facts: RunFacts,
        *,
        history: Iterable[Mapping[str, Any]] = (),
        clock: Clock = time.time,
    ) -> None:
        """`history` are the lines of the run so far; `clock` tells Unix seconds."""
        self._facts = facts
        self._clock = clock
        self._lock = threading.Lock()
        self._changed, self._waiting = threading.Condition(self._lock), 0
        self._sequence = 0
        self._rows: OrderedDict[str, OverviewRow] = OrderedDict()
        """Rows of devices, the one that changed last at the end."""
        self._past: dict[str, DeviceRounds] = {}
        self._rounds: deque[OverviewRow] = deque(maxlen=HELD_ROUNDS)
        self._events = 0
        """Rows at the end of `_rounds` that are no rounds, and that no round follows yet."""
        self._numbers: deque[int] = deque(maxlen=HELD)
        """Numbers of the last closed rounds, whose places in the strips count up to `_closed`."""
        self._places: dict[int, int] = {}
        """Their places, by number."""
        self._closed = 0
        """Rounds that ever closed: the next place."""
        self._committed = 0
        self._newest = 0
        self._counted = 0
        self._totals = RunTotals()
        self._best: tuple[float, int, float] | None = None
        """Accuracy, round and level of the best model so far."""
        self._reports: list[OverviewRow] = []
        self._deploy: float | None = None
        self._map = BlockMap(facts.plan)
        self._fleet: FleetRecord | None = None
        self._quarantined: Mapping[str, OverviewRow] = {}
        """Devices whose bids are declined."""
        self._entries: NDArray[np.int64] | None = None
        self._steps: NDArray[np.float64] | None = None
        self._map_round = 0
        self._phase, self._round, self._words = "", 0, None if facts.served else ""
        self._due: float | None = None
        self._started = clock() if facts.served else None
        self._begun = self._linked = self._stopped = False
        self._finished = False
        self._pause: OverviewRow | None = None
        self._stopping: str | None = None
        self._delivery: dict[str, Any] | None = None
        with self._lock:
            for entry in history:
                self._fold(entry)
            # A rollback since then undid the round with which it was complete.
            whole = facts.finished is not None and facts.finished == self._newest
            self._finished = whole and not facts.served

    # -- for readers ------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        """Number that grows with every change."""
        return self._sequence

    def wait(self, sequence: int, timeout_s: float) -> int:
        """Wait until there is a change after `sequence`, or time is up; return the newest."""
        with self._lock:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._sequence > sequence, timeout_s)
            finally:
                self._waiting -= 1
            return self._sequence

    def status(self) -> dict[str, Any]:
        """Return the state of the run: see docs/operate.md for every key."""
        now, facts = self._clock(), self._facts
        with self._lock:
            rows = list(self._rows.values())
            best, totals, words = self._best, asdict(self._totals), self._words
            accuracy = next(
                (each["accuracy"] for each in reversed(self._rounds) if not each["event"]), None
            )
            found: dict[str, Any] = {
                "task": facts.task,
                "run": facts.run,
                "folder": None if facts.folder is None else str(facts.folder),
                "state": self._state(),
                "phase": self._phase or None,
                "asynchronous": facts.asynchronous,
                "round": max(self._round, self._newest),
                "rounds": facts.rounds,
                "committed": self._committed,
                "waits_for": words or None,
                "deadline_s": None if self._due is None else max(0.0, self._due - now),
                "started": self._started,
                "time": now,
                "version": __version__,
                "broker_connected": self._linked,
                "accuracy": accuracy,
                "deploy": self._deploy,
                "best": None
                if best is None
                else {"round": best[1], "accuracy": best[0], "level": best[2]},
                "level_reports": self._reports,
                "totals": totals,
                "settings": dict(facts.settings),
                "paused": self._pause,
                "stopping": self._stopping,
                "delivery": self._delivery,
                "sequence": self._sequence,
            }
        return {**found, **_counts(rows, facts.asynchronous)}

    def devices(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the rows of devices that changed after `since`, sorted by name; 0: all."""
        with self._lock:
            rows = []
            for row in reversed(self._rows.values()):
                if since and row["sequence"] <= since:
                    break
                rows.append(row)
            counted, newest = self._counted, self._newest
        found = [shown(row, counted=counted, newest=newest) for row in rows]
        return sorted(found, key=lambda row: str(row["device"]))

    def device(self, name: str) -> dict[str, Any]:
        """Return the row of a device with its last rounds. Raises `ConfigError` if unknown."""
        with self._lock:
            row, past = self._rows.get(name), self._past.get(name)
            entries = list(past.entries) if past is not None else []
            counted, newest = self._counted, self._newest
            known = list(self._rows) if row is None else []
        if row is None:
            near = difflib.get_close_matches(str(name)[:80], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"no device {str(name)[:80]!r} has joined {self._facts.task!r}{hint}")
        return {**shown(row, counted=counted, newest=newest), "rounds": entries}

    def rounds(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the rounds after number `since` that are in memory, and other news among them.

        News have the number of the round before them until the next one closes, and then its
        number: whoever asks again with the newest number they have sees them beside that round.
        """
        with self._lock:
            rows = list(self._rounds)
        return [dict(row) for row in rows if row["round"] > since]

    def blocks(self) -> dict[str, Any]:
        """Return the map of the model's blocks after the newest round."""
        with self._lock:
            known = self._fleet, self._map_round, self._entries, self._steps
        return self._map.draw(*known)

    def strip(self, rounds: int = 60) -> dict[str, Any]:
        """Return one character per device and round, of the last rounds that closed."""
        with self._lock:
            numbers = list(self._numbers)[-max(1, rounds) :]
            marks = {
                name: past.strip.read(self._closed - len(numbers), self._closed)
                for name, past in self._past.items()
            }
            for name in self._rows:
                marks.setdefault(name, "." * len(numbers))
        devices = {name: marks[name] for name in sorted(marks)}
        return {"rounds": numbers, "devices": devices, "legend": LEGEND}

    # -- for the loop -----------------------------------------------------------------------

    def began(self) -> None:
        """See `Onlooker`."""
        with self._lock:
            self._begun = self._linked = True
            self._change()

    def linked(self, connected: bool) -> None:
        """See `Onlooker`."""
        with self._lock:
            if connected != self._linked:
                self._linked = connected
                if not connected:
                    self._words, self._due = "the broker", None
                elif self._words == "the broker":
                    self._words = None
                self._change()

    def at(self, phase: str, round: int, deadline_s: float | None) -> None:
        """See `Onlooker`."""
        with self._lock:
            due = None if deadline_s is None else self._clock() + deadline_s
            if (phase, round) != (self._phase, self._round):
                self._words = None
            elif _about(due, self._due):
                return
            self._phase, self._round, self._due = phase, round, due
            self._change()

    def waits(self, words: str | None) -> None:
        """See `Onlooker`."""
        with self._lock:
            if words != self._words:
                self._words = words
                self._change()

    def finished(self) -> None:
        """The run is complete."""
        with self._lock:
            if not self._finished:
                self._finished, self._words, self._due = True, None, None
                self._change()

    def stopped(self) -> None:
        """The process no longer serves the run."""
        with self._lock:
            self._stopped, self._linked, self._due = True, False, None
            self._change()

    def joined(self, device: str) -> None:
        """See `Onlooker`."""
        self._update(device, present=True, state="idle", last_seen=self._now())

    def left(self, device: str, reason: str = "", exit_code: int | None = None) -> None:
        """See `Onlooker`."""
        said = printable(reason) or "it stopped"
        error = self._error(f"{said} (exit code {exit_code})") if exit_code else {}
        self._update(device, present=False, **error)

    def condition(self, condition: Condition) -> None:
        """See `Onlooker`."""
        told: OverviewRow = {
            name: getattr(condition, name)
            for name in (
                *("battery", "charging", "temperature_c", "memory_free_mb", "memory_mb"),
                *("energy_today_j", "energy_budget_j", "profile"),
            )
        }
        told["labels"] = dict(condition.labels)
        told["version"] = printable(condition.version)
        error = printable(condition.last_error)
        with self._lock:
            row = self._rows.get(condition.device)
            if error and (row is None or row["last_error"] != error):  # it tells it again and again
                told |= self._error(error)
            self._put(condition.device, last_seen=self._now(), **told)

    def barred(self, device: str, reason: str | None) -> None:
        """See `Onlooker`."""
        with self._lock:
            row = self._rows.get(device)
            if row is None or row["_barred"] != reason:
                self._put(device, _barred=reason)

    def asked(self, devices: Iterable[str], round: int) -> None:
        """See `Onlooker`."""
        with self._lock:
            for device in devices:
                self._put(device, state="asked")
            self._round = max(self._round, round)

    def bid(self, bid: Bid) -> None:
        """See `Onlooker`."""
        with self._lock:
            changes: OverviewRow = {
                "level": bid.level,
                "reason": printable(bid.reason),
                "code": None if bid.level is not None else bid.code,
                "round": bid.round,
                "last_seen": self._now(),
            }
            row = self._rows.get(bid.device)
            busy = row is not None and row["state"] in ("training", "kept")
            if bid.level is None:
                changes["state"] = "skipped"
                if bid.code in FAILURES:
                    changes |= self._error(changes["reason"])
            elif not (busy and row is not None and row["round"] == bid.round):
                changes["state"] = "asked"
            if bid.samples:
                changes["samples"] = bid.samples
            self._put(bid.device, **changes)

    def assigned(self, device: str, round: int) -> None:
        """See `Onlooker`."""
        self._update(device, state="training", round=round)

    def kept(self, arrival: Arrival, round: int) -> None:
        """See `Onlooker`."""
        device = arrival.contribution.device
        with self._lock:
            row = self._rows.get(device)
            current = row is not None and row["round"] == round
            self._put(device, last_seen=self._now(), **({"state": "kept"} if current else {}))

    def verdict(self, receipt: Receipt) -> None:
        """See `Onlooker`."""
        device, outcome = receipt.device, receipt.outcome
        if outcome is Outcome.KEPT:
            return
        with self._lock:
            row = self._rows.get(device) or new_row(device)
            if outcome is Outcome.COUNTED:
                if row["state"] == "kept":
                    self._put(device, state="idle")
                return
            self._refused(device, receipt.round, outcome.value, receipt.reason, self._now())
            if outcome is Outcome.REJECTED:
                self._put(device, state="skipped")

    def line(self, entry: Mapping[str, Any]) -> None:
        """See `Onlooker`."""
        with self._lock:
            self._fold(entry, live=True)

    def model(
        self,
        fleet: FleetRecord,
        round: int,
        *,
        entries: NDArray[np.int64] | None = None,
        squares: NDArray[np.float64] | None = None,
    ) -> None:
        """See `Onlooker`."""
        steps = None if squares is None else np.sqrt(squares / self._facts.plan.block_sizes)
        barred = {
            name: {"round": each.quarantined, "reason": each.reason}
            for name, each in quarantined(fleet.standings).items()
        }
        with self._lock:
            first = self._fleet is None
            self._fleet, self._map_round = fleet, round
            self._entries = None if entries is None else entries.copy()
            if steps is not None:
                known = np.full(len(steps), -1.0) if self._steps is None else self._steps
                self._steps = np.where(steps > 0, steps, known)
            if first:
                for name, samples in fleet.samples.items():
                    self._put(name, samples=samples)
            for name in [n for n in self._quarantined if n not in barred]:
                self._put(name, quarantined=None)
            for name, why in barred.items():
                if self._quarantined.get(name) != why:
                    self._put(name, quarantined=why)
            self._quarantined = barred
            self._change()

    def known(self, devices: Iterable[str]) -> None:
        """Note devices that took part in an earlier process."""
        with self._lock:
            for device in devices:
                if device not in self._rows:
                    self._put(device)

    def paused(self, by: str, time: float) -> None:
        """See `Onlooker`."""
        with self._lock:
            self._pause = {"by": by, "time": time}
            self._change()

    def resumed(self) -> None:
        """See `Onlooker`."""
        with self._lock:
            self._pause = None
            self._change()

    def stopping(self, when: str | None) -> None:
        """See `Onlooker`."""
        with self._lock:
            self._stopping = when
            self._change()

    def delivery(self, found: Mapping[str, Any]) -> None:
        """See `Onlooker`."""
        with self._lock:
            if found != self._delivery:
                self._delivery = dict(found)
                self._change()

    @property
    def facts(self) -> RunFacts:
        """Facts about the run, with `finished` as it is now."""
        with self._lock:
            return replace(self._facts, finished=self._newest if self._finished else None)

    def settings(self, settings: Mapping[str, Any], rounds: int | None = None) -> None:
        """Note other settings of the run, and its new length if that changed."""
        with self._lock:
            was = self._facts.rounds
            length = was if rounds is None else rounds
            if was is not None and length is not None and length > was:
                self._finished = False
            self._facts = replace(self._facts, settings=dict(settings), rounds=length)
            self._change()

    # -- inside, with the lock held ---------------------------------------------------------

    def _state(self) -> str:
        if self._facts.starting:
            return "starting"
        if self._finished:
            return "finished"
        if self._stopped or not self._facts.served:
            return "stopped"
        if self._stopping is not None:
            return "stopping"
        if not self._begun:
            return "starting"
        if self._pause is not None:
            return "paused"
        idle = not self._linked or self._phase.startswith("waiting")
        return "waiting" if idle else "running"

    def _now(self) -> float:
        """Return whole Unix seconds: to write more digits of thousands of devices costs time."""
        return float(math.floor(self._clock()))

    def _error(self, words: str, time: float | None = None) -> OverviewRow:
        """Return the changes of a row for an error, which was now if no time is given."""
        return {"last_error": words, "last_error_time": self._now() if time is None else time}

    def _change(self) -> None:
        self._sequence += 1
        if self._waiting:
            self._changed.notify_all()

    def _update(self, device: str, **changes: Any) -> None:
        with self._lock:
            self._put(device, **changes)

    def _put(self, device: str, **changes: Any) -> None:
        """Replace a device's row by one with these changes, if they are any."""
        row = self._rows.get(device)
        if row is None:
            row = new_row(device)
        elif all(row[name] == value for name, value in changes.items()):
            return
        self._change()
        self._rows[device] = {**row, **changes, "sequence": self._sequence}
        self._rows.move_to_end(device)

    def _fold(self, entry: Mapping[str, Any], *, live: bool = False) -> None:
        """Take up a line of history."""
        if not is_round(entry):
            if (back := entry.get("rolled_back")) is not None:
                self._undo(back["to"])
            self._rounds.append(event_row(entry, self._newest))
            self._events += 1
            self._change()
            return
        row = round_row(entry)
        number = row["round"]
        for behind in range(1, min(self._events, len(self._rounds)) + 1):
            self._rounds[-behind] = {**self._rounds[-behind], "round": number}
        self._events = 0
        self._rounds.append(row)
        self._totals.add(row)
        if len(self._numbers) == HELD and self._places.get(self._numbers[0]) == self._closed - HELD:
            del self._places[self._numbers[0]]
        self._places[number] = place = self._closed
        self._numbers.append(number)
        self._closed, self._newest = self._closed + 1, number
        self._committed += 1
        self._reports = [
            {name: each.get(name) for name in ("level", "parameters", "accuracy", "devices")}
            for each in entry.get("levels", ())
        ]
        self._deploy = entry.get("deploy")
        accuracy = next(
            (each["accuracy"] for each in self._reports if each["level"] == self._deploy), None
        )
        better = accuracy is not None and (self._best is None or accuracy > self._best[0])
        if better and accuracy is not None and self._deploy is not None:
            self._best = accuracy, number, self._deploy
        most = max(LEAST_ROUNDS, min(MOST_ROUNDS, MOST_ENTRIES // max(1, len(self._rows))))
        for part in entry["devices"]:
            self._take_part(part, number, place, most, row["time"], live=live)
        if not live:
            for refusal in entry.get("refusals", ()):
                outcome, reason = refusal["outcome"], refusal["reason"]
                self._refused(refusal["device"], refusal["round"], outcome, reason, row["time"])
        self._change()

    def _take_part(
        self,
        part: Mapping[str, Any],
        round: int,
        place: int,
        most: int,
        time: float | None,
        *,
        live: bool,
    ) -> None:
        device, entry = part["device"], round_entry(round, part)
        past = self._past.get(device)
        if past is None:
            past = self._past[device] = DeviceRounds()
        past.add(entry, place, most)
        changes = after_round(self._rows.get(device) or new_row(device), entry, time)
        if "_counted" in changes:
            self._counted += 1
        if not live:
            changes |= {"round": round, "last_seen": time}
        self._put(device, **changes)

    def _refused(
        self, device: str, round: int, outcome: str, reason: str, time: float | None
    ) -> None:
        """Count a movement that came late, or was rejected, at a time if that is known."""
        row = self._rows.get(device) or new_row(device)
        column = "rejected" if outcome == Outcome.REJECTED.value else "late"
        changes: OverviewRow = {column: row[column] + 1}
        if column == "rejected":
            changes |= self._error(f"round {round}: {printable(reason)}", time)
        past = self._past.get(device)
        if past is not None:
            past.correct(round, self._places.get(round), outcome, reason)
        self._put(device, **changes)

    def _undo(self, to: int) -> None:
        """Leave out the rounds after `to`, which an operator undid; totals keep them."""
        kept = [row for row in self._rounds if row["event"] or row["round"] <= to]
        undone = sum(1 for row in self._rounds if not row["event"] and row["round"] > to)
        self._rounds = deque(kept, maxlen=HELD_ROUNDS)
        self._committed -= undone
        self._newest = min(self._newest, to)
        if self._best is not None and self._best[1] > to:
            known = [
                (each["accuracy"], row["round"], each["level"])
                for row in kept
                for each in row["levels"]
                if each["accuracy"] is not None
            ]
            self._best = max(known, key=lambda each: each[0], default=None)


def _about(one: float | None, other: float | None) -> bool:
    """True if two deadlines are the same, to a second."""
    if one is None or other is None:
        return one is other
    return abs(one - other) < 1.0


def _counts(rows: list[OverviewRow], asynchronous: bool) -> dict[str, Any]:
    """Count the devices by their state, and the answers to the newest round that has any."""
    states: Counter[str] = Counter(state_of(row) for row in rows)
    answered = max((row["round"] for row in rows if row["round"] is not None), default=0)
    levels: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    for row in rows:
        if row["round"] is None or (row["round"] < answered and not asynchronous):
            continue
        if row["level"] is not None:
            levels[f"{row['level']:g}"] += 1
        elif row["reason"] is not None:
            skips[row["code"] or "other"] += 1
    return {
        "devices": {
            "known": len(rows),
            "present": sum(row["present"] for row in rows),
            "training": states["training"],
            "quarantined": states["quarantined"],
            "paused": states["paused"],
        },
        "levels": dict(sorted(levels.items(), key=lambda each: -float(each[0]))),
        "skips": dict(sorted(skips.items())),
    }
