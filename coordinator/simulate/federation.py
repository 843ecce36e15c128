"""A whole federation in one process: the real state machines over the in-memory link.

There is no second implementation for simulation: what runs here is what runs
over MQTT, with a queue for a broker and a virtual clock. Devices may train in several threads; what
they send is queued in the order in which they were told, so the result does not depend on it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.memory import Dtype, Memory
from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.rounds import events, fragments
from coordinator.rounds import synchronous as rounds
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState, Stage
from coordinator.rounds.report import DeviceRound, RoundReport
from coordinator.rounds.synchronous import RoundPhase, RoundsConfig, RoundsState
from coordinator.service.close import close_round, open_memory
from coordinator.service.reports import report_round, report_updates
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.decide.observer import Observer
from edge_sdk.device.app import DeviceApp
from edge_sdk.protocol.messages.round import Bid, Message, Movement, Replay, RoundOpen
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Backend, Job, Trained
from edge_sdk.transport.queue import MemoryLink

__all__ = ["DeviceRound", "Federation", "Member", "RoundReport"]

COORDINATOR = "coordinator"

MAX_IDLE = 1000
"""Waits without an update before an asynchronous run gives up."""


@dataclass(frozen=True, slots=True)
class Member:
    """A device of the federation."""

    name: str
    policy: Policy
    data: ArrayData
    emulation: Emulation | None = None
    """The device it pretends to be; None: this machine."""
    observe: Callable[[Backend], Observer] | None = None
    """Makes what it sees itself with, given its backend; None: it weighs nothing."""


class Federation:
    """A coordinator and its devices. `run` trains; `model` is the result so far."""

    def __init__(
        self,
        config: RoundsConfig | FragmentsConfig,
        model: GlobalModel,
        make_backend: Callable[[], Backend],
        members: Sequence[Member],
        *,
        threads: int = 1,
        memory_dir: Path | None = None,
        memory_dtype: Dtype = "fp32",
    ) -> None:
        """`make_backend` is called once for each of the `threads` that devices train in.

        `memory_dir`: where the rule's memory is kept; None: in RAM.
        """
        if config.min_devices > len(members):
            raise ConfigError(
                f"min_devices is {config.min_devices} but there are {len(members)} members"
            )
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, not {threads}")
        self.model = model
        self._members = members
        self._threads = threads
        self._link: MemoryLink[Message] = MemoryLink()
        self._outboxes: dict[str, list[Message]] = {member.name: [] for member in members}
        backend = _PerThread(config.plan, make_backend)
        if isinstance(config, RoundsConfig):
            self._course: _Rounds | _Fragments = _Rounds(
                config, model, self._link, memory_dir, memory_dtype, threads, len(members)
            )
        else:
            self._course = _Fragments(config, model, self._link, len(members))
        self._link.attach(COORDINATOR, self._receive)
        for member in members:
            own: Backend = backend
            if member.emulation is not None:
                own = member.emulation.emulated(backend)
            app = DeviceApp(
                member.name,
                backend=own,
                data=member.data,
                policy=member.policy,
                source=model,
                seed=config.seed,
                observer=None if member.observe is None else member.observe(own),
                clock=time.perf_counter if member.emulation is None else member.emulation.clock,
            )
            outbox = self._outboxes[member.name]
            self._link.attach(member.name, partial(_tell, app, member.emulation, outbox))

    def run(self) -> Iterator[RoundReport]:
        """Train to the end, yielding every round as it closes.

        An asynchronous run reports after as many updates as there are devices.
        """
        course = self._course
        with ExitStack() as stack:
            course.open()
            stack.callback(course.close)
            deliver = _one_by_one
            if self._threads > 1:
                pool = stack.enter_context(ThreadPoolExecutor(self._threads))
                deliver = partial(_together, pool)
            for member in self._members:
                course.handle(events.Joined(member.name))
            while not course.finished:
                if self._link.empty:
                    course.wait()  # Nobody has anything to say any more: let the deadline come.
                deliver(self._link.take(alone=COORDINATOR))
                for member in self._members:
                    outbox = self._outboxes[member.name]
                    for message in outbox:
                        self._link.send(COORDINATOR, message)
                    outbox.clear()
                yield from course.reports
                course.reports.clear()

    def _receive(self, message: Message) -> None:
        if isinstance(message, (Bid, Movement, Replay)):
            self._course.handle(message)


def _tell(
    app: DeviceApp, emulation: Emulation | None, outbox: list[Message], message: Message
) -> None:
    if emulation is not None and isinstance(message, RoundOpen):
        emulation.round_opened(message.round)
    outbox += app.receive(message)  # type: ignore[arg-type]


def _one_by_one(deliveries: Iterable[Callable[[], None]]) -> None:
    for deliver in deliveries:
        deliver()


def _together(pool: ThreadPoolExecutor, deliveries: Iterable[Callable[[], None]]) -> None:
    for done in [pool.submit(deliver) for deliver in deliveries]:
        done.result()


class _PerThread:
    """A backend that is one backend for each thread that uses it."""

    def __init__(self, plan: ModelPlan, make: Callable[[], Backend]) -> None:
        self.plan = plan
        self._make = make
        self._local = threading.local()
        self._spare: list[Backend] = []

    @property
    def data(self) -> DataSpec | None:
        if not self._spare:
            self._spare.append(self._make())
        return self._spare[0].data

    def train(
        self,
        job: Job,
        batches: Iterable[Batch],
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trained:
        return self._here().train(job, batches, should_stop=should_stop)

    def _here(self) -> Backend:
        backend: Backend | None = getattr(self._local, "backend", None)
        if backend is None:
            try:
                backend = self._spare.pop()
            except IndexError:
                backend = self._make()
            self._local.backend = backend
        return backend


class _Rounds:
    """The synchronous machine and what performs its effects."""

    def __init__(
        self,
        config: RoundsConfig,
        model: GlobalModel,
        link: MemoryLink[Message],
        memory_dir: Path | None,
        memory_dtype: Dtype,
        threads: int,
        devices: int,
    ) -> None:
        self.reports: list[RoundReport] = []
        self._config = config
        self._model = model
        self._link = link
        self._threads = threads
        self._open_memory = partial(
            open_memory, config, memory_dir, dtype=memory_dtype, threads=threads, devices=devices
        )
        self._memory: Memory | None = None
        self._norms = model.norms
        self._state: RoundsState = rounds.start(config, self._norms)
        self._arrivals: dict[tuple[str, int], Arrival] = {}
        self._now = 0.0
        self._started = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self._state.phase is RoundPhase.FINISHED

    def wait(self) -> None:
        self._now = max(self._now, self._state.deadline or self._now)
        self.handle(events.Tick())

    def open(self) -> None:
        self._memory = self._open_memory()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    def handle(self, event: rounds.Event) -> None:
        pending = [event]
        while pending:
            self._state, effects = rounds.handle(
                self._config, self._state, pending.pop(0), self._now
            )
            for effect in effects:
                pending += self._perform(effect)

    def _perform(self, effect: rounds.Effect) -> list[rounds.Event]:
        match effect:
            case events.Broadcast(message):
                self._model.serve()  # once, before devices ask for it from several threads
                self._link.broadcast(COORDINATOR, message)
            case events.Send(device, message):
                self._link.send(device, message)
            case events.Keep(round, arrival):
                device = arrival.contribution.device
                self._arrivals[device, round] = arrival
                return [events.Kept(device, round)]
            case rounds.Commit():
                self._commit(effect)
                return [rounds.Committed(effect.round, self._norms)]
        return []

    def _commit(self, commit: rounds.Commit) -> None:
        noise = self._model.noise
        close_round(
            self._config,
            self._state,
            commit,
            self._model,
            self._memory,
            self._arrivals,
            threads=self._threads,
        )
        self.reports.append(self._report(commit, noise))
        self._norms = self._model.norms
        self._arrivals.clear()
        self._model.fetched.clear()

    def _report(self, commit: rounds.Commit, noise: float) -> RoundReport:
        now = time.perf_counter()
        took, self._started = now - self._started, now
        return report_round(
            self._config,
            self._state,
            commit,
            self._arrivals,
            self._memory,
            norms=self._norms,
            noise=noise,
            fetched={device: size for (device, _), size in self._model.fetched.items()},
            seconds=took,
        )


class _Fragments:
    """The asynchronous machine and what performs its effects."""

    def __init__(
        self,
        config: FragmentsConfig,
        model: GlobalModel,
        link: MemoryLink[Message],
        report_every: int,
    ) -> None:
        self.reports: list[RoundReport] = []
        self._config = config
        self._model = model
        self._link = link
        self._report_every = report_every
        self._state: FragmentsState = fragments.start(config)
        self._arrivals: dict[str, Arrival] = {}
        self._window: list[tuple[Bid, Arrival, int]] = []
        """(bid, arrival, bytes fetched) of the updates since the last report."""
        self._skips: dict[str, Bid] = {}
        self._idle = 0
        self._now = 0.0
        self._started = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self._state.finished

    def wait(self) -> None:
        self._idle += 1
        if self._idle > MAX_IDLE:
            said = "; ".join(f"{name}: {bid.reason}" for name, bid in sorted(self._skips.items()))
            raise CoordinatorError(f"no device has trained anything for long: {said or 'silence'}")
        self._now = max(self._now, self._state.deadline or self._now)
        self.handle(events.Tick())

    def open(self) -> None:
        """Nothing needs to be."""

    def close(self) -> None:
        """Nothing is open."""

    def handle(self, event: fragments.Event) -> None:
        pending = [event]
        while pending:
            before = self._state
            self._state, effects = fragments.handle(
                self._config, self._state, pending.pop(0), self._now
            )
            self._skips |= {
                name: work.bid
                for name, work in self._state.work.items()
                if work.stage is Stage.RESTING and work.bid is not None
            }
            for effect in effects:
                pending += self._perform(effect, before)

    def _perform(self, effect: fragments.Effect, before: FragmentsState) -> list[fragments.Event]:
        match effect:
            case events.Send(device, message):
                self._link.send(device, message)
            case events.Keep(round, arrival):
                device = arrival.contribution.device
                self._arrivals[device] = arrival
                return [events.Kept(device, round)]
            case fragments.Reserve(device, round, groups):
                self._model.reserve(device, round, groups)
            case fragments.Release(device, round):
                self._model.release(device, round)
            case fragments.Apply(device, round, age):
                arrival = self._arrivals.pop(device)
                bid = before.work[device].bid
                if bid is not None:
                    kept = self._config.plan.levels(arrival.groups)
                    bid = replace(bid, level=max(kept.values(), default=1.0))
                    fetched = self._model.fetched.pop((device, round), 0)
                    self._window.append((bid, arrival, fetched))
                self._idle = 0
                self._model.mix(self._config.rule, arrival, age)
                if self._state.version % self._report_every == 0 or self._state.finished:
                    self.reports.append(self._report())
        return []

    def _report(self) -> RoundReport:
        now = time.perf_counter()
        took, self._started = now - self._started, now
        updates, skips = self._window, self._skips
        self._window, self._skips = [], {}
        return report_updates(
            self._config,
            self._state,
            updates,
            skips,
            norms=self._model.norms,
            noise=self._model.noise,
            seconds=took,
            every=self._report_every,
        )
