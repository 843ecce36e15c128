"""The coordinator over a link: one loop that turns arriving messages into events, and effects into
outgoing messages.

Rules:
- A bad message harms only its sender: it is dropped, and the sender is told from time to time.
  Traffic and the number of devices are limited (`admission/`).
- A device that sends something is present, even if its presence message was lost.
- The state machine's clock stops while there is no broker, or while it stands still
  (`outgoing/pulse.py`), so an outage makes no device late.
- Nothing is said before the broker has told who is in charge of the task; a coordinator that
  another one replaced stops (`outgoing/fence.py`).
- A round opens only after the link has accepted all chunks of its model.
- A disk that is full is waited for (`admission/room.py`).
- What takes long in a commit is done beside the loop (`aside.py`), which goes on answering.
- A failed commit, or any other failure of the disk, ends the process: its state would be another
  than the one on disk. After a restart it resumes from the last checkpoint.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from coordinator.aggregate.memory import Memory
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.pairings import fragment_advice
from coordinator.errors import ConfigError, StopRequestedError
from coordinator.masks import settle_masks
from coordinator.rounds import events
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.report import RoundReport
from coordinator.rounds.reputation import quarantined
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.chunk_store import ChunkStore
from coordinator.run.folder import (
    CHUNKS,
    DELIVERY,
    MEMORY,
    MOVEMENTS,
    PUBLISHED,
    ROUND,
    UPLOADS,
    Run,
    RunError,
    TaskFiles,
)
from coordinator.run.forgetting import Forgotten, finish_forgetting, forget
from coordinator.run.journal import Journal
from coordinator.run.resuming import whole_checkpoint
from coordinator.run.steering.orders import Steering
from coordinator.run.steering.settings import values_of
from coordinator.service.admission.callers import Callers
from coordinator.service.admission.demands import Demands, Doorkeeper
from coordinator.service.admission.inbox import MAX_MESSAGE_BYTES, Inbox, Letter
from coordinator.service.admission.limits import CONTROL, MAX_DEVICES
from coordinator.service.admission.requests import Requests
from coordinator.service.admission.room import Room
from coordinator.service.aside import Aside, AtOnce
from coordinator.service.close import RootTrainer, open_memory
from coordinator.service.courses.fragments import FragmentsCourse
from coordinator.service.courses.parts import (
    Evaluate,
    Parts,
    Said,
    Wait,
    WaitLog,
    listed,
    make_model,
)
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.service.helm import Helm
from coordinator.service.outgoing.canary import CanarySettings
from coordinator.service.outgoing.fence import Fence, FencedError, FenceState
from coordinator.service.outgoing.outlet import BrokerOutlet
from coordinator.service.outgoing.publishing import Publisher
from coordinator.service.outgoing.pulse import Pulse
from coordinator.service.outgoing.rollout import NO_JUDGES, Rollout
from coordinator.service.outgoing.sending import ChunkSending
from coordinator.service.overview.folder import overview_for
from coordinator.service.overview.overview import Overview
from coordinator.service.overview.views import StatusTopics
from coordinator.service.receiving import Receiving, largest_movement, read_upload
from coordinator.service.store import Keeping, RunOnDisk
from edge_sdk.program.files import DiskFull, waiting_for_room
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.epoch import Claim, Echo, Epoch
from edge_sdk.protocol.messages.round import (
    MAX_REASON_CHARACTERS,
    Bid,
    Outcome,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding, largest_finding, norm_pairs
from edge_sdk.protocol.messages.topics import Topic, TopicKind, Topics
from edge_sdk.protocol.messages.transfer import (
    Complaint,
    Credit,
    Evaluation,
    Offer,
    Presence,
    Want,
)
from edge_sdk.protocol.messages.wire import (
    MAX_CONTROL_BYTES,
    ControlMessage,
    decode_received,
    decode_stamped,
    encode_message,
)
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    LinkEvent,
    OpenLink,
    Refused,
    Will,
    Writable,
)
from edge_sdk.transport.settings import DeniedError
from edge_sdk.transport.uploads import Upload, UploadLimits

log = logging.getLogger(__name__)

Clock = Callable[[], float]

NAME = "coordinator"
IDLE_S = 60.0
"""Seconds between searches for stalled uploads."""
MAX_WAIT_S = 1.0
"""Longest wait of the loop in seconds, so that it notices a request to stop."""
FINDING_KIB = 4
"""KiB of a finding besides its numbers, at most."""
ROOM_S = 1.0
"""Seconds until a file that found no room on the disk is tried again."""
MAX_HELD = 1024
"""Most messages that are put aside while the disk is full; later ones wait in the inbox."""
ECHO_S = 30.0
"""Seconds to wait for an echo from a broker that answers otherwise."""
DENIALS = 3
"""Refusals in a row by a broker that never accepted us, after which the coordinator stops."""
REPAIR_S = 5.0
"""Least seconds between two repetitions of everything public."""
LINGER_S = 5.0
"""Seconds the coordinator keeps answering after the run ends, so that devices can leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """Settings of the service."""

    machine: RoundsConfig | FragmentsConfig
    down: Encoding
    """Encoding of the model that devices fetch."""
    keeping: Keeping
    chunk_bytes: int
    retained_chunks: bool = True
    """True if the broker keeps chunks; otherwise the coordinator sends those devices ask for."""
    max_devices: int = MAX_DEVICES
    """Most devices to listen to; further names are ignored."""
    canary: CanarySettings = field(default_factory=CanarySettings)
    """Who tries a new model for inference before the others get it."""
    demands: Demands = field(default_factory=Demands)
    """Who may take part."""
    view_s: float | None = None
    """Least seconds between two messages for dashboards; None: there are none."""


