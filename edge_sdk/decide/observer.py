"""A device's view of itself: when a round opens, during training, and afterwards.

    look ──▶ Sight ──▶ decide ──▶ decided            before: snapshot, costs, energy spent
    training ──▶ closed_gate, at most once a second  during: a gate that closes stops the work
             └─▶ seconds and joules                  after: costs are corrected, energy is booked

A device without a probe and costs counts as on mains and weighs nothing: it trains its owner's
level.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Protocol, runtime_checkable

from edge_sdk.decide.account import EnergyAccount
from edge_sdk.decide.budget import History
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import ON_MAINS, Decision, Policy, Sight, forward_objection
from edge_sdk.decide.gates import Gate, closed_gate
from edge_sdk.machine.snapshot import Probe, Snapshot
from edge_sdk.program.files import write_whole
from edge_sdk.program.records import replace
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.train.backend import Job

log = logging.getLogger(__name__)

SETTLE_S = 6.0
"""Seconds to wait for sensors read by a command, such as a phone's battery, when a round opens."""
LOOK_S = 1.0
"""Shortest time between two checks of the gates during training."""


class Costs(Protocol):
    """Predicts and corrects the cost of rounds; see `edge_sdk.decide.costs.costing`."""

    def predict(self, levels: tuple[float, ...], opened: RoundOpen) -> tuple[Cost, ...]:
        """Predict the round's cost at each of these levels."""

    def forward(self, survey: Survey, number: int, samples: int) -> Cost:
        """Predict a survey's forward pass of its level of this number over so many samples."""

    @property
    def is_off(self) -> bool:
        """True if costs are to be measured again: predictions are wrong, or faster ways to compute
        are still to be looked for.
        """

    def renew(self, should_stop: Callable[[], bool]) -> None:
        """Measure the costs again if they are off, unless told to stop; takes seconds, or half a
        minute with a search for faster ways to compute.
        """

    def metered(self, opened: RoundOpen | None, level: float, job: Job | None = None) -> Metered:
        """Measure the training inside its block; `job`: what is trained, None: all at `level`.

        `opened` None: a forward pass, which corrects no prediction.
        """


@runtime_checkable
class CostsOnDisk(Costs, Protocol):
    """Costs with a file, which is written less often than rounds correct them."""

    @property
    def is_kept(self) -> bool:
        """False while rounds have taught more than the file says."""

    def keep(self, *, always: bool = False) -> None:
        """Write what the file does not say; not `always`: unless it was just written."""


class Metered(Protocol):
    """Measures one training."""

    def __enter__(self) -> Metered:
        """Begin."""

    def __exit__(self, *error: object) -> None:
        """End, completed or stopped."""

    @property
    def joules(self) -> float | None:
        """Energy above idle, so far or in total; None: unknown."""


