"""The coordinator over a link: one loop that turns arriving messages into events, and effects into
outgoing messages.

Rules:
- A bad message harms only its sender: it is dropped, and the sender is told from time to time.
  Traffic and the number of devices are limited (`admission/`).
- A device that sends something is present, even if its presence message was lost.
- The state machine's clock stops while there is no broker, so an outage makes no device late.
- A round opens only after the link has accepted all chunks of its model.
- A failed commit ends the process; after a restart it resumes from the last checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from coordinator.aggregate.model import GlobalModel
from coordinator.errors import ConfigError
from coordinator.masks import settle_masks
from coordinator.rounds import events
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.run.chunk_store import ChunkStore
from coordinator.run.folder import (
    CHUNKS,
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
from coordinator.service.admission.callers import Callers
from coordinator.service.admission.inbox import MAX_MESSAGE_BYTES, Inbox, Letter
from coordinator.service.admission.limits import CONTROL, MAX_DEVICES
from coordinator.service.admission.requests import Requests
from coordinator.service.close import RootTrainer, open_memory
from coordinator.service.courses import Evaluate, Parts, Said, WaitLog, make_model
from coordinator.service.fragments_course import FragmentsCourse
from coordinator.service.outgoing.outlet import BrokerOutlet
from coordinator.service.outgoing.publishing import Publisher
from coordinator.service.outgoing.sending import ChunkSending
from coordinator.service.receiving import Receiving, largest_movement, read_upload
from coordinator.service.rounds_course import RoundsCourse, whole_checkpoint
from coordinator.service.store import Keeping, RunOnDisk
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
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
from edge_sdk.protocol.messages.transfer import Credit, Evaluation, Offer, Presence, Want
from edge_sdk.protocol.messages.wire import (
    MAX_CONTROL_BYTES,
    ControlMessage,
    decode_received,
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


class Service:
    """The coordinator of one run. `serve` is its loop; tests call `handle` and `tick` directly."""

    def __init__(
        self,
        run: Run,
        config: ServiceConfig,
        *,
        open_link: OpenLink,
        evaluate: Evaluate | None = None,
        root: RootTrainer | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        watchdog: Watchdog | None = None,
        requests: Requests[Service] | None = None,
    ) -> None:
        """Opens the link and publishes the task and the model. Raises `CoordinatorError`.

        `requests` are those of other threads, which the loop answers; None: there are none.
        """
        self._run = run
        self._requests: Requests[Service] = Requests() if requests is None else requests
        masks = settle_masks(config.machine.masks, run.plan, run.first_norms)
        self._machine = replace(config.machine, masks=masks)
        self._clock = clock
        self._watchdog = Watchdog() if watchdog is None else watchdog
        most = config.max_devices
        # Twice what a device may have in flight, because a link may deliver messages twice.
        limits = UploadLimits()
        at_once = 2 * limits.max_uploads * limits.window * (config.chunk_bytes + 2**10)
        self._inbox = Inbox(clock=clock, max_devices=most, device_bytes=at_once)
        self._callers = Callers(self._inbox, clock=clock, max_devices=most)
        self._finding_bytes = max(MAX_MESSAGE_BYTES, largest_finding(run.plan))
        self._topics = Topics(run.about.task)
        self._session = run.next_session(wall())
        self._sessions: dict[str, int] = {}
        """Newest session of each device heard from."""
        self._present: set[str] = set()
        self._newcomers: list[str] = []
        """Devices that arrived before the first model was published."""
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
            (self._topics.presences, False),
            (self._topics.up_controls, False),
            (self._topics.up_chunks, True),
        ):
            self._link.subscribe(topic_filter, bulk=bulk)
        self._store = ChunkStore(run.folder / CHUNKS)
        self._sending = ChunkSending(self._link, self._store.get)
        self._publisher = Publisher(
            self._sending,
            self._topics,
            self._store,
            run.folder / PUBLISHED,
            chunk_bytes=config.chunk_bytes,
            retained=config.retained_chunks,
        )
        try:
            self._parts, self._course = self._begin(config, evaluate, root)
            self._callers.know(self._course.state.devices)
        except BaseException:
            self._link.close()
            self._store.close()
            raise

    def _begin(
        self, config: ServiceConfig, evaluate: Evaluate | None, root: RootTrainer | None
    ) -> tuple[Parts, RoundsCourse | FragmentsCourse]:
        run, machine, keeping = self._run, self._machine, config.keeping
        journal, memory = Journal(run.folder / ROUND), None
        if isinstance(machine, RoundsConfig):
            memory = open_memory(
                machine,
                run.folder / MEMORY,
                memory_type=keeping.memory_type,
                threads=keeping.threads,
            )
        finish_forgetting(run, memory)
        checkpoint = whole_checkpoint(run, memory, journal)
        limits = UploadLimits(max_bytes=largest_movement(run.plan, machine.up))
        self._receiving = Receiving(run.folder / UPLOADS, run.folder / MOVEMENTS, limits)
        model = make_model(run.plan, checkpoint, config.down, machine.seed)
        parts = Parts(
            store=RunOnDisk(run, journal, self._receiving, keeping),
            model=model,
            outlet=BrokerOutlet(
                model,
                self._publisher,
                self._store,
                run=run.about.run,
                clock=self._clock,
                needs_statistics=any(e.kind == "statistics" for e in run.task.manifest.graphs),
            ),
            evaluate=evaluate,
            surveys=can_survey(run.task, machine.levels),
            threads=keeping.threads,
            fragments=isinstance(machine, FragmentsConfig),
            root=root,
        )
        self._publisher.publish_task(run.task, run.about.task, run.about.run)
        course: RoundsCourse | FragmentsCourse
        if isinstance(machine, RoundsConfig):
            course = RoundsCourse(machine, parts, checkpoint, memory, self._now())
        else:
            course = FragmentsCourse(machine, parts, checkpoint)
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

    def serve(self, stop: threading.Event) -> None:
        """Run until the run is complete or `stop` is set. Raises `RunError`."""
        self._watchdog.ready(f"coordinating {self._run.about.task}")
        while not self.finished and not stop.is_set():
            self._step(self._wait_s())
        until = self._clock() + LINGER_S
        while self._present and not stop.is_set() and self._clock() < until:
            self._step(min(MAX_WAIT_S, max(until - self._clock(), 0.0)))

    def _step(self, wait_s: float) -> None:
        now = self._clock()
        self._watchdog.alive(now)
        event = self._inbox.get(min(wait_s, max(0.0, self._watchdog.due_s - now)))
        if event is not None:
            self.handle(event)
        self.tick()

    def pump(self) -> int:
        """Handle everything that has arrived, without waiting; returns the number of events."""
        number = 0
        while (event := self._inbox.get()) is not None:
            self.handle(event)
            number += 1
        self.tick()
        return number

    def handle(self, event: LinkEvent | Letter) -> None:
        """Handle an event from the inbox."""
        match event:
            case Letter():
                self._on_letter(event)
            case Writable():
                self._sending.pump()
            case Connected():
                self._on_connected(event)
            case Disconnected(reason):
                log.warning("broker lost: %s", reason, extra={"facts": {"event": "disconnected"}})
                if self._away_since is None:
                    self._away_since = self._clock()
            case Refused(topic, reason):
                log.error("the broker refused %s: %s", topic, reason)
        self._proceed()

    def tick(self) -> None:
        """Act on deadlines that have passed."""
        now, deadline = self._now(), self._course.deadline
        if self._away_since is None and deadline is not None and now >= deadline:
            self._say(self._course.handle(events.Tick(), now))
            self._proceed()
        self._requests.serve(self)
        for device, reason in self._inbox.take_dropped().items():
            self._warn(device, reason)
        self._note_wait()
        if self._clock() >= self._idle_due_s:
            self._idle_due_s = self._clock() + IDLE_S
            for offer in self._receiving.drop_idle(self._clock()):
                log.info("dropped a stalled upload from %s", offer.device)

    def _note_wait(self) -> None:
        """Log what the run waits for, once it does."""
        now = self._clock()
        if now >= self._wait_due_s and self._away_since is None:
            self._wait_due_s = now + MAX_WAIT_S
            if said := self._waits.note(self._course.waits_for, now):
                self._watchdog.status(said)

    def release(self, device: str) -> None:
        """Hold nothing against a device any more."""
        log.info("%s is released", device, extra={"facts": {"event": "released", "device": device}})
        self._say(self._course.handle(events.Released(device), self._now()))

    def forget(self, device: str, by: str) -> Forgotten:
        """Let go of all that is kept of a device. Raises `ConfigError` while a round closes."""
        if isinstance(self._course, FragmentsCourse):
            raise ConfigError(
                "an asynchronous run keeps nothing of a device: its movements are in the model"
            )
        return self._course.forget(device, lambda memory: forget(self._run, memory, device, by))

    def close(self) -> None:
        """Save what can be saved and leave the broker."""
        self._watchdog.stopping()
        try:
            self._say(self._course.close())
        finally:
            self._publisher.say_presence(Presence(name=NAME, session=self._session, online=False))
            self._link.close()
            self._store.close()

    def kill(self) -> None:
        """Stop as a crash would."""
        self._course.kill()
        self._link.kill()
        self._store.close()

    def _now(self) -> float:
        """Time of the state machine: seconds connected to a broker."""
        present = self._clock() if self._away_since is None else self._away_since
        return present - self._lost_s

    def _wait_s(self) -> float:
        deadline = self._course.deadline
        if deadline is None or self._away_since is not None:
            return MAX_WAIT_S
        return min(max(deadline - self._now(), 0.0), MAX_WAIT_S)

    def _proceed(self) -> None:
        """Do the work that was waiting for chunks to be sent."""
        if not self._publisher.drained:
            return
        newcomers, self._newcomers = self._newcomers, []
        for device in newcomers:
            if device in self._present:
                self._say(self._course.handle(events.Joined(device), self._now()))
        self._say(self._course.proceed(self._now()))

    # -- the link ---------------------------------------------------------------------------

    def _on_connected(self, event: Connected) -> None:
        log.info("connected to the broker", extra={"facts": {"event": "connected"}})
        if self._away_since is not None:
            self._lost_s += self._clock() - self._away_since
            self._away_since = None
        if event.first:
            # Only now: devices answer at once, and earlier their answers would be missed.
            self._publisher.say_presence(Presence(name=NAME, session=self._session, online=True))
        else:
            self._publisher.say_again()
            self._say(self._course.say_again())
        self._sending.pump()

    def _on_letter(self, letter: Letter) -> None:
        topic, device = letter.topic, letter.topic.device
        if device is None or topic.task != self._run.about.task:
            return
        try:
            if topic.kind is TopicKind.UP_CHUNK:
                self._on_chunk(device, letter.payload)
            elif letter.payload:  # a cleared presence is empty
                message = decode_received(topic, letter.payload)
                if self._callers.admit(device):
                    self._on_message(topic, device, message)
        except MessageError as error:
            self._warn(device, str(error))
        except RunError:
            raise
        except Exception:
            log.exception("dropped a message from %s", device)

    def _on_message(self, topic: Topic, device: str, message: ControlMessage) -> None:
        if isinstance(message, Presence):
            self._on_presence(device, message)
            return
        if topic.kind is not TopicKind.UP_CONTROL:
            return
        self._joined(device)
        match message:
            case Bid() if message.run == self._run.about.run:
                self._say(self._course.handle(message, self._now()))
            case Offer():
                self._on_offer(device, message)
            case Want():
                self._publisher.answer(message)
            case Evaluation() if message.run == self._run.about.run:
                self._parts.heard(device, message)
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
        log.info("%s joined", device, extra={"facts": {"event": "joined", "device": device}})
        if self._publisher.drained and self._away_since is None:
            self._say(self._course.handle(events.Joined(device), self._now()))
        else:
            self._newcomers.append(device)

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
            self._callers.check_offer(device)
        answer = self._receiving.offered(device, offer, self._clock())
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
        self._say(self._course.handle(event, self._now()))

    # -- saying -----------------------------------------------------------------------------

    def _say(self, said: list[Said]) -> None:
        run = self._run.about.run
        for each in said:
            match each:
                case events.Broadcast(RoundClosed()) if not self.finished:
                    pass  # The next opening implies it; a closing alone would mean the run's end.
                case events.Broadcast(message):
                    log.info(
                        "round %d %s",
                        message.round,
                        _news(message),
                        extra={"facts": {"event": "round", "round": message.round}},
                    )
                    surveys = isinstance(message, Survey)
                    self._inbox.max_bytes = self._finding_bytes if surveys else MAX_MESSAGE_BYTES
                    self._publisher.say_round(replace(message, run=run))
                case events.Send(_, RoundOpen(round=round)) if isinstance(
                    self._machine, RoundsConfig
                ) and not self._machine.invites(round):
                    pass  # The opening is retained, so newcomers find it.
                case events.Send(device, message):
                    self._tell(device, replace(message, run=run))
                case events.Accept(offer):
                    self._accept(offer)

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
