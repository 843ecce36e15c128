"""A whole federation in one process: the engine of `serve`, in virtual time.

There is no second implementation for simulation: the courses that `serve` runs over a broker run
here (`engine.py`), with whole device apps. Time is virtual:

- `time="none"`: nothing takes time. Messages arrive at once, and when none is left, time jumps to
  the next deadline.
- `time="profile"`: every device has a clock. Fetching, training and sending take as long as its
  times or its emulated profile say (`pace.py`); other messages to it wait. In an asynchronous run,
  a device that is ten times slower makes a tenth of the updates.

Devices may train in several threads. Their messages are processed in the order of the members, so
the result does not depend on the number of threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from coordinator.aggregate.memory import MemoryType
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.pairings import fragment_advice
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.masks import settle_masks
from coordinator.rounds.config import RunConfig
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState
from coordinator.rounds.report import DeviceRound, RoundReport
from coordinator.rounds.synchronous import RoundsConfig, RoundsState
from coordinator.run.folder import Checkpoint
from coordinator.service.close import RootTrainer, open_memory
from coordinator.service.courses.fragments import FragmentsCourse
from coordinator.service.courses.parts import Evaluate, Parts
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.simulate.engine import Sent, Told, VirtualRun, warn_of_horizon
from coordinator.simulate.pace import DeviceClock, MemberTimes, times_of
from coordinator.simulate.ram import DirectOutlet, RunInRam
from coordinator.task.levels import LevelScores
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import PASSES, Emulation
from edge_sdk.decide.observer import Observer
from edge_sdk.device.app import DeviceApp
from edge_sdk.device.examining import Examiner
from edge_sdk.device.stores.movements import MemoryMovements
from edge_sdk.protocol.messages.round import (
    Assignment,
    Movement,
    Replay,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, norm_pairs
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Backend, Job, Trained
from edge_sdk.train.statistics import LevelRuntime, Moments

__all__ = ["DeviceRound", "Federation", "Member", "MemberTimes", "RoundReport"]

log = logging.getLogger(__name__)

_Time = Literal["none", "profile"]


@dataclass(frozen=True, slots=True)
class Member:
    """A device of the federation."""

    name: str
    policy: Policy
    data: ArrayData
    emulation: Emulation | None = None
    """The device it emulates; None means this machine."""
    observe: Callable[[Backend], Observer] | None = None
    """Makes its observer, given its backend; None means it follows its policy alone."""
    times: MemberTimes | None = None
    """Durations under `time="profile"`; None means those of its emulated profile."""
    there: Sequence[tuple[float, float]] | None = None
    """(from, to) in virtual seconds when it is present; None means always."""
    train: Callable[[Backend], Backend] | None = None
    """Makes the backend it trains with from the federation's; None means the federation's."""


class Federation:
    """A coordinator and its devices. `run` trains; `model` is the result so far."""

    def __init__(
        self,
        config: RoundsConfig | FragmentsConfig,
        model: GlobalModel,
        make_backend: Callable[[], Backend],
        members: Sequence[Member],
        *,
        time: _Time = "none",
        threads: int = 1,
        memory_dir: Path | None = None,
        memory_type: MemoryType = "fp32",
        evaluate: Evaluate | None = None,
        runtime: LevelRuntime | None = None,
        root: ArrayData | None = None,
    ) -> None:
        """`make_backend` is called once for each of the `threads` in which devices train.

        `memory_dir` is the folder of the rule's memory; None means RAM. `evaluate` measures the
        levels for every report, for example an `Evaluator`. Without it, devices survey the levels
        of a model with BatchNorm, if there is a `runtime` for them. `root` is the coordinator's
        data for `robust = "root"`. Raises `ConfigError`.
        """
        if config.min_devices > len(members):
            raise ConfigError(
                f"min_devices is {config.min_devices} but there are {len(members)} members"
            )
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, not {threads}")
        self.model = model
        masks = settle_masks(config.masks, config.plan, lambda: model.norms)
        self._config = replace(config, masks=masks)
        if advice := fragment_advice(masks, config.plan):
            log.warning("%s", advice)
        self._members = members
        self._virtual = time == "profile"
        self._threads = threads
        self._memory = memory_dir, memory_type
        self._evaluate = evaluate
        runtime = None if runtime is None else _OneAtATime(runtime)
        self._surveys = runtime is not None and bool(norm_pairs(config.plan))
        self._store = RunInRam()
        self._outlet = DirectOutlet(model)
        self._root = None if root is None else RootTrainer(make_backend, root)
        backend = _PerThread(config.plan, make_backend)
        self._devices: dict[str, _Device] = {}
        for member in members:
            if member.name in self._devices:
                raise ConfigError(f"two members are called {member.name!r}")
            times = _times(member) if self._virtual else None
            self._devices[member.name] = _Device(
                len(self._devices), member, backend, self._outlet, config, times, runtime
            )
        warn_of_horizon(config, (member.policy for member in members), len(members))
        self._run = VirtualRun(
            self._start, self._store, self._outlet, self._devices, threads=threads
        )

    @property
    def state(self) -> RoundsState | FragmentsState:
        """The state of the coordinator's machine. Raises `CoordinatorError` before `run`."""
        if self._run.course is None:
            raise CoordinatorError("the federation has not started: iterate over run() first")
        return self._run.course.state

    @property
    def levels(self) -> LevelScores:
        """The levels of the newest model, evaluated if there is an `evaluate`."""
        return self._store.levels

    def run(self) -> Iterator[RoundReport]:
        """Train to the end, yielding every round as it closes.

        An asynchronous run reports after as many updates as there are devices. Raises
        `CoordinatorError` if the run makes no progress.
        """
        for report in self._run.run():
            yield replace(report, time_s=self._run.now_s) if self._virtual else report

    def _start(self, now_s: float) -> RoundsCourse | FragmentsCourse:
        config, model = self._config, self.model
        parts = Parts(
            self._store,
            model,
            self._outlet,
            evaluate=self._evaluate,
            surveys=self._surveys,
            threads=self._threads,
            root=self._root,
        )
        start = Checkpoint.first(config.plan, model.theta, model.buffers)
        if isinstance(config, FragmentsConfig):
            return FragmentsCourse(config, parts, start, report_every=len(self._members))
        folder, dtype = self._memory
        memory = open_memory(
            config, folder, memory_type=dtype, threads=self._threads, devices=len(self._members)
        )
        return RoundsCourse(config, parts, start, memory, now_s)


