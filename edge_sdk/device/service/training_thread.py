"""The thread of a device that fetches and trains. Orders come in through an inbox, one by one;
everything it makes goes to the loop through one queue.

It follows the run that the newest notice announces, and remembers a round, or the end of a run,
that was heard of before its notice. A task that does not come is fetched again, and a bid without
an answer is repeated. A message that fails is logged and skipped. An error that no retry can mend
is told to the loop (`Broken`), which ends.

While it fetches or trains, orders wait, but it looks at them: another run ends this run's training,
and a newer round ends a fetch for an older one.

A model for inference is delivered while there is nothing else to do, and before the thread is done
with a run. Training comes first: an order ends a delivery, which is tried again later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Condition

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import DataError
from edge_sdk.data.source import SampleSource, describe_read
from edge_sdk.decide.decision import Code
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.delivering import Delivering
from edge_sdk.device.service.participation import CONVERTED, Sent, TakingPart, load_task
from edge_sdk.device.stores import pause, slot
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import Logbook
from edge_sdk.device.stores.movements import DeviceFolder
from edge_sdk.device.stores.slot import Seat
from edge_sdk.device.transfer.fetching import Fetcher, FetchError, PulledModel
from edge_sdk.machine.snapshot import Probe
from edge_sdk.program.logs import fact
from edge_sdk.protocol.messages.delivery import ModelNotice, canary_draw
from edge_sdk.protocol.messages.round import Assignment, Bid, Receipt, RoundClosed, RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.transfer import TaskNotice
from edge_sdk.protocol.task.graphs import Manifest

log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds until a task that did not come is fetched again, and a bid without answer repeated."""
MAX_RETRY_S = 60.0
"""Most seconds between two bids for one round: the device may not have been picked."""
QUIET_S = 5.0
"""Seconds without an order after which a device that is idle may measure its costs again."""
REST_S = 60.0
"""Seconds without an order after which what rounds taught of costs is written."""
DELIVERY_S = 60.0
"""Least seconds between two deliveries while a run goes on."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The link is up again."""


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The coordinator was started again."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """An offer without an assignment is to be withdrawn."""

    reason: str
    code: Code


Order = (
    TaskNotice
    | RoundOpen
    | Assignment
    | Receipt
    | RoundClosed
    | Survey
    | ModelNotice
    | Reconnected
    | CoordinatorStarted
    | GiveUp
)
"""A message from the loop to the training thread."""


@dataclass(frozen=True, slots=True)
class Over:
    """The training thread has finished this run."""

    run: str


@dataclass(frozen=True, slots=True)
class NewRun:
    """The training thread turns to another run."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The training thread cannot go on."""

    error: Exception


Told = Sent | Over | NewRun | Broken
"""A message from the training thread to the loop, which publishes and uploads what is `Sent`."""


