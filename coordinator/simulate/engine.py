"""The engine of `serve` in virtual time: a coordinator, and devices of any make.

The courses that `serve` runs over a broker run here with a store in RAM, an outlet that hands the
model directly to devices, and a heap of events in place of a link. When no message is left, time
jumps to the next deadline.

`VirtualDevice` is all that the engine asks of a device: `Federation` gives it whole apps, a
simulated fleet gives it a few hundred bytes each (`fleet/device.py`). Both run the device's own
state machine, so stragglers, deadlines, quorum and fragments behave as they do over a broker.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from typing import Protocol

from coordinator.aggregate.pairings import horizon_advice
from coordinator.errors import CoordinatorError
from coordinator.rounds import events
from coordinator.rounds.config import RunConfig
from coordinator.rounds.report import RoundReport
from coordinator.rounds.state import RoundsConfig
from coordinator.service.courses.fragments import FragmentsCourse
from coordinator.service.courses.parts import Said
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.simulate.ram import DirectOutlet, RunInRam
from coordinator.simulate.timeline import Happening, Timeline
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Movement,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding

COORDINATOR = "coordinator"

MAX_IDLE = 1000
"""Deadlines without messages or a new model after which an impatient run gives up."""
MOST_EXCUSES = 10
"""Devices whose reasons are named when a run gives up."""

log = logging.getLogger(__name__)

Told = RoundOpen | Assignment | Receipt | RoundClosed | Survey
"""Messages to devices."""
Sent = Bid | SurveyFinding | Movement | Replay | events.Joined | events.Left
"""Messages of devices, and their coming and going."""
Course = RoundsCourse | FragmentsCourse


def warn_of_horizon(config: RunConfig, policies: Iterable[Policy], devices: int) -> None:
    """Log a warning if devices of these policies train too rarely for the rule's horizon."""
    wanted = config.participants if isinstance(config, RoundsConfig) else None
    asked = min(1.0, wanted / devices) if wanted is not None else 1.0
    shares = ((each.participation, each.schedule == "round-robin") for each in policies)
    if (said := horizon_advice(config.rule, shares, asked)) is not None:
        log.warning("%s", said)


class VirtualDevice(Protocol):
    """A device as the engine sees it. Times are virtual seconds since the run began."""

    @property
    def number(self) -> int:
        """Place among the devices: messages of one time are processed in this order."""

    @property
    def name(self) -> str:
        """Name, unique in the run."""

    @property
    def awake(self) -> bool:
        """True if the device ever received a message."""

    @property
    def latency_s(self) -> float:
        """Latency of a message, in seconds."""

    @property
    def busy_until_s(self) -> float:
        """Time when the device can process a message."""

    def intervals(self) -> Iterable[tuple[float, float]]:
        """Times (from, to) when the device is present, in order; they do not overlap."""

    def wake(self) -> object:
        """Make what the device needs to process messages."""

    def receive(self, message: Told, now_s: float) -> list[Sent]:
        """Process a message that arrives now and return the messages it sends."""

    def connected(self, now_s: float) -> list[Sent]:
        """Return the messages without a receipt, which the device sends when it is back."""

    def arrival_s(self, message: Sent, now_s: float) -> float:
        """Time when a message from the device reaches the coordinator."""