class Observer:
    """One device's view of itself; for the thread that decides and trains."""

    def __init__(
        self,
        policy: Policy,
        probe: Probe | None = None,
        costs: Costs | None = None,
        *,
        history: Path | None = None,
        account: EnergyAccount | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`history`: the file that keeps it; None: it is lost with the process. `account`: the
        energy of all tasks of the device; None: this task's alone counts.

        `wall` counts days and hours, in seconds since 1970; `clock` anything shorter.
        """
        self._policy = policy
        self._probe = probe
        self._costs = costs
        self._path = history
        self._clock = clock
        self._wall = wall
        self._history = History() if history is None else load_history(history)
        self._account = account
        if account is not None:
            account.adopt(self._history)
        self._looked_s = -LOOK_S
        self._closed: Gate | None = None
        self._last: tuple[str, int, Decision] | None = None
        self._passed: tuple[str, int] | None = None
        self._joules: float | None = None
        self._written = self._history
        """The history as its file has it."""

    @property
    def history(self) -> History:
        """Memory of past rounds."""
        if self._account is None:
            return self._history
        return self._account.complete(self._history)

    @property
    def today_j(self) -> float:
        """Joules spent in the day of the budget that it is now, on all tasks."""
        return self.history.today_j(self._wall())

    @property
    def joules(self) -> float | None:
        """Joules of the newest training or forward pass; None: unknown."""
        return self._joules

    def look(self, opened: RoundOpen) -> Sight:
        """Gather everything needed to decide when a round opens."""
        levels = tuple(sorted({1.0, *self._policy.offered_levels()}, reverse=True))
        settle = getattr(self._probe, "settle", None)
        if settle is not None:  # the last values of slow sensors may be from the round before
            settle(min(SETTLE_S, opened.bid_s / 2))
        return Sight(
            snapshot=self._snapshot(),
            costs=() if self._costs is None else self._costs.predict(levels, opened),
            deadline_s=opened.train_deadline_s,
            rounds_left=opened.rounds_left,
            whole=opened.whole,
            warmup=opened.warmup,
            largest=opened.largest,
            now_s=self._wall(),
            minute=local_minute(self._wall()),
        )

    def decided(self, opened: RoundOpen, decision: Decision) -> None:
        """Remember a decision and its new history.

        If the device is going to train, the history is written when it has: one write for both.
        """
        self._last = (opened.run, opened.round, decision)
        self._heard(decision.history, later=decision.level is not None)

    def passed_over(self, opened: RoundOpen) -> None:
        """Note a round that is skipped without a look at what the device can afford, once."""
        known = opened.run, opened.round
        if known == self._passed or (self._last is not None and known == self._last[:2]):
            return
        self._passed = known
        history = self.history.heard(self._wall())
        self._heard(replace(history, skipped=history.skipped + 1))

    def _heard(self, history: History, *, later: bool = False) -> None:
        if self._account is not None and history.opened_s is not None:
            self._account.heard(history.opened_s)
        self._remember(history, later=later)

    @property
    def is_off(self) -> bool:
        """True if costs are to be measured again, when there is time for that."""
        return self._costs is not None and self._costs.is_off

    def renew(self, should_stop: Callable[[], bool]) -> None:
        """Measure costs again if they are off: seconds, for a device with nothing else to do."""
        if self._costs is not None:
            self._costs.renew(should_stop)

    @property
    def is_kept(self) -> bool:
        """True if all that is known of costs is on disk, or need not be."""
        return not isinstance(self._costs, CostsOnDisk) or self._costs.is_kept

    def keep(self, *, always: bool = False) -> None:
        """Write what rounds taught of costs; not `always`: unless their file was just written."""
        if isinstance(self._costs, CostsOnDisk):
            self._costs.keep(always=always)

    def recalled(self, opened: RoundOpen) -> Decision | None:
        """Return the earlier decision on this round; None: the round is new.

        A restarted coordinator asks again, and gets the same answer.
        """
        if self._last is None or self._last[:2] != (opened.run, opened.round):
            return None
        return self._last[2]

    def objection(self, survey: Survey, number: int, samples: int) -> str | None:
        """Return why this device cannot run a survey's level of this number; None: it can."""
        gate = closed_gate(self._policy.limits, self._snapshot(), local_minute(self._wall()))
        if gate is not None:
            return gate.reason
        if self._costs is None:
            return None
        sight = Sight(
            snapshot=self._snapshot(), deadline_s=survey.wait_s, now_s=self._wall(), rounds_left=1
        )
        cost = self._costs.forward(survey, number, samples)
        return forward_objection(self._policy, sight, self.history, cost)

    @contextmanager
    def training(
        self, opened: RoundOpen | None, level: float, job: Job | None = None
    ) -> Iterator[None]:
        """Measure the work in the block, and book its energy, whatever its result.

        `opened` None: it is a forward pass, and no training.
        """
        self._looked_s, self._closed, self._joules = self._clock() - LOOK_S, None, None
        if self._costs is None:
            try:
                yield
            finally:
                self._remember(self._history)
            return
        meter, drained = self._costs.metered(opened, level, job), self._is_on_battery()
        try:
            with meter:
                yield
        finally:
            self._joules = meter.joules
            spends = meter.joules is not None and (drained or self._is_on_battery())
            if spends and self._account is not None:
                self._account.spent(meter.joules or 0.0)
            self._remember(self._history.spent(meter.joules or 0.0) if spends else self._history)

    def closed_gate(self) -> Gate | None:
        """Return the gate that stops training now; None: go on. Checks at most once a second."""
        now = self._clock()
        if self._closed is None and now - self._looked_s >= LOOK_S:
            self._looked_s = now
            self._closed = closed_gate(
                self._policy.limits, self._snapshot(), local_minute(self._wall())
            )
        return self._closed

    def snapshot(self) -> Snapshot:
        """Return how the device is now, as far as anybody looks."""
        return Snapshot() if self._probe is None else self._probe.snapshot()

    def _snapshot(self) -> Snapshot:
        return ON_MAINS if self._probe is None else self._probe.snapshot()

    def _is_on_battery(self) -> bool:
        battery = self._snapshot().battery
        return battery.present is not False and not battery.charging

    def _remember(self, history: History, *, later: bool = False) -> None:
        """Note the history, and write it if more than the times of rounds has changed."""
        self._history = history
        times = {"opened_s": history.opened_s, "interval_s": history.interval_s}
        if self._path is None or later or replace(self._written, **times) == history:
            return
        try:
            save_history(self._path, history)
            self._written = history
        except OSError as error:
            log.warning("the energy spent is lost if this program stops: %s", error)


def local_minute(wall_s: float) -> int:
    """Return the minute of the local day at a time in seconds since 1970."""
    local = time.localtime(wall_s)
    return 60 * local.tm_hour + local.tm_min


def load_history(path: Path) -> History:
    """Load the history; a missing or unreadable file gives an empty one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(History)}
        if not isinstance(content, dict) or not content.keys() <= known:
            raise ValueError(f"keys other than {', '.join(sorted(known))}")
        for name, value in content.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number and (value is not None or name in ("skipped", "spent_j")):
                raise ValueError(f"{name} = {value!r}")
        return History(**content)
    except FileNotFoundError:
        return History()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s cannot be used, the energy spent is unknown: %s", path, error)
        return History()


def save_history(path: Path, history: History) -> None:
    """Replace the file, completely or not at all. Raises `OSError`."""
    content = {each.name: getattr(history, each.name) for each in fields(History)}
    write_whole(path, json.dumps(content, allow_nan=False).encode())