class _Device:
    """A member at work. Its app is made on the first message; many members never get one."""

    def __init__(
        self,
        number: int,
        member: Member,
        backend: Backend,
        outlet: DirectOutlet,
        config: RunConfig,
        times: MemberTimes | None,
        runtime: LevelRuntime | None,
    ) -> None:
        """`times` is None if nothing takes time; `runtime` runs levels in surveys."""
        self.number = number
        self.name = member.name
        self._member = member
        self._backend = backend
        self._outlet = outlet
        self._config = config
        self._times = times
        self._runtime = runtime
        self._app: DeviceApp[Movement | Replay] | None = None
        self._clock: Emulation | DeviceClock | None = None
        if times is not None:
            self._clock = member.emulation or DeviceClock(times.step_s)

    def intervals(self) -> Iterable[tuple[float, float]]:
        """See `VirtualDevice`, and the like below."""
        there = self._member.there
        return ((0.0, inf),) if there is None else there

    @property
    def awake(self) -> bool:
        """True if the device ever received a message."""
        return self._app is not None

    @property
    def latency_s(self) -> float:
        """Latency of a message, in seconds."""
        return 0.0 if self._times is None else self._times.latency_s

    @property
    def busy_until_s(self) -> float:
        """Time when the device can process a message; never in the future if nothing takes time."""
        return 0.0 if self._clock is None else self._clock.clock()

    def arrival_s(self, message: Sent, now_s: float) -> float:
        """Time when a message from the device reaches the coordinator."""
        if self._clock is None or self._times is None:
            return now_s
        movement = message.movement if isinstance(message, Replay) else message
        size = len(movement.payload) if isinstance(movement, Movement) else 0
        return self._clock.clock() + self._times.latency_s + size / self._times.up_bytes_s

    def wake(self) -> DeviceApp[Movement | Replay]:
        """Return the device's app, made on the first call."""
        if self._app is None:
            member, backend = self._member, self._backend
            timed = member.emulation or self._clock
            if timed is not None:
                backend = timed.emulated(backend)
            if member.train is not None:
                backend = member.train(backend)
            self._app = DeviceApp(
                member.name,
                backend=backend,
                data=member.data,
                policy=member.policy,
                source=self,
                seed=self._config.seed,
                examiner=self._examiner(),
                movements=MemoryMovements(),
                observer=None if member.observe is None else member.observe(backend),
                clock=perf_counter if timed is None else timed.clock,
            )
        return self._app

    def _examiner(self) -> Examiner | None:
        runtime = self._runtime
        if runtime is None:
            return None
        member = self._member
        return Examiner(member.name, member.data, self, lambda: runtime, spend=self._spend)

    def _spend(self, macs: float) -> None:
        """Let the time of a forward pass go by."""
        if isinstance(self._clock, DeviceClock):
            plan = self._config.plan
            whole = plan.submodel_macs(plan.full_groups()) * self._config.batch_size
            self._clock.spend(macs / (PASSES * whole) if whole else 0.0)
        elif self._member.emulation is not None:
            self._member.emulation.trained(macs)

    def receive(self, message: Told, now_s: float) -> list[Sent]:
        """Process a message that arrives now and return the messages it sends."""
        app, emulation = self.wake(), self._member.emulation
        if self._clock is not None:
            self._clock.wait_until(now_s)
        if emulation is not None and isinstance(message, RoundOpen):
            emulation.round_opened(message.round, None if self._clock is None else now_s)
        return [*app.receive(message)]

    def connected(self, now_s: float) -> list[Sent]:
        """Return the messages without a receipt, which the device sends when it is back."""
        if self._clock is not None:
            self._clock.wait_until(now_s)
        return [*self.wake().connected()]

    def fetch(
        self,
        assignment: Assignment,
        opened: RoundOpen,  # noqa: ARG002  as `ModelSource` has it
    ) -> tuple[Blocks, dict[str, Array]]:
        """Return the model it trains from, once that has arrived."""
        fetched = self._outlet.fetch(assignment)
        self._wait_for(self._outlet.fetched_bytes(self.name, assignment.groups))
        return fetched

    def fetch_control(
        self,
        assignment: Assignment,
        opened: RoundOpen,  # noqa: ARG002  as `ModelSource` has it
    ) -> Blocks:
        """Return the global variate, once that has arrived."""
        before = self._outlet.fetched_bytes(self.name, assignment.groups)
        control = self._outlet.fetch_control(assignment)
        self._wait_for(self._outlet.fetched_bytes(self.name, assignment.groups) - before)
        return control

    def fetch_level(self, survey: Survey, number: int) -> tuple[Blocks, dict[str, Array]]:
        """Return a level of a survey, once that has arrived."""
        blocks, buffers, size = self._outlet.fetch_level(survey, number)
        self._wait_for(size)
        return blocks, buffers

    def _wait_for(self, size_bytes: int) -> None:
        """Let the time of a download go by."""
        if self._clock is not None and self._times is not None:
            self._clock.wait_until(self._clock.clock() + size_bytes / self._times.down_bytes_s)


def _times(member: Member) -> MemberTimes:
    if member.times is not None:
        return member.times
    if member.emulation is None:
        raise ConfigError(
            f'{member.name}: time = "profile" needs the member\'s times, or an emulated device '
            "with a profile"
        )
    return times_of(member.emulation)


class _OneAtATime:
    """A runtime that several threads may use, one after the other."""

    def __init__(self, runtime: LevelRuntime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()

    @property
    def plan(self) -> ModelPlan:
        return self._runtime.plan

    def predict(self, *args: Any, **options: Any) -> Array:
        with self._lock:
            return self._runtime.predict(*args, **options)

    def moments(self, *args: Any, **options: Any) -> Moments | None:
        with self._lock:
            return self._runtime.moments(*args, **options)


class _PerThread:
    """A backend that uses a separate backend in each thread."""

    def __init__(self, plan: ModelPlan, make: Callable[[], Backend]) -> None:
        self.plan = plan
        self._make = make
        self._local = threading.local()
        self._spare: list[Backend] = []

    @cached_property
    def data(self) -> DataSpec | None:
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