class VirtualRun:
    """One run in virtual time; `run` goes through it once."""

    def __init__(
        self,
        start: Callable[[float], Course],
        store: RunInRam,
        outlet: DirectOutlet,
        devices: Mapping[str, VirtualDevice],
        *,
        threads: int = 1,
        patience_s: float = 0.0,
    ) -> None:
        """`start` makes the course at a time, with this store and outlet.

        A run gives up if its model has not changed for `patience_s` virtual seconds; 0: for
        `MAX_IDLE` deadlines. `threads` are those in which devices process messages; the result does
        not depend on it.
        """
        self._start = start
        self._store = store
        self._outlet = outlet
        self._devices = devices
        self._threads = threads
        self._patience_s = patience_s
        self._timeline: Timeline[Told | Sent] = Timeline()
        self._present: dict[str, VirtualDevice] = {}
        self._presence: dict[str, tuple[float, Iterator[tuple[float, float]]]] = {}
        """When a device leaves, and the intervals of its presence after that."""
        self._pool: ThreadPoolExecutor | None = None
        self._idle = 0
        self._changed_s = 0.0
        """When the model last changed."""
        self._asks_all = True
        """False if the newest round is by invitation."""
        self.now_s = 0.0
        """Virtual seconds since the run began."""
        self.course: Course | None = None
        """The course, once `run` has started."""

    def run(self) -> Iterator[RoundReport]:
        """Train to the end, yielding every round as it closes.

        Raises `CoordinatorError` if the run makes no progress.
        """
        with ExitStack() as stack:
            self.course = course = self._start(self.now_s)
            stack.callback(course.kill)
            # Objects that are there already live on; looking for garbage among them takes time.
            gc.freeze()
            stack.callback(gc.unfreeze)
            if self._threads > 1:
                self._pool = stack.enter_context(ThreadPoolExecutor(self._threads))
            for device in self._devices.values():
                self._schedule(device.name, iter(device.intervals()))
            while not course.finished:
                version = self._outlet.version
                self._step(course)
                if self._outlet.version != version:
                    self._idle, self._changed_s = 0, self.now_s
                reports, self._store.reports = self._store.reports, []
                yield from reports

    def _schedule(self, name: str, intervals: Iterator[tuple[float, float]]) -> None:
        """Note when a device is there next; what comes after is asked for when it leaves."""
        start, end = next(intervals, (inf, inf))
        if start < inf:
            self._timeline.add(start, COORDINATOR, events.Joined(name))
        if end < inf:
            self._timeline.add(end, COORDINATOR, events.Left(name))
            self._presence[name] = (end, intervals)

    # -- time -------------------------------------------------------------------------------

    def _step(self, course: Course) -> None:
        """Process the next messages or the next deadline."""
        due = inf if course.deadline is None else course.deadline
        next_s = self._timeline.next_s
        if next_s is None or due < next_s:
            self._wait(course, due, next_s)
            return
        batch = self._timeline.take(alone=COORDINATOR, until_s=due)
        if batch[0].to == COORDINATOR:
            self.now_s = max(self.now_s, batch[0].time_s)
            self._hear(course, batch[0].message)
        else:
            self._deliver(course, batch)

    def _wait(self, course: Course, due: float, next_s: float | None) -> None:
        if next_s is None:
            self._idle += 1
        tired = self._idle > MAX_IDLE
        if self._patience_s:
            tired = self.now_s - self._changed_s >= self._patience_s
        if due == inf or tired:
            raise self._stuck(course)
        self.now_s = max(self.now_s, due)
        self._say(course, course.handle(events.Tick(), self.now_s))

    def _stuck(self, course: Course) -> CoordinatorError:
        excuses = sorted(course.excuses().items())
        said = "; ".join(f"{name}: {reason}" for name, reason in excuses[:MOST_EXCUSES])
        if len(excuses) > MOST_EXCUSES:
            said += f"; and {len(excuses) - MOST_EXCUSES} more"
        return CoordinatorError(f"no device has trained for too long: {said or 'no answers'}")

    # -- the coordinator --------------------------------------------------------------------

    def _hear(self, course: Course, message: Told | Sent) -> None:
        match message:
            case events.Joined(name):
                device = self._devices[name]
                self._present[name] = device
                self._say(course, course.handle(message, self.now_s))
                if device.awake:
                    self._say(course, course.say_again(name))
                    self._send(device, device.connected(self.now_s))
            case events.Left(name):
                self._present.pop(name, None)
                self._say(course, course.handle(message, self.now_s))
                end, later = self._presence.get(name, (inf, iter(())))
                if self.now_s >= end:  # else it dropped out
                    del self._presence[name]
                    self._schedule(name, later)
            case Bid() | Movement() | Replay() | SurveyFinding():
                sender = message.movement.device if isinstance(message, Replay) else message.device
                if sender in self._present:  # otherwise it sends it again when it returns
                    self._say(course, course.handle(message, self.now_s))

    def _say(self, course: Course, said: list[Said]) -> None:
        for each in [*said, *course.proceed(self.now_s)]:
            match each:
                case events.Broadcast(message):
                    if isinstance(message, RoundOpen):
                        self._asks_all = not message.by_invitation
                    if not self._asks_all and not isinstance(message, Survey):
                        continue  # invited devices get openings of their own; others do nothing
                    for device in self._present.values():
                        self._timeline.add(self.now_s + device.latency_s, device.name, message)
                case events.Send(name, message):
                    if isinstance(message, Assignment):
                        self._outlet.assigned(message)
                    latency_s = self._devices[name].latency_s
                    self._timeline.add(self.now_s + latency_s, name, message)

    # -- devices ----------------------------------------------------------------------------

    def _deliver(self, course: Course, batch: list[Happening[Told | Sent]]) -> None:
        """Let devices process messages, in parallel if there are several threads."""
        work: list[tuple[VirtualDevice, Told, float]] = []
        for each in batch:
            time_s, name, message = each.time_s, each.to, each.message
            device = self._present.get(name)
            if device is None and isinstance(message, Assignment):
                self._outlet.lost(message)
            if device is None or not isinstance(message, Told):
                continue  # messages to an absent device are lost
            if isinstance(message, Survey) and not course.surveying.asks(message):
                continue  # a newer message overtakes it
            if device.busy_until_s > time_s:
                self._timeline.add(device.busy_until_s, name, message)
                continue
            device.wake()  # in this thread: apps cannot be made in several threads at once
            work.append((device, message, time_s))
        if self._pool is None:
            sent = [(device, device.receive(message, at)) for device, message, at in work]
        else:
            futures = [
                (device, self._pool.submit(device.receive, message, at))
                for device, message, at in work
            ]
            sent = [(device, future.result()) for device, future in futures]
        for device, messages in sorted(sent, key=lambda each: each[0].number):
            self._send(device, messages)

    def _send(self, device: VirtualDevice, messages: list[Sent]) -> None:
        for message in messages:
            self._timeline.add(device.arrival_s(message, self.now_s), COORDINATOR, message)