class Orders:
    """Orders for the training thread, in the order they came.

    A round or a survey is left out when a newer round of its run waits behind it: a device that was
    busy answers the present round, not the ones it missed. Of models for inference, only the newest
    is here, beside all orders.
    """

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self.model: ModelNotice | None = None
        """The newest model for inference."""
        self.trial: ModelNotice | None = None
        """The newest model that some devices try."""
        self._renewed = False
        self._changed = Condition()
        self._closed = False

    def put(self, order: Order) -> None:
        """Add an order."""
        with self._changed:
            if isinstance(order, ModelNotice):
                if order.canary is None:
                    self.model = order
                else:
                    self.trial = order
                self._renewed = True
            else:
                self._orders.append(order)
            self._changed.notify()

    @property
    def waits(self) -> bool:
        """True if an order is to be taken, or none will come any more."""
        with self._changed:
            return self._closed or bool(self._orders)

    def overtakes(self, run: str, round: int) -> bool:
        """Tell if a newer round of this run, its end, or another run waits."""
        with self._changed:
            return any(
                (isinstance(each, TaskNotice) and each.run != run)
                or (isinstance(each, RoundClosed) and each.run == run and each.round >= round)
                for each in self._orders
            ) or self._newer_waits(run, round)

    def replaces(self, run: str) -> bool:
        """Tell if another run waits."""
        with self._changed:
            return any(isinstance(each, TaskNotice) and each.run != run for each in self._orders)

    def close(self) -> None:
        """Drop all orders but receipts, and let `get` end when these are taken."""
        with self._changed:
            self._closed = True
            self._orders = deque(each for each in self._orders if isinstance(each, Receipt))
            self._changed.notify()

    def get(self, timeout_s: float | None) -> Order | None:
        """Return the next order; None after `timeout_s` without one, or for a new model.

        Raises `EOFError` when there is none and the inbox is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._renewed or bool(self._orders), timeout_s
            )
            self._renewed = False
            while self._orders:
                order = self._orders.popleft()
                if not isinstance(order, RoundOpen | Survey) or not self._newer_waits(
                    order.run, order.round
                ):
                    return order
            if self._closed:
                raise EOFError
            return None

    def _newer_waits(self, run: str, round: int) -> bool:
        return any(
            isinstance(each, RoundOpen) and each.run == run and each.round > round
            for each in self._orders
        )


class Training:
    """Takes part in one run after the other, by the orders of an inbox."""

    def __init__(
        self,
        config: DeviceConfig,
        source: SampleSource,
        folder: DeviceFolder,
        fetcher: Fetcher,
        inbox: Orders,
        *,
        tell: Callable[[Told], None],
        is_over: Callable[[str], bool],
        clock: Callable[[], float],
        household: Household,
        book: Logbook,
        probe: Probe | None = None,
    ) -> None:
        """`tell` puts into the loop's queue. `is_over` tells if a run is finished, or the device
        told to stop. `household` is what the device's tasks share, and `book` takes notes for its
        owner. `probe` None: this machine's sensors.
        """
        self._config = config
        self._source = source
        self._folder = folder
        self._fetcher = fetcher
        self._inbox = inbox
        self._tell = tell
        self._is_over = is_over
        self._clock = clock
        self._probe = probe
        self._household, self._book = household, book
        self._seat: Seat | None = None
        if household.slot is not None:
            lost = partial(inbox.put, GiveUp(slot.ANOTHER, "task"))
            self._seat = household.slot.seat(config.task, lost)
        self._retry_at = 0.0
        self._bid_at = 0.0
        self._bid_wait_s = RETRY_S
        self._notice: TaskNotice | None = None
        """The task to fetch; None: it is here."""
        self._part: TakingPart | None = None
        self._opened: RoundOpen | None = None
        """The round heard of last, new or not, perhaps of a run that is not announced yet."""
        self._closed: RoundClosed | None = None
        """The end of a run, perhaps of one that is not announced yet."""
        self._survey: Survey | None = None
        """The newest survey, perhaps of a run that is not announced yet."""
        self._delivering: Delivering | None = None
        self._deliver_at = 0.0

    def run(self) -> None:
        """Follow orders until the inbox is closed, or until an error that no retry can mend."""
        try:
            if self._config.deliver != "off":
                self._delivering = Delivering(
                    self._folder.path,
                    most=self._config.policy.level,
                    margin=self._config.deliver_margin,
                )
            while True:
                self._next()
        except EOFError:
            return
        except Exception as error:
            self._tell(Broken(error))
        finally:
            self._leave()
            if self._seat is not None:
                self._seat.leave()

    def _next(self) -> None:
        order = self._inbox.get(0)
        if order is None:
            self._guarded(self._idle)
            order = self._inbox.get(self._patience_s())
        match order:
            case None:
                self._repeat_bid()
                self._renew_costs()
                self._keep_costs()
            case TaskNotice():
                if self._part is None or self._part.notice != order:
                    self._notice, self._retry_at = order, self._clock()
            case _:
                self._guarded(lambda: self._receive(order))
        if self._notice is not None and self._clock() >= self._retry_at:
            self._join(self._notice)

    def _patience_s(self) -> float | None:
        """Return the seconds to wait for an order; None: for ever."""
        if self._notice is not None:
            return RETRY_S
        if self._part is not None and self._part.awaits_assignment:
            return max(0.0, self._bid_at - self._clock())
        if self._part is not None and self._part.is_held_back:
            return RETRY_S  # nothing tells when that is over
        waits_s = [QUIET_S] if self._costs_are_off else []
        if self._part is not None and not self._part.costs_are_kept:
            waits_s.append(REST_S)
        if self._offered is not None:
            waits_s.append(max(0.0, self._deliver_at - self._clock()))
        return min(waits_s, default=None)

    @property
    def _costs_are_off(self) -> bool:
        part = self._part
        return part is not None and part.is_idle and not part.is_held_back and part.costs_are_off

    def _renew_costs(self) -> None:
        """Measure costs again where that is due: nobody has asked for anything for a while."""
        part = self._part
        if part is not None and self._costs_are_off:
            self._guarded(lambda: part.renew_costs(lambda: self._inbox.waits))

    def _keep_costs(self) -> None:
        """Write what rounds taught of costs, unless that was just done: the device rests."""
        part = self._part
        if part is not None:
            self._guarded(part.keep_costs)

    def _leave(self) -> None:
        """End this device's part in its run."""
        part, self._part = self._part, None
        if part is not None:
            self._guarded(lambda: part.keep_costs(always=True))

    def _repeat_bid(self) -> None:
        part = self._part
        if part is not None and part.awaits_assignment and self._clock() >= self._bid_at:
            wait_s = min(2 * self._bid_wait_s, MAX_RETRY_S)
            self._guarded(part.repeat_bid)
            self._bid_wait_s, self._bid_at = wait_s, self._clock() + wait_s

    def _guarded(self, work: Callable[[], list[Sent]]) -> None:
        """Do the work and hand on what it sends; no error of one message ends the device."""
        try:
            for message in work():
                if isinstance(message, Bid):
                    self._bid_wait_s, self._bid_at = RETRY_S, self._clock() + RETRY_S
                self._tell(message)
        except Exception:
            log.exception("unexpected error; the device goes on with the next message")

    def _idle(self) -> list[Sent]:
        if self._part is None or self._part.is_held_back:
            return []
        sent = self._part.evaluate_if_due()
        ignored = self._part.awaits_assignment and self._bid_wait_s > RETRY_S
        if (self._part.is_idle or ignored) and self._clock() >= self._deliver_at:
            self._deliver(lambda: self._inbox.waits)
        return sent

    @property
    def _offered(self) -> ModelNotice | None:
        """The model to deliver; None: there is none of this run, or it is here."""
        if self._part is None or self._delivering is None:
            return None
        run, model = self._part.notice.run, self._inbox.model
        trial = self._trial
        if trial is not None and self._delivering.is_due(trial):
            return trial
        if trial is not None and self._delivering.has(trial):
            return None  # it is here, and not the promoted one
        same = model is not None and model.run == run
        return model if same and self._delivering.is_due(model) else None

    @property
    def _trial(self) -> ModelNotice | None:
        """The model that this device tries with others; None: there is none of this run."""
        trial, model, name = self._inbox.trial, self._inbox.model, self._config.name
        if self._part is None or trial is None or trial.run != self._part.notice.run:
            return None
        if model is not None and model.run == trial.run and trial.round <= model.decided:
            return None  # it was promoted, or rolled back
        drawn = canary_draw(trial.run, name, trial.round) < (trial.canary or 0.0)
        return trial if drawn else None

    def _answer(self) -> list[Sent]:
        """Return this device's answer to the trial that goes on, if it has one."""
        trial, tried = self._trial, self._delivering and self._delivering.tried
        if trial is None or not tried or (tried.run, tried.round) != (trial.run, trial.round):
            return []
        return [tried.evaluation(self._config.name)]

    def _deliver(self, should_stop: Callable[[], bool]) -> None:
        """Deliver the model that is offered, if any; what fails is tried again later."""
        notice, part, delivering = self._offered, self._part, self._delivering
        if notice is None or part is None or delivering is None:
            return
        wait_s = DELIVERY_S
        try:
            if not part.deliver(delivering, notice, should_stop):
                wait_s = RETRY_S
            elif notice.canary is not None:
                for answer in self._answer():
                    self._tell(answer)
        except OSError as error:
            log.error("cannot keep the model: %s", error, extra=fact("disk"))
        except Exception:
            log.exception("unexpected error; the model is delivered later")
        finally:
            self._deliver_at = self._clock() + wait_s

    def _join(self, notice: TaskNotice) -> None:
        """Fetch the task and take part; an error that may pass is retried later."""
        if self._part is None or self._part.notice.run != notice.run:
            self._tell(NewRun())
        if self._seat is not None:
            self._seat.release()  # an offer of the part that is left
        self._leave()
        try:
            folder = self._folder.start_run(notice.run)
            task = load_task(notice, self._config, self._fetcher.fetch_blob)
            data, unfit = self._read_data(task.manifest)
            # It measures what levels cost, if no other task trains; else when a round opens.
            with nullcontext() if self._seat is None else self._seat.occupied():
                part = TakingPart(
                    notice,
                    self._config,
                    data,
                    task=task,
                    model=PulledModel(
                        task.backend.plan,
                        self._fetcher,
                        overtaken=partial(self._is_useless, notice.run),
                    ),
                    folder=folder,
                    state=self._folder.path,
                    probe=self._probe,
                    fetch=self._fetcher.fetch_blob,
                    household=self._household,
                    book=self._book,
                    seat=self._seat,
                    overtaken=partial(self._inbox.overtakes, notice.run),
                    unfit=unfit,
                    should_stop=partial(self._is_left, notice.run),
                )
        except (FetchError, OSError) as error:
            extra = fact("no_task", run=notice.run)
            log.warning("cannot get the task; trying again: %s", error, extra=extra)
            self._retry_at = self._clock() + RETRY_S
            return
        self._notice = None
        log.info("%s", part.describe(), extra=fact("task", run=notice.run))
        if part.unfit is not None:
            if not self._config.stay:
                raise DataError(f"the data does not fit the task: {part.unfit}")
            log.error("the data does not fit the task, so every round is skipped: %s", part.unfit)
        self._part = part
        self._guarded(part.resume)
        for message in (self._opened, self._survey, self._closed):
            if message is not None and message.run == notice.run:
                self._guarded(partial(self._receive, message))

    def _is_left(self, run: str) -> bool:
        """Tell if this run is over, or another one waits."""
        return self._is_over(run) or self._inbox.replaces(run)

    def _is_useless(self, run: str, round: int) -> bool:
        """Tell if the model of a round is useless by now."""
        return self._household.pause.active or self._inbox.overtakes(run, round)

    def _read_data(self, manifest: Manifest) -> tuple[ArrayData, str | None]:
        """Return the samples in the task's form, and why they do not fit it; None: they do.

        Raises `DataError` if they do not, unless the device stays for the next run.
        """
        spec, config = manifest.data, self._config
        try:
            read = self._source.read(
                spec,
                cache=self._folder.path / CONVERTED,
                limit_bytes=None if config.data_mb is None else config.data_mb * 2**20,
            )
        except DataError as error:
            if not config.stay:
                raise DataError(f"the data does not fit the task: {error}") from error
            nothing = [
                np.zeros((0, *each.shape), each.dtype) for each in (*spec.inputs, spec.targets)
            ]
            return ArrayData(tuple(nothing[:-1]), nothing[-1]), str(error)
        log.info("data: %s", describe_read(read, spec), extra=fact("data", samples=len(read.data)))
        for note in read.notes:
            log.info("data: %s", note, extra=fact("data_note"))
        for warning in read.warnings:
            log.warning("data: %s", warning, extra=fact("data_warning"))
        return read.data, None

    def _deliver_last(self, run: str) -> None:
        """Deliver the last model of a run, and say so if there is none.

        Not while the device is paused: then its next start, or its rest (`stay`), does it.
        """
        paused = self._household.pause
        if not paused.active:
            self._deliver(lambda: self._inbox.replaces(run) or self._is_over("") or paused.active)
        kept, choice = self._delivering, self._config.deliver
        if kept is not None and not kept.path.exists():
            unmeasured = choice == "best" and self._inbox.model is None
            why = ": the coordinator measures no accuracy" if unmeasured else ""
            why = f": {pause.REASON}" if paused.active else why
            log.warning(
                "the run is over, and no %s model was delivered%s", choice, why, extra=fact("model")
            )

    def _receive(self, order: Order) -> list[Sent]:
        part = self._part
        match order:
            case RoundOpen():
                known = self._opened and (self._opened.run, self._opened.round)
                if not order.by_invitation or known != (order.run, order.round):
                    self._opened = order  # else the invitation to this round may be here already
            case RoundClosed():
                self._closed = order
            case Survey():
                self._survey = order
        if part is None:
            return []
        match order:
            case Reconnected():
                return [*part.repeat_bid(), *self._answer()]
            case GiveUp(reason, code):
                if code == "task" and self._seat is not None and self._seat.holds:
                    return []  # the offer that was lost is gone, and this one is a later round's
                return part.withdraw(reason, code)
            case CoordinatorStarted():
                opened = self._opened
                same = opened is not None and opened.run == part.notice.run
                return [*part.start_over(opened if same else None), *self._answer()]
            case RoundOpen() | Assignment() | Receipt() | RoundClosed() | Survey():
                if order.run == part.notice.run:
                    sent = part.receive(order)
                    if isinstance(order, RoundClosed) and self._is_over(order.run):
                        self._deliver_last(order.run)
                        self._tell(Over(order.run))
                    return sent
        return []