class Service:
    """The coordinator of one run. `serve` is its loop; tests call `handle` and `tick` directly."""

    def __init__(
        self,
        run: Run,
        config: ServiceConfig,
        *,
        open_link: OpenLink,
        evaluate: Evaluate | None = None,
        watch: Callable[[RoundReport], object] | None = None,
        root: RootTrainer | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        watchdog: Watchdog | None = None,
        requests: Requests[Service] | None = None,
        room_s: float = ROOM_S,
        epoch: Epoch | None = None,
        steering: Steering | None = None,
        overview: Overview | None = None,
        aside: Aside | None = None,
    ) -> None:
        """Opens the link and publishes the task and the model. Raises `CoordinatorError`.

        `watch` is shown every report. `requests` are those of other threads, which the loop
        answers; None: there are none. `room_s`: seconds until a file that found no room on the
        disk is tried again. `epoch` is that of this start (`Run.take_epoch`); None: the next one
        that the folder knows. `steering` has the orders of operators, and was told of the values
        in run.toml (`begin`); None: it is opened here. `overview` is told what happens; None: a new
        one. `aside` does the work of commits; None: the loop does it.
        """
        self._run = run
        if steering is None:
            steering = Steering(run, wall)
            steering.begin(values_of(config.machine))
        self._steering = steering
        self._requests: Requests[Service] = Requests() if requests is None else requests
        self._epoch = run.take_epoch(secrets.token_hex(8)) if epoch is None else epoch
        self._fence = Fence(self._epoch, run.about.task)
        self._pulse = Pulse(clock())
        self._asked_s = clock()
        self._echoes = 0
        self._stalls = False
        """True while the broker stands still although the link is up."""
        self._begun = False
        """True once this coordinator was in charge."""
        self._repair_due_s = clock()
        masks = settle_masks(config.machine.masks, run.plan, run.first_norms)
        self._machine = replace(config.machine, masks=masks)
        self._clock, self._wall = clock, wall
        self._overview = overview_for(run, self._machine) if overview is None else overview
        self._watchdog = Watchdog() if watchdog is None else watchdog
        most = config.max_devices
        # Twice what a device may have in flight, because a link may deliver messages twice.
        limits = UploadLimits()
        at_once = 2 * limits.max_uploads * limits.window * (config.chunk_bytes + 2**10)
        self._inbox = Inbox(clock=clock, max_devices=most, device_bytes=at_once)
        self._requests.wake = self._inbox.wake
        self._aside: Aside = AtOnce() if aside is None else aside
        self._aside.attend(self._inbox.wake, self._wait_aside)
        self._leaving = False
        self._lacking: DiskFull | None = None
        """A file that found no room, as work beside the loop says."""
        self._lacked_s = -math.inf
        """Time at which it last said so."""
        self._callers = Callers(self._inbox, clock=clock, max_devices=most)
        self._finding_bytes = max(MAX_MESSAGE_BYTES, largest_finding(run.plan))
        self._topics = Topics(run.about.task)
        self._session = run.next_session(wall())
        self._sessions: dict[str, int] = {}
        """Newest session of each device heard from."""
        self._present: set[str] = set()
        self._door = Doorkeeper(config.demands)
        self._newcomers: list[str] = []
        """Devices that arrived before the first model was published."""
        self._stop: threading.Event | None = None
        self._room, self._room_s = Room(self._connected_s), room_s
        self._waited, self._roomy_s = False, 0.0
        self._ending: RoundClosed | None = None
        """The end of the run, while devices decide on its last model and are not told of it."""
        self._ending_due_s = 0.0
        self._answers: tuple[int, int, bool] | None = None
        """State of the trial when the time until then was set."""
        self._held: deque[LinkEvent | Letter] = deque()
        """Events that arrived while the disk was full, and are not handled yet."""
        self._lost_s = 0.0
        self._away_since: float | None = clock()
        self._idle_due_s = clock() + IDLE_S
        self._waits, self._wait_due_s = WaitLog(), clock()
        gone = encode_message(Presence(name=NAME, session=self._session, online=False))
        self._link = open_link(
            name=f"{NAME}-{run.about.task}",
            deliver=self._inbox.put,
            will=Will(self._topics.coordinator, gone),
        )
        for topic_filter, bulk in (
            (self._topics.epoch, False),
            (self._topics.coordinator, False),
            (self._topics.round, False),
            (self._topics.echo, False),
            (self._topics.presences, False),
            (self._topics.up_controls, False),
            (self._topics.up_chunks, True),
        ):
            self._link.subscribe(topic_filter, bulk=bulk)
        self._views = None
        if config.view_s is not None:
            self._views = StatusTopics(
                self._link, self._topics, self._overview, every_s=config.view_s, clock=clock
            )
        self._store = ChunkStore(run.folder / CHUNKS)
        self._sending = ChunkSending(self._link, self._store.get, epoch=self._epoch)
        self._sending.shut = True
        self._publisher = Publisher(
            self._sending,
            self._topics,
            self._store,
            run.folder / PUBLISHED,
            chunk_bytes=config.chunk_bytes,
            retained=config.retained_chunks,
        )
        try:
            self._parts, self._course = self._begin(config, evaluate, watch, root)
            self._callers.know(self._course.state.devices)
            self._helm = Helm(
                steering,
                self._course,
                now=self._now,
                perform=self._perform,
                devices=self._earlier,
                max_devices=config.max_devices,
                measured=evaluate is not None,
                overview=self._overview,
            )
            self._overview.known(self._course.state.devices)
            self._overview.model(self._course.state.fleet, run.rounds()[-1])
            self._note_phase()
        except BaseException:
            self._link.close()
            self._store.close()
            raise

    def _begin(
        self,
        config: ServiceConfig,
        evaluate: Evaluate | None,
        watch: Callable[[RoundReport], object] | None,
        root: RootTrainer | None,
    ) -> tuple[Parts, RoundsCourse | FragmentsCourse]:
        run, machine, keeping = self._run, self._machine, config.keeping
        memory = None
        if isinstance(machine, RoundsConfig):
            memory = open_memory(
                machine,
                run.folder / MEMORY,
                memory_type=keeping.memory_type,
                threads=keeping.workers,
            )
        try:
            return self._begin_with(memory, config, evaluate, watch, root)
        except BaseException:
            if memory is not None:
                memory.close()
            raise

    def _begin_with(
        self,
        memory: Memory | None,
        config: ServiceConfig,
        evaluate: Evaluate | None,
        watch: Callable[[RoundReport], object] | None,
        root: RootTrainer | None,
    ) -> tuple[Parts, RoundsCourse | FragmentsCourse]:
        run, machine, keeping = self._run, self._machine, config.keeping
        journal = Journal(run.folder / ROUND)
        checkpoint = whole_checkpoint(run, memory, journal)
        finish_forgetting(run, memory)
        limits = UploadLimits(max_bytes=largest_movement(run.plan, machine.up))
        self._receiving = Receiving(run.folder / UPLOADS, run.folder / MOVEMENTS, limits)
        self._inbox.expects = self._receiving.expects
        self._earlier = checkpoint.devices
        model = make_model(run.plan, checkpoint, config.down, machine.seed)
        run.check_digest(checkpoint, model.digest)
        outlet = BrokerOutlet(
            model,
            self._publisher,
            self._store,
            run=run.about.run,
            clock=self._clock,
            needs_statistics=any(e.kind == "statistics" for e in run.task.manifest.graphs),
        )
        rollout = None
        if config.canary.share is not None:
            rollout = Rollout(
                config.canary,
                path=run.folder / DELIVERY,
                run=run.about.run,
                outlet=outlet,
                devices=self._trusted,
                record=self._record,
                wall=self._wall,
                note=self._overview.delivery,
            )
        parts = Parts(
            store=RunOnDisk(run, journal, self._receiving, keeping),
            model=model,
            outlet=outlet,
            rollout=rollout,
            history=run.history.entries,
            evaluate=evaluate,
            surveys=can_survey(run.task, machine.levels),
            threads=keeping.workers,
            partial=fragment_advice(machine.masks, machine.plan) is not None,
            watch=watch,
            root=root,
            onlooker=self._overview,
            aside=self._aside,
        )
        self._publisher.publish_task(run.task, run.about.task, run.about.run)
        course: RoundsCourse | FragmentsCourse
        if isinstance(machine, RoundsConfig):
            course = RoundsCourse(
                machine, parts, checkpoint, memory, self._now(), self._steering.steered
            )
        else:
            course = FragmentsCourse(machine, parts, checkpoint, steered=self._steering.steered)
        # The topic is retained: a message left by an earlier run would mislead new devices.
        over = RoundClosed(round=max(1, run.opened), run=run.about.run)
        self._publisher.say_round(over if course.finished else None)
        return parts, course

    # -- for the loop -----------------------------------------------------------------------

    @property
    def course(self) -> RoundsCourse | FragmentsCourse:
        """Course of the run."""
        return self._course

    @property
    def model(self) -> GlobalModel:
        """Current global model."""
        return self._parts.model

    @property
    def finished(self) -> bool:
        """True if the run is complete."""
        return self._course.finished

    @property
    def helm(self) -> Helm:
        """Orders of operators."""
        return self._helm

    @property
    def waits_for(self) -> Wait | None:
        """Return the reason why the run waits now; None: it does not."""
        return self._helm.waits_for

    @property
    def overview(self) -> Overview:
        """Overview of the run; any thread may read it."""
        return self._overview

    def serve(self, stop: threading.Event) -> None:
        """Run until the run is complete, an operator's stop is due, or `stop` is set.

        Raises `RunError`.
        """
        self._stop = stop
        self._watchdog.ready(f"coordinating {self._run.about.task}")
        over = self.finished  # at the start: devices may have missed their last receipts
        while not self.finished and not stop.is_set() and not self._helm.stops:
            self._step(self._wait_s())
        if self._helm.stops and not self.finished:
            return
        until = self._clock() + LINGER_S
        while (self._present or over) and not stop.is_set() and self._clock() < until:
            awaited = self._undecided or self._ending is not None
            if awaited and self._present and self._helm.stopping is None:
                until = self._clock() + LINGER_S  # they are still answering
            self._step(min(MAX_WAIT_S, max(until - self._clock(), 0.0)))
            if over and self._away_since is not None:
                until = self._clock() + LINGER_S  # not connected yet
        self._tell_end()

    @property
    def _undecided(self) -> bool:
        """True while some devices try a model for inference."""
        return self._parts.rollout is not None and self._parts.rollout.undecided

    def _tell_end_if_due(self) -> None:
        """Tell devices that the run is over, once they have decided on its last model.

        Those without `stay` then leave with the model that is delivered. It does not wait for ever:
        not for devices that do not answer, nor if there are none, nor if the run is to stop.
        """
        rollout = self._parts.rollout
        if self._ending is None or rollout is None:
            return
        trial = rollout.state.trial
        seen = None if trial is None else (trial.round, len(trial.votes), rollout.judged)
        if seen != self._answers:
            self._answers, self._ending_due_s = seen, self._clock() + rollout.patience_s
        waits = trial is not None and self._present and self._helm.stopping is None
        if not waits or (self._clock() >= self._ending_due_s and not rollout.skip_ahead()):
            self._tell_end()

    def _tell_end(self) -> None:
        """Tell devices that the run is over, if they were not told yet."""
        over, self._ending = self._ending, None
        if over is not None:
            self._announce(over)

    def _step(self, wait_s: float) -> None:
        now = self._clock()
        self._watchdog.alive(now)
        event = self._next(min(wait_s, max(0.0, self._watchdog.due_s - now)))
        if event is not None:
            self.handle(event)
        self.tick()

    def _next(self, wait_s: float = 0.0) -> LinkEvent | Letter | None:
        return self._held.popleft() if self._held else self._inbox.get(wait_s)

    def pump(self) -> int:
        """Handle everything that has arrived, without waiting; returns the number of events."""
        number = 0
        while (event := self._next()) is not None:
            self.handle(event)
            number += 1
        self.tick()
        return number

    def handle(self, event: LinkEvent | Letter) -> None:
        """Handle an event from the inbox. Raises `FencedError`; `RunError` if the disk fails."""
        with self._storing():
            self._handle(event)

    def _handle(self, event: LinkEvent | Letter) -> None:
        if not isinstance(event, Disconnected):
            self._hear()
        match event:
            case Letter():
                self._on_letter(event)
            case Writable():
                self._sending.pump()
            case Connected():
                self._on_connected()
            case Disconnected(reason, denials):
                if denials >= DENIALS and not self._begun:
                    raise DeniedError(f"the broker refused the coordinator: {reason}")
                log.warning("broker lost: %s", reason, extra={"facts": {"event": "disconnected"}})
                self._overview.linked(False)
                self._fence.lost()
                self._sending.shut = True
                self._stalls = False
                if self._away_since is None:
                    self._away_since = self._clock()
            case Refused(topic, reason) if topic in (self._topics.epoch, self._topics.echo):
                self._go_unfenced(f"{topic}: {reason}")
            case Refused(topic, reason):
                log.error("the broker refused %s: %s", topic, reason)
        self._proceed()

    def tick(self) -> None:
        """Act on deadlines that have passed. Raises as `handle`."""
        if (lacking := self._lacking) is not None:
            self._lacking, self._lacked_s = None, self._clock()
            self._room.lacks(lacking)
        if self._room.full is not None:
            # Free bytes do not tell of a quota: what has just tried in vain knows better.
            if self._clock() - self._lacked_s >= 2 * self._room_s:
                self._room.look()
            self._roomy_s = self._clock()
        with self._storing():
            self._tick()

    def _tick(self) -> None:
        self._check_fence()
        if self._advance():
            self._proceed()
        if self._room.full is None and self._is_due():
            self._say(self._course.handle(events.Tick(), self._now()))
            self._proceed()
        self._decide_delivery()
        self._requests.serve(self)
        if self._helm.broken is not None:
            raise self._helm.broken
        self._note_phase()
        if self._views is not None and self._fence.in_charge and self._away_since is None:
            self._views.tick()
        for device, reason in self._inbox.take_dropped().items():
            self._warn(device, reason)
        self._note_wait()
        if self._clock() >= self._idle_due_s:
            self._idle_due_s = self._clock() + IDLE_S
            for offer in self._receiving.drop_idle(self._clock()):
                log.info("dropped a stalled upload from %s", offer.device)

    def _is_due(self) -> bool:
        """True if a deadline has passed, and the broker was alive then; sends echoes to know."""
        deadline, now = self._course.deadline, self._clock()
        if self._away_since is not None or deadline is None:
            return False
        due_s = now + deadline - self._now()
        if self._pulse.is_due(now, due_s):
            self._pulse.send(now)
            self._send_echo()
        if self._pulse.stalls(now):
            self._away_since = max(self._pulse.heard_s, self._roomy_s)
            self._stalls = True
            self._overview.linked(False)
            log.warning(
                "the broker does not answer: deadlines wait until it does",
                extra={"facts": {"event": "stalled"}},
            )
            return False
        return now >= due_s and self._pulse.vouches(due_s)

    def _hear(self) -> None:
        """Note a sign of life from the broker."""
        now = self._clock()
        self._pulse.hear(now)
        if self._stalls and self._away_since is not None:
            log.info(
                "the broker answers again after %.0f s, which do not count",
                now - self._away_since,
                extra={"facts": {"event": "answers"}},
            )
            self._lost_s += now - self._away_since
            self._away_since, self._stalls = None, False
            self._overview.linked(True)

    def _note_phase(self) -> None:
        """Tell the overview where the run is."""
        course, due = self._course, self._course.deadline
        if course.finished:
            self._overview.finished()
        there = self._away_since is None
        left = None if due is None or not there else due - self._now()
        self._overview.at(course.phase, course.round, left)

    def _note_wait(self) -> None:
        """Log what the run waits for, once it does."""
        now = self._clock()
        if now >= self._wait_due_s and self._away_since is None:
            self._wait_due_s = now + MAX_WAIT_S
            wait = self.waits_for
            if wait is not None and wait.kind == "devices" and self._door.barred:
                words = f"{wait.words}; barred: {listed(self._door.barred)} ([devices])"
                wait = replace(wait, words=words)
            self._overview.waits(None if wait is None else wait.words)
            if said := self._waits.note(wait, now):
                self._watchdog.status(said)

    def _record(self, entry: Mapping[str, Any]) -> None:
        """Append news to the history."""
        self._run.record(entry)
        self._overview.line(entry)

    def _trusted(self) -> set[str]:
        """Devices that are present and may take part; none before the course begins."""
        course = getattr(self, "_course", None)
        if course is None:
            return set()
        shut_out = quarantined(course.state.fleet.standings).keys() | self._door.barred.keys()
        return self._present - shut_out

    def forget(self, device: str, by: str) -> Forgotten:
        """Let go of all that is kept of a device. Raises `ConfigError` while a round closes."""
        if isinstance(self._course, FragmentsCourse):
            raise ConfigError(
                "an asynchronous run keeps nothing of a device: its movements are in the model"
            )
        if self._lacking is not None or self._room.full is not None:
            raise ConfigError("the disk is full, so a round waits: make room, then try again")
        course = self._course
        with self._fatal():
            if self._advance(to_the_end=True):
                self._proceed()
        with self._fatal(but=ConfigError):
            found = course.forget(device, lambda memory: forget(self._run, memory, device, by))
        with self._fatal():
            self._overview.line({"forgotten": asdict(found)})
            self._say(course.handle(events.Disowned(device), self._now()))
            self._proceed()
        return found

    @contextmanager
    def _fatal(self, *, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Let the loop end with an error of what was asked for, which only the asker would see.

        `but` is how the request is refused: then nothing has changed.
        """
        try:
            yield
        except but:
            raise
        except Exception as error:
            self.fail(error)
            raise

    def _decide_delivery(self) -> None:
        """Decide on a model's trial, if it is time to; a commit has the model's files to itself."""
        if self._parts.rollout is not None and self._fence.in_charge and not self._committing:
            self._parts.rollout.tick()
            self._tell_end_if_due()

    def _perform(self, said: list[Said]) -> None:
        """Say what an operator's order makes the course say."""
        self._say(said)
        self._proceed()

    def close(self) -> None:
        """Save what can be saved and leave the broker."""
        self._leaving = True
        self._requests.close()
        self._watchdog.stopping()
        # A coordinator that is not in charge leaves public topics as they are.
        in_charge = self._fence.in_charge
        self._sending.shut = not in_charge
        try:
            with self._storing():
                try:
                    with suppress(StopRequestedError):  # the next start closes the round again
                        self._advance(to_the_end=True)
                finally:
                    self._say(self._course.close())
                asked = self._stop is not None and self._stop.is_set()
                if self._helm.stops or self.finished or asked:
                    self._helm.stopped()
        finally:
            if in_charge:
                gone = Presence(name=NAME, session=self._session, online=False)
                self._publisher.say_presence(gone)
                if self._views is not None:
                    self._views.clear()
            self._link.close(flush=in_charge)
            self._store.close()
            self._overview.stopped()

    def fail(self, error: Exception) -> None:
        """Let the loop end with an error that it does not see itself."""
        self._helm.broken = error

    def kill(self) -> None:
        """Stop as a crash would."""
        self._course.kill()
        self._link.kill()
        self._store.close()

    def _now(self) -> float:
        """Time of the state machine: seconds connected to a broker and with room on the disk."""
        return self._connected_s() - self._room.lost_s

    def _connected_s(self) -> float:
        """Seconds connected to a broker."""
        present = self._clock() if self._away_since is None else self._away_since
        return present - self._lost_s

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Wait for room where the disk is full; another failure of the disk ends the process."""
        try:
            with waiting_for_room(self._wait_for_room):
                yield
            if self._waited:  # and what waited was written
                self._waited, self._roomy_s = False, self._clock()
                self._room.found()
        except OSError as error:
            raise RunError("the run's folder cannot be written") from error

    def _wait_for_room(self, full: DiskFull) -> None:
        """Let what found no room on the disk be tried again soon, and devices wait meanwhile.

        Raises `DiskFull` if the process is to stop.
        """
        self._room.lacks(full)
        self._waited = True
        if self._stop is not None and self._stop.is_set():
            raise full
        self._watchdog.alive(self._clock())
        self._watchdog.status("waiting for room on the disk")
        by = time.monotonic() + self._room_s
        while len(self._held) < MAX_HELD:
            event = self._inbox.get(max(0.0, by - time.monotonic()))
            if event is None:
                break
            self._held.append(event)
            if isinstance(event, Letter):
                self._put_off(event, full)
        else:
            time.sleep(max(0.0, by - time.monotonic()))

    def _wait_aside(self, full: DiskFull) -> None:
        """Let work beside the loop that found no room try again soon. Any thread may call it.

        Raises `DiskFull` if the process is to stop.
        """
        if self._leaving or (self._stop is not None and self._stop.is_set()):
            raise full
        self._lacking = full
        self._inbox.wake()
        time.sleep(self._room_s)

    def _put_off(self, letter: Letter, full: DiskFull) -> None:
        """Tell a device that offers an upload to wait, if it does."""
        device = letter.topic.device
        if letter.topic.kind is not TopicKind.UP_CONTROL or device not in self._present:
            return
        try:
            offer = decode_received(letter.topic, letter.payload)
        except MessageError:
            return  # it is dropped in its turn
        if isinstance(offer, Offer) and offer.device == device:
            self._tell(
                device,
                Credit(
                    device=device,
                    upload=offer.upload,
                    missing=((0, offer.chunk_count),),
                    window=0,
                    reason=f"the coordinator cannot store it: {full.strerror}",
                ),
            )

    def _wait_s(self) -> float:
        deadline = self._course.deadline
        if deadline is None or self._away_since is not None or self._room.full is not None:
            return MAX_WAIT_S
        return min(max(deadline - self._now(), 0.0), MAX_WAIT_S)

    @property
    def _committing(self) -> bool:
        """True while a commit is under way, which has the model."""
        return isinstance(self._course, RoundsCourse) and self._course.committing

    @property
    def _broken(self) -> bool:
        """True once a commit failed."""
        return isinstance(self._course, RoundsCourse) and self._course.broken

    def _advance(self, *, to_the_end: bool = False) -> bool:
        """Go on with a commit that is under way, as far as possible; True if it went on."""
        course = self._course
        return isinstance(course, RoundsCourse) and course.advance(to_the_end=to_the_end)

    def _proceed(self) -> None:
        """Do the work that was waiting for chunks to be sent."""
        if not self._publisher.drained:
            return
        newcomers, self._newcomers = self._newcomers, []
        for device in newcomers:
            if device in self._present and self._door.objection(device) is None:
                self._say(self._course.handle(events.Joined(device), self._now()))
        self._say(self._course.proceed(self._now()))

    # -- the link ---------------------------------------------------------------------------

    def _on_connected(self) -> None:
        log.info("connected to the broker", extra={"facts": {"event": "connected"}})
        self._fence.connected()
        self._asked_s = self._clock()
        self._send_echo()

    def _send_echo(self) -> None:
        self._echoes += 1
        echo = encode_message(Echo(number=self._echoes), self._epoch)
        self._link.publish(self._topics.echo, echo)

    def _take_charge(self) -> None:
        """Claim the task and say what is current, if nobody else is in charge."""
        if not self._fence.answered():
            return
        self._send_claim()
        self._sending.shut = False
        if self._away_since is not None:
            self._lost_s += self._clock() - self._away_since
            self._away_since = None
        if not self._begun:
            # Only now: devices answer at once, and earlier their answers would be missed.
            self._begun = True
            self._publisher.say_presence(Presence(name=NAME, session=self._session, online=True))
        else:
            self._publisher.say_again()
            self._say(self._course.say_again())
        self._overview.began()
        if self._views is not None:
            self._views.again()
        self._sending.pump()

    def _send_claim(self) -> None:
        claim = encode_message(Claim(run=self._run.about.run), self._epoch)
        self._link.publish(self._topics.epoch, claim, retain=True)

    def _go_unfenced(self, why: str) -> None:
        """Go on without echoes: the broker gives none."""
        if self._pulse.trusted:
            self._pulse.trusted = False
            log.warning(
                "the broker does not let the coordinator read its own messages (%s): a second "
                "coordinator of this task, and a broker that stands still, go unnoticed",
                why,
                extra={"facts": {"event": "unfenced"}},
            )
        self._take_charge()

    def _check_fence(self) -> None:
        """Repair what an earlier coordinator overwrote; stop waiting for an echo in vain."""
        now = self._clock()
        if self._fence.state is FenceState.ASKING:
            waited_s = now - self._asked_s
            if not self._pulse.trusted or self._link.silence_s() < waited_s - ECHO_S:
                self._go_unfenced("no echo came back")
        elif now >= self._repair_due_s and self._fence.take_contradiction():
            self._repair_due_s = now + REPAIR_S
            log.warning(
                "an earlier coordinator of this task still speaks; saying everything again",
                extra={"facts": {"event": "contradicted"}},
            )
            self._send_claim()
            self._publisher.say_again()

    def _on_public(self, letter: Letter) -> None:
        """Note who speaks for the task. Raises `FencedError` if another is in charge."""
        if not letter.payload:
            return
        message, epoch = decode_stamped(letter.topic, letter.payload)
        if isinstance(message, Echo):
            if epoch == self._epoch:
                self._take_charge()
        elif epoch is not None:
            self._fence.hear(epoch, retained=letter.retained)
        elif isinstance(message, Presence) and not letter.retained and self._fence.in_charge:
            if message.online:
                self._fence.contradict()  # a version that knows no epochs
            else:
                self._publisher.say_presence_again()  # the will of an earlier connection

    def _on_letter(self, letter: Letter) -> None:
        topic, device = letter.topic, letter.topic.device
        if topic.task != self._run.about.task:
            return
        try:
            if device is None:
                self._on_public(letter)
            elif topic.kind is TopicKind.UP_CHUNK:
                self._on_chunk(device, letter.payload)
            elif letter.payload:  # a cleared presence is empty
                message = decode_received(topic, letter.payload)
                if self._callers.admit(device):
                    self._on_message(topic, device, message)
        except MessageError as error:
            if device is None:
                log.debug("ignoring a message on %s: %s", topic.kind.value, error)
            else:
                self._warn(device, str(error))
        except (RunError, FencedError, OSError):
            raise
        except Exception:
            if self._broken:
                raise  # it is not the message's fault
            log.exception("dropped a message from %s", device)

    def _on_message(self, topic: Topic, device: str, message: ControlMessage) -> None:
        if isinstance(message, Presence):
            self._on_presence(device, message)
            return
        if topic.kind is not TopicKind.UP_CONTROL:
            return
        self._joined(device)
        match message:
            case Condition():
                self._on_condition(device, message)
            case Bid() if message.run == self._run.about.run and device in self._door.barred:
                self._decline(message)
            case Bid() if message.run == self._run.about.run:
                self._say(self._course.handle(message, self._now()))
            case Offer():
                self._on_offer(device, message)
            case Want():
                self._publisher.answer(message)
            case Evaluation() if device in self._door.barred:
                pass
            case Evaluation() if message.run == self._run.about.run:
                self._parts.heard(device, message)
                self._decide_delivery()
            case SurveyFinding() if message.run == self._run.about.run:
                self._say(self._course.handle(message, self._now()))

    def _on_presence(self, device: str, presence: Presence) -> None:
        if presence.session < self._sessions.get(device, 0):
            return  # the will of an earlier session
        known = device in self._present
        again = presence.session > self._sessions.get(device, presence.session)
        # A resumed round may be waiting for devices that this process has not heard from yet.
        first = device not in self._sessions and self._course.resumed
        self._sessions[device] = presence.session
        if presence.online:
            self._joined(device)
            if known or again or first:
                self._say(self._course.say_again(device))
        elif known or first:
            self._present.discard(device)
            self._say_farewell(device, presence)
            self._say(self._course.handle(events.Left(device), self._now()))

    def _say_farewell(self, device: str, presence: Presence) -> None:
        """Log why a device left, as far as it says."""
        code, reason = presence.exit_code, _printable(presence.reason)
        self._overview.left(device, reason, code)
        told = f": {reason}" if reason else ""
        if code:
            told += f" (exit code {code})"
        facts = {"event": "left", "device": device, "reason": reason, "exit_code": code}
        log.log(
            logging.WARNING if code else logging.INFO,
            "%s left%s",
            device,
            told,
            extra={"facts": facts},
        )

    def _joined(self, device: str) -> None:
        if device in self._present:
            return
        self._present.add(device)
        self._overview.joined(device)
        log.info("%s joined", device, extra={"facts": {"event": "joined", "device": device}})
        self._door.arrived(device)
        self._let_in(device)

    def _let_in(self, device: str) -> None:
        """Tell the course of a device that is there, if it may take part."""
        reason = self._door.objection(device)
        self._overview.barred(device, reason)
        if reason is not None:
            return
        if self._publisher.drained and self._away_since is None:
            self._say(self._course.handle(events.Joined(device), self._now()))
        else:
            self._newcomers.append(device)

    def _on_condition(self, device: str, condition: Condition) -> None:
        """Show how a device is, and judge if it may take part."""
        self._overview.condition(condition)
        before = self._door.objection(device)
        reason = self._door.judge(device, condition)
        if not self._door.active or reason == before:
            return
        if reason is None:
            log.info("%s may take part", device, extra=_about(device, "admitted"))
            self._let_in(device)
            return
        log.warning("%s may not take part: %s", device, reason, extra=_about(device, "barred"))
        self._overview.barred(device, reason)
        self._tell(device, Complaint(device=device, reason=f"may not take part: {reason}"))
        if before is None:
            self._say(self._course.handle(events.Left(device), self._now()))

    def _decline(self, bid: Bid) -> None:
        """Tell a device that is barred why its bid is declined; a skip needs no answer."""
        self._overview.bid(bid)
        if bid.level is not None:
            reason = self._door.barred[bid.device][:MAX_REASON_CHARACTERS]
            receipt = Receipt(
                device=bid.device, round=bid.round, outcome=Outcome.REJECTED, reason=reason
            )
            self._tell(bid.device, replace(receipt, run=bid.run))

    # -- uploads ----------------------------------------------------------------------------

    def _on_offer(self, device: str, offer: Offer) -> None:
        if offer.run == self._run.about.run:
            self._say(self._course.handle(offer, self._now()))
            return
        reason = "the movement belongs to another run"
        self._tell(device, replace(_receipt_for(offer, Outcome.LATE, reason), run=offer.run))

    def _accept(self, offer: Offer) -> None:
        """Let a device send what it offers, if there is room."""
        device, known = offer.device, self._receiving.knows(offer)
        if not known:
            self._callers.check_offer(
                device, offer.round if offer.answers is None else offer.answers
            )
        answer = self._receiving.offered(device, offer, self._clock())
        if self._receiving.full is not None:
            self._room.lacks(self._receiving.full)
        if isinstance(answer, Receipt):
            answer = replace(answer, run=offer.run)
        elif answer.refused:
            receipt = _receipt_for(offer, Outcome.REJECTED, answer.reason)
            if not known:
                self._parts.give(receipt, offer, None)
            self._tell(device, replace(receipt, run=offer.run))
        self._tell(device, answer)

    def _on_chunk(self, device: str, payload: bytes) -> None:
        if device not in self._callers:
            return
        progress = self._receiving.received(device, payload, self._clock())
        if not progress.new:
            self._callers.note_useless(device)
        if progress.credit is not None:
            self._tell(device, progress.credit)
        if progress.upload is not None:
            self._on_upload(device, progress.upload)

    def _on_upload(self, device: str, upload: Upload) -> None:
        self._joined(device)
        try:
            event = events.Uploaded(read_upload(upload), upload)
        except MessageError as error:
            reason = str(error)[:MAX_REASON_CHARACTERS]
            receipt = _receipt_for(upload.offer, Outcome.REJECTED, reason)
            self._parts.give(receipt, upload, upload)
            self._say([events.Send(device, receipt)])
            return
        try:
            said = self._course.handle(event, self._now())
        except OSError as error:  # it is not kept, and the device may send it again
            log.error("the movement from %s cannot be stored: %s", device, error)
            return
        self._say(said)

    # -- saying -----------------------------------------------------------------------------

    def _say(self, said: list[Said]) -> None:
        run = self._run.about.run
        for each in said:
            match each:
                case events.Broadcast(RoundClosed()) if not self.finished:
                    pass  # The next opening implies it; a closing alone would mean the run's end.
                case events.Broadcast(RoundClosed() as message) if self._undecided:
                    if self._parts.rollout is not None:
                        self._parts.rollout.complete()
                    self._ending, self._answers = message, None
                    log.info("the run is complete; devices decide on its last model first")
                case events.Broadcast(message):
                    self._ending = None
                    self._announce(message)
                case events.Send(_, RoundOpen(round=round)) if isinstance(
                    self._course, RoundsCourse
                ) and not self._course.config.invites(round):
                    pass  # The opening is retained, so newcomers find it.
                case events.Send(device, message):
                    self._tell(device, replace(message, run=run))
                case events.Accept(offer):
                    self._accept(offer)

    def _announce(self, message: RoundOpen | RoundClosed | Survey) -> None:
        """Tell all devices of a round, or that the run is over."""
        extra = {"facts": {"event": "round", "round": message.round}}
        log.info("round %d %s", message.round, _news(message), extra=extra)
        surveys = isinstance(message, Survey)
        self._inbox.max_bytes = self._finding_bytes if surveys else MAX_MESSAGE_BYTES
        self._publisher.say_round(replace(message, run=self._run.about.run))
        rollout = self._parts.rollout
        if isinstance(message, RoundClosed) and rollout is not None and not rollout.judged:
            words = f"the run is complete, but {NO_JUDGES}"
            log.warning("delivery: %s", words, extra={"facts": {"event": "canary"}})
            self._record({"time": round(self._wall(), 3), "event": words})

    def _tell(self, device: str, message: ControlMessage | Credit) -> None:
        self._sending.say(self._topics.down_control(device), message)

    def _warn(self, device: str, text: str) -> None:
        complaint = self._callers.warn(device, text)
        if complaint is not None:
            self._tell(device, complaint)


def _news(message: RoundOpen | RoundClosed | Survey) -> str:
    """Return what a message tells all devices of its round, for the log."""
    if isinstance(message, Survey):
        return f"is surveyed by devices: {message.wants} of {len(message.levels)} levels"
    return "opened" if isinstance(message, RoundOpen) else "ended"


def _about(device: str, event: str) -> dict[str, object]:
    return {"facts": {"event": event, "device": device}}


def _printable(text: str) -> str:
    """Return a device's words without characters that could forge lines of a log."""
    return "".join(each if each.isprintable() else " " for each in text)


def can_survey(task: TaskFiles, levels: Iterable[float]) -> bool:
    """True if devices can compute the BatchNorm statistics of a task's levels.

    All findings of a device have to fit into what it may send at once.
    """
    named = {name for pair in norm_pairs(task.plan) for name in pair}
    graphs = [entry for entry in task.manifest.graphs if entry.kind == "statistics"]
    outputs = {port.name.removeprefix("n:") for entry in graphs for port in entry.outputs}
    largest = largest_finding(task.plan)
    sent_kib = sum(level * largest / 1024 + FINDING_KIB for level in levels)
    fits = largest <= MAX_CONTROL_BYTES and sent_kib <= 0.9 * CONTROL.burst
    return bool(named) and named == outputs and fits


def _receipt_for(offer: Offer, outcome: Outcome, reason: str) -> Receipt:
    round = offer.round if offer.answers is None else offer.answers
    return Receipt(device=offer.device, round=round, outcome=outcome, reason=reason)
