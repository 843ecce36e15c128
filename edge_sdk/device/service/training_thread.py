"""The thread of a device that fetches and trains. Orders come in through an inbox, one by one;
everything it makes goes to the loop through one queue.

It follows the run that the newest notice announces, and remembers a round, or the end of a run,
that was heard of before its notice. A task that does not come is fetched again, and a bid without
an answer is repeated. A message that fails is logged and skipped. An error that no retry can mend
is told to the loop (`Broken`), which ends.

While it fetches or trains, orders wait, but it looks at them: another run ends this run's training,
and a newer round ends a fetch for an older one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Condition

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.folder import DataError
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.participation import Sent, TakingPart, load_task
from edge_sdk.device.stores.movements import DeviceFolder
from edge_sdk.device.transfer.fetching import Fetcher, FetchError, PulledModel
from edge_sdk.machine.snapshot import Probe
from edge_sdk.program.logs import fact
from edge_sdk.protocol.messages.round import Assignment, Bid, Receipt, RoundClosed, RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.transfer import TaskNotice

log = logging.getLogger(__name__)

RETRY_S = 10.0
"""Seconds until a task that did not come is fetched again, and a bid without answer repeated."""
MAX_RETRY_S = 60.0
"""Most seconds between two bids for one round: the device may not have been picked."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The link is up again."""


@dataclass(frozen=True, slots=True)
class CoordinatorStarted:
    """The coordinator was started again."""


Order = (
    TaskNotice
    | RoundOpen
    | Assignment
    | Receipt
    | RoundClosed
    | Survey
    | Reconnected
    | CoordinatorStarted
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
    busy answers the present round, not the ones it missed.
    """

    def __init__(self) -> None:
        self._orders: deque[Order] = deque()
        self._changed = Condition()
        self._closed = False

    def put(self, order: Order) -> None:
        """Add an order."""
        with self._changed:
            self._orders.append(order)
            self._changed.notify()

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
        """Return the next order; None after `timeout_s` without one.

        Raises `EOFError` when there is none and the inbox is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._orders), timeout_s)
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
        data: ArrayData,
        folder: DeviceFolder,
        fetcher: Fetcher,
        inbox: Orders,
        *,
        tell: Callable[[Told], None],
        is_over: Callable[[str], bool],
        clock: Callable[[], float],
        probe: Probe | None = None,
    ) -> None:
        """`tell` puts into the loop's queue. `is_over` tells if a run is finished, or the device
        told to stop. `probe` None: this machine's sensors.
        """
        self._config = config
        self._data = data
        self._folder = folder
        self._fetcher = fetcher
        self._inbox = inbox
        self._tell = tell
        self._is_over = is_over
        self._clock = clock
        self._probe = probe
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

    def run(self) -> None:
        """Follow orders until the inbox is closed, or until an error that no retry can mend."""
        try:
            while True:
                self._next()
        except EOFError:
            return
        except Exception as error:
            self._tell(Broken(error))

    def _next(self) -> None:
        order = self._inbox.get(0)
        if order is None:
            self._guarded(self._idle)
            order = self._inbox.get(self._patience_s())
        match order:
            case None:
                self._repeat_bid()
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
        return None

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
        return [] if self._part is None else self._part.evaluate_if_due()

    def _join(self, notice: TaskNotice) -> None:
        """Fetch the task and take part; an error that may pass is retried later."""
        if self._part is None or self._part.notice.run != notice.run:
            self._tell(NewRun())
        self._part = None
        try:
            folder = self._folder.start_run(notice.run)
            task = load_task(notice, self._config, self._fetcher.fetch_blob)
            part = TakingPart(
                notice,
                self._config,
                self._data,
                task=task,
                model=PulledModel(
                    task.backend.plan,
                    self._fetcher,
                    overtaken=partial(self._inbox.overtakes, notice.run),
                ),
                folder=folder,
                state=self._folder.path,
                probe=self._probe,
                fetch=self._fetcher.fetch_blob,
                overtaken=partial(self._inbox.overtakes, notice.run),
                should_stop=lambda: self._is_over(notice.run) or self._inbox.replaces(notice.run),
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
                reason = part.unfit.removeprefix("skip: ")
                raise DataError(f"the data does not fit the task: {reason}")
            log.error("the data does not fit the task, so every round is skipped: %s", part.unfit)
        self._part = part
        self._guarded(part.resume)
        for message in (self._opened, self._survey, self._closed):
            if message is not None and message.run == notice.run:
                self._guarded(partial(self._receive, message))

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
                return part.repeat_bid()
            case CoordinatorStarted():
                opened = self._opened
                same = opened is not None and opened.run == part.notice.run
                return part.start_over(opened if same else None)
            case RoundOpen() | Assignment() | Receipt() | RoundClosed() | Survey():
                if order.run == part.notice.run:
                    sent = part.receive(order)
                    if isinstance(order, RoundClosed) and self._is_over(order.run):
                        self._tell(Over(order.run))
                    return sent
        return []
