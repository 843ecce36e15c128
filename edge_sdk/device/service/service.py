"""The device as a program: it finds its task on a broker and takes part until the run is finished.

    link's threads ──events──▶ loop: presence, chunks, bids, uploads    never blocks
                                 │ inbox: messages           ▲ queue: bids, uploads
                                 ▼                           │
                               one thread that fetches and trains (`training_thread.py`)

    Device(config, data)        async with … as device: await device.run()
    run_device(config, data)    the same, blocking

`DataError` means that the data does not fit the task. The device waits out whatever may pass: an
absent broker, a coordinator that has not started, a task that does not come.

A device listens to its own presence. If that does not come back, its messages do not reach the
broker, and it connects again. Of two programs with one name, the one with the higher session stays.
A higher session that is retained when the device starts belongs to an earlier start, or to one that
does not share its folder: the device then takes a session above it.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Any

from edge_sdk.data.function import Data
from edge_sdk.data.source import open_data
from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.allegiance import Allegiance
from edge_sdk.device.service.ending import (
    FINISHED,
    STOPPED,
    VANISHED,
    BrokerError,
    Ending,
    ReplacedError,
    ending_of,
)
from edge_sdk.device.service.offers import FILTERS, TaskList
from edge_sdk.device.service.training_thread import (
    Broken,
    CoordinatorStarted,
    GiveUp,
    NewRun,
    Orders,
    Over,
    Reconnected,
    Told,
    Training,
)
from edge_sdk.device.stores import pause
from edge_sdk.device.stores.household import Household
from edge_sdk.device.stores.logbook import Logbook
from edge_sdk.device.stores.movements import DeviceFolder
from edge_sdk.device.transfer.chunk_cache import ChunkCache
from edge_sdk.device.transfer.fetching import Fetcher
from edge_sdk.device.transfer.sending import Sending
from edge_sdk.machine.snapshot import Probe
from edge_sdk.program.logs import Seldom, fact
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.protocol.errors import ConfigError, MessageError
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.delivery import ModelNotice
from edge_sdk.protocol.messages.epoch import Epoch
from edge_sdk.protocol.messages.round import (
    Assignment,
    Bid,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey, SurveyFinding
from edge_sdk.protocol.messages.topics import Topic, TopicKind, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Complaint, Credit, Evaluation, Presence, TaskNotice
from edge_sdk.protocol.messages.wire import (
    ControlMessage,
    decode_stamped,
    encode_message,
    may_be_message,
)
from edge_sdk.transport.counted import CountedLink
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    Link,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
    Will,
    Writable,
)
from edge_sdk.transport.mqtt.certificates import certificate_advice
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import DeniedError
from edge_sdk.transport.uploads import Outgoing

log = logging.getLogger(__name__)

LINGER_S = 60.0
"""Seconds that a device waits for its last receipts when the run is finished."""
STOP_S = 10.0
"""Seconds that a training may take to stop."""
DENIALS, LATER_DENIALS = 3, 20
"""Refusals in a row after which the device stops: by a broker that never accepted it, and by one
that did and may just be under maintenance (then it takes minutes)."""
TASK_S, ANSWER_S = 5.0, 2.0
"""Seconds to wait for our task before we ask which there are, and for the answers to that."""
ROUND_S = 20.0
"""Seconds without a round after which a device says that it waits for one."""
MAX_WAIT_S = 2.0
"""Longest wait for an event, in seconds. A signal that comes just before a wait is only noticed
when the wait ends."""
MAX_SESSION = 2**52
"""Highest session that a device believes. Counting on from a higher one would soon leave the range
of a message."""


@dataclass(frozen=True, slots=True)
class _Look:
    """`stop` was called, or the pause has changed: something is to be looked at."""


_LoopEvent = LinkEvent | Told | _Look


class DeviceService:
    """A device on a broker. Made once, run once."""

    def __init__(
        self,
        config: DeviceConfig,
        data: Data | None = None,
        *,
        open_link: OpenLink | None = None,
        clock: Callable[[], float] = time.monotonic,
        watchdog: Watchdog | None = None,
        probe: Probe | None = None,
        household: Household | None = None,
    ) -> None:
        """`data` None: as configured. `open_link` None: MQTT. `watchdog` speaks for the whole
        process, so only a program passes one; None: no watchdog. `probe` tells what the device can
        afford, such as the `PushedProbe` of a host app; None: this machine's sensors. `household`
        is what this task shares with others of the device; None: there are none.

        Raises `DataError` for data that is not there, `ConfigError` when there is none, and for
        settings that name several tasks (`SeveralTasks`).
        """
        if config.tasks:
            raise ConfigError(
                "tasks names several tasks, and this is a device of one: use `SeveralTasks` "
                "(edge_sdk.device.service.several), or tessera-device run"
            )
        source = config.data if data is None else data
        if source is None:
            raise ConfigError(
                'data is missing: write data = "…" into the configuration: a file or folder '
                "(docs/data.md), or file.py:function"
            )
        self.config = config
        self.source = open_data(source, config.format)
        self._open_link = open_link
        self._clock = clock
        self._watchdog = Watchdog() if watchdog is None else watchdog
        self._probe = probe
        self._household = household or Household(config.state_dir, config.name)
        self._paused = False
        self.logbook: Logbook | None = None
        """Notes for the owner; None: not started yet."""
        self._topics = Topics(config.task)
        self._events: queue.SimpleQueue[_LoopEvent] = queue.SimpleQueue()
        self._inbox = Orders()
        self._stopping = False
        self._ending: Ending = FINISHED
        self._finished_run: str | None = None
        self._finished_round = 0
        """The finished run's last round. A later one reopens the run; any other is an old message,
        unless the coordinator was started again and goes back."""
        self._opened_behind = False
        """True if such an old message came since the run was finished."""
        self._linger_until = math.inf
        self._coordinator: int | None = None
        self._online = False
        self._ever_online = False
        self._replaced = False
        self._known = False
        """True once our presence came back: a higher session is a newer program from then on."""
        self._echoes = True
        """False if the broker does not let us hear our own presence."""
        self._echo_due_s = math.inf
        self._announced = False
        """True once our task was announced."""
        self._offers = TaskList()
        self._offers_due_s = math.inf
        self._offers_asked = False
        self._round_due_s = math.inf
        self._last_reason = "no answer yet"
        self._ignored = Seldom()

    def stop(self) -> None:
        """Let `run` end soon, from any thread or signal handler; unsent movements stay on disk."""
        self._stopping = True
        self._ending = STOPPED
        self._events.put(_Look())

    def look(self) -> None:
        """Let the loop look at the pause now, from any thread; it does so anyway, but later."""
        self._events.put(_Look())

    def run(self) -> None:
        """Take part until the run is finished, or `stop` is called. Blocks.

        Raises `BrokerError`, `ReplacedError`, `DataError`, and `GraphError`, `PlanError` or
        `TrainingError` for a task that cannot be trained here; `LinkError` for settings that
        cannot work, `DeniedError` for those that the broker keeps refusing.
        """
        config, name = self.config, self.config.name
        self._folder = folder = DeviceFolder(config.state_dir, config.task, name)
        self._session = folder.next_session()
        self.logbook = self._book = Logbook(config.task, folder.path)
        self._book.starts(self._session, config.broker.address)
        self._allegiance = Allegiance(folder.read_epoch(), folder.keep_epoch)
        cache = ChunkCache(folder.chunks, config.cache_mb * 2**20)
        opener = partial(open_link, config.broker) if self._open_link is None else self._open_link
        own = (config.broker.certificate, config.broker.bulk_certificate)
        for advice in certificate_advice(own, name, datetime.now(timezone.utc)):
            log.warning("%s", advice, extra=fact("certificate"))
        link: Link | None = None
        try:
            opened = opener(name=name, deliver=self._deliver, will=self._will())
            link = CountedLink(opened, self._book.sent)
            self._serve(link, folder, cache)
        except BaseException as error:
            self._ending = ending_of(error)
            raise
        finally:
            self._watchdog.stopping()
            if link is not None:
                self._goodbye(link)
            self._book.ends(self._ending.code, self._ending.said)

    def _serve(self, link: Link, folder: DeviceFolder, cache: ChunkCache) -> None:
        name, topics = self.config.name, self._topics
        self._link = link
        self._sending = Sending(link, topics, name)
        self._fetcher = Fetcher(
            link, topics, name, cache, should_stop=lambda: self._stopping, clock=self._clock
        )
        link.subscribe(topics.presence(name))
        self._listen()
        link.subscribe(topics.down_control(name))
        link.subscribe(topics.down_chunks(name), bulk=True)
        self._needed = {topics.task, topics.round, topics.down_control(name)}
        training = Training(
            self.config,
            self.source,
            folder,
            self._fetcher,
            self._inbox,
            tell=self._events.put,
            is_over=lambda run: self._stopping or self._finished_run == run,
            clock=self._clock,
            probe=self._probe,
            household=self._household,
            book=self._book,
        )
        context = copy_context()  # the task's name in the log
        thread = Thread(
            target=context.run, args=(training.run,), name=f"{name}-training", daemon=True
        )
        thread.start()
        try:
            self._loop()
        finally:
            self._stopping = True
            self._inbox.close()
            self._fetcher.wake()
            thread.join(STOP_S)
            self._publish_rest()

    def _listen(self) -> None:
        """Subscribe to what the coordinator tells everybody; the broker sends what it retains."""
        link, topics = self._link, self._topics
        link.subscribe(topics.epoch)  # first, to know whom to obey
        link.subscribe(topics.coordinator)
        link.subscribe(topics.task)
        if self.config.deliver != "off":
            link.subscribe(topics.model(self.config.deliver))
        if self.config.tries_models:
            link.subscribe(topics.model("canary"))
        link.subscribe(topics.round)

    def _loop(self) -> None:
        give_up = self._clock() + (self.config.connect_s or math.inf)
        self._watchdog.ready("waiting for the broker")
        while not self._stopping:
            now = self._clock()
            self._watchdog.alive(now)
            self._book.save_due()
            self._check_pause()
            if not self._ever_online and now >= give_up:
                raise BrokerError(
                    f"no connection within {self.config.connect_s:g} s: {self._last_reason}"
                )
            if now >= self._linger_until:
                log.warning("the run is over; a movement has no receipt and stays on disk")
                return
            if self._online:
                self._sending.offer_due(now)
                self._check_echo(now)
                self._check_task(now)
                if self._allegiance.give_up(now):
                    self._listen()
            due = min(
                min(
                    self._sending.due_s,
                    self._echo_due_s,
                    self._offers_due_s,
                    self._round_due_s,
                    self._allegiance.due_s,
                )
                if self._online
                else math.inf,
                math.inf if self._ever_online else give_up,
                self._linger_until,
                self._watchdog.due_s,
            )
            try:
                event = self._events.get(timeout=min(MAX_WAIT_S, max(0.0, due - now)))
            except queue.Empty:
                continue
            if self._handle(event, self._clock()):
                return

    def _handle(self, event: _LoopEvent, now: float) -> bool:
        """Process an event; return True when the device is done."""
        done = self._handled(event, now)
        self._book.uploads(*self._sending.stages)
        return done

    def _handled(self, event: _LoopEvent, now: float) -> bool:
        match event:
            case Connected(first):
                self._connected(first, now)
            case Disconnected(reason, denials):
                self._online = False
                self._last_reason = reason
                self._book.link(connected=False, reason=reason)
                log.warning("no connection: %s", reason, extra=fact("disconnected"))
                self._watchdog.status(f"no connection: {reason}")
                if denials >= (LATER_DENIALS if self._ever_online else DENIALS):
                    raise DeniedError(f"the broker refused this device {denials} times: {reason}")
            case Received(topic, payload, retained):
                self._received(topic, payload, retained, now)
            case Refused(topic, reason) if topic in FILTERS:
                log.debug("the broker does not list its tasks: %s", reason)
            case Refused(topic, reason):
                if topic in self._needed:
                    raise BrokerError(f"the broker does not let this device read {topic}: {reason}")
                log.warning("the broker refused %s: %s", topic, reason, extra=fact("refused"))
            case Writable(bulk):
                if bulk:
                    self._sending.flush()
            case Bid() | Evaluation() | SurveyFinding() | Condition():
                self._publish(event)
            case Outgoing():
                self._sending.add(event, now)
            case NewRun():
                self._sending.clear()
                self._linger_until = math.inf
            case Over(run):
                if not self.config.stay and run == self._finished_run:
                    log.info("run %s is finished", run, extra=fact("run_finished", run=run))
                    self._linger_until = now + LINGER_S
            case Broken(error):
                raise error
        return self._linger_until < math.inf and not self._sending.movements

    def _connected(self, first: bool, now: float) -> None:
        self._online = self._ever_online = True
        address, extra = self.config.broker.address, fact("connected", first=first)
        log.info("connected to %s%s", address, "" if first else " again", extra=extra)
        self._watchdog.status(f"takes part in {self.config.task}")
        self._book.link(connected=True)
        self._say_presence()
        self._echo_due_s = now + 2 * self.config.broker.keepalive_s
        if not self._announced and not self._offers_asked:
            self._offers_due_s = now + TASK_S
        if not first:
            self._sending.offer_all(now)
            self._inbox.put(Reconnected())

    def _check_pause(self) -> None:
        """Withdraw what the device does when its owner pauses it; uploads go on."""
        paused, before = self._household.pause.active, self._paused
        if paused == before:
            return
        self._paused = paused
        if not paused:
            log.info("no longer paused", extra=fact("resumed_by_owner"))
            return
        log.info("%s: nothing is trained until it is resumed", pause.REASON, extra=fact("paused"))
        self._watchdog.status(pause.REASON)
        self._inbox.put(GiveUp(pause.REASON, "paused"))
        self._fetcher.wake()

    # -- presence ---------------------------------------------------------------------------

    def _heard_ourselves(self, presence: Presence, *, retained: bool) -> None:
        """Process a presence under our name: ours, of an earlier start, or of another program."""
        if presence.session == self._session:
            if presence.online:
                self._known = self._known or not retained
                self._echo_due_s = math.inf if not retained else self._echo_due_s
            elif self._online:
                self._say_presence()  # that was the will of a connection that we replaced
        elif presence.session < self._session:
            if not retained and self._online:
                self._say_presence()  # replaces what is retained, and tells the older program
        elif presence.session > MAX_SESSION:
            log.warning("ignoring a presence with the impossible session %d", presence.session)
        elif retained and not self._known:
            self._session = self._folder.next_session(above=presence.session)
            self._link.reconnect(self._will())
        else:
            self._replaced = True
            raise ReplacedError(
                f"another program was started as {self.config.name!r} (session "
                f"{presence.session}, this one has {self._session}) and takes its place, so this "
                "one stops. Give two devices two names"
            )

    def _check_echo(self, now: float) -> None:
        if now < self._echo_due_s:
            return
        self._echo_due_s = math.inf
        if self._known:
            log.warning("our presence does not come back: connecting again", extra=fact("no_echo"))
            self._link.reconnect()
        elif self._echoes:
            self._echoes = False
            log.warning(
                "the broker does not let us read %s: lost messages, and two programs with this "
                "name, go unnoticed",
                self._topics.presence(self.config.name),
                extra=fact("no_echo"),
            )

    # -- the task ---------------------------------------------------------------------------

    def _check_task(self, now: float) -> None:
        """Say what we wait for: which tasks there are if ours does not come, or a round."""
        if now >= self._round_due_s:
            self._round_due_s = math.inf
            words = "waiting for a round: the coordinator may be waiting for more devices"
            log.info("%s", words, extra=fact("waiting"))
            self._watchdog.status(words)
        if now < self._offers_due_s:
            return
        if not self._offers_asked:
            self._offers_asked = True
            self._offers_due_s = now + ANSWER_S
            for each in FILTERS:
                self._link.subscribe(each)
            return
        self._offers_due_s = math.inf
        advice = self._offers.advice(self.config.task)
        log.warning("%s", advice, extra=fact("no_task", task=self.config.task))
        self._watchdog.status(advice)

    def _heard_offer(self, received: Received, now: float) -> None:
        """Note another task; say so again when the list changes."""
        if self._offers.hear(received) and self._offers_asked and not self._announced:
            self._offers_due_s = now + ANSWER_S

    def _found_task(self, now: float) -> None:
        """Stop looking for the task: it is here."""
        if not self._announced:
            self._round_due_s = now + ROUND_S
            for each in FILTERS if self._offers_asked else ():
                self._link.unsubscribe(each)
        self._announced, self._offers_due_s = True, math.inf

    def _say_presence(self) -> None:
        topic = self._topics.presence(self.config.name)
        self._link.publish(topic, self._presence(online=True), retain=True)

    # -- messages ---------------------------------------------------------------------------

    def _deliver(self, event: LinkEvent) -> None:
        """Queue an event of the link; called from its threads.

        Bytes that cannot be a message of our task are dropped here, where that costs least. Chunks
        go to the thread that waits for them.
        """
        if isinstance(event, Received):
            if event.payload:
                self._book.received(len(event.topic) + len(event.payload))
            try:
                topic = parse_topic(event.topic)
            except MessageError:
                return
            if topic.task == self.config.task and topic.hash is not None:
                direct = topic.kind is TopicKind.DOWN_CHUNK
                self._fetcher.arrived(topic.hash, event.payload, direct=direct)
                return
            ours = topic.task == self.config.task and event.payload
            if ours and not may_be_message(topic.kind, event.payload):
                self._ignore(event.topic, "bytes that are no message")
                return
        self._events.put(event)

    def _ignore(self, text: str, reason: str) -> None:
        if number := self._ignored.note():
            extra = fact("ignored", number=number)
            log.warning(
                "ignoring %d message(s), the last on %s: %s", number, text, reason, extra=extra
            )

    def _received(self, text: str, payload: bytes, retained: bool, now: float) -> None:
        try:
            topic = parse_topic(text)
            if topic.task != self.config.task:
                self._heard_offer(Received(text, payload, retained), now)
            elif payload:  # an empty one clears a topic
                message, epoch = decode_stamped(topic, payload)
                if topic.kind is TopicKind.PRESENCE and isinstance(message, Presence):
                    self._heard_ourselves(message, retained=retained)
                elif not self._obeys(topic.kind, message, epoch, now, retained=retained):
                    log.debug("ignoring a message of another coordinator on %s", text)
                elif topic.kind is TopicKind.COORDINATOR and isinstance(message, Presence):
                    self._heard_coordinator(message, now, retained=retained)
                else:
                    self._told(topic, message, now)
        except MessageError as error:
            self._ignore(text, str(error))

    def _obeys(
        self,
        kind: TopicKind,
        message: ControlMessage,
        epoch: Epoch | None,
        now: float,
        *,
        retained: bool,
    ) -> bool:
        """True if a message of a coordinator comes from the one in charge."""
        if isinstance(message, Presence) and not message.online:
            return self._coordinator in (None, message.session)  # wills carry no epoch
        heard_by_all = kind in (TopicKind.COORDINATOR, TopicKind.ROUND) and not retained
        contested = kind is TopicKind.EPOCH or heard_by_all
        return self._allegiance.hear(epoch, now, alive=not retained, contested=contested)

    def _told(self, topic: Topic, message: ControlMessage, now: float) -> None:
        if isinstance(message, RoundOpen | RoundClosed | Survey):
            self._round_due_s = math.inf
        match message:
            case Credit():
                if refused := self._sending.credited(message, now):
                    self._inbox.put(refused)
            case Receipt():
                self._sending.receipted(message)
                self._inbox.put(message)
            case RoundOpen():
                if message.run == self._finished_run:
                    if message.round > self._finished_round:
                        self._go_on()
                    else:
                        self._opened_behind = True
                self._sending.drop_replays(message.round)
                self._inbox.put(message)
                self._fetcher.wake()
            case RoundClosed():
                if topic.kind is TopicKind.ROUND:
                    self._finished_run, self._finished_round = message.run, message.round
                    self._opened_behind = False
                self._inbox.put(message)
                self._fetcher.wake()
            case TaskNotice() | Assignment() | Survey() | ModelNotice():
                if isinstance(message, TaskNotice):
                    self._found_task(now)
                self._inbox.put(message)
                self._fetcher.wake()
            case Complaint(reason=reason):
                extra = fact("complaint")
                log.warning("the coordinator drops our messages: %s", reason, extra=extra)

    def _go_on(self) -> None:
        """Reopen the finished run."""
        self._finished_run, self._linger_until = None, math.inf

    def _heard_coordinator(self, presence: Presence, now: float, *, retained: bool) -> None:
        self._book.coordinator(online=presence.online)
        if not presence.online:
            if self._household.slot is not None:
                self._household.slot.waive(self.config.task)
            log.info("the coordinator is away", extra=fact("coordinator_away"))
            return
        if self._coordinator is not None and presence.session != self._coordinator:
            log.info("the coordinator was started again", extra=fact("coordinator_started"))
            self._sending.offer_all(now)
            self._finished_round = 0
            if self._opened_behind:
                self._go_on()
            self._inbox.put(CoordinatorStarted())
        elif self._coordinator is not None and not retained:
            # It did not listen for a while, so messages may be lost.
            log.info("the coordinator is connected again", extra=fact("coordinator_back"))
            self._sending.offer_all(now)
            self._inbox.put(Reconnected())
        self._coordinator = presence.session

    def _publish_rest(self) -> None:
        """Publish what the training thread sent while it stopped, such as a withdrawn bid."""
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Bid | Evaluation | SurveyFinding | Condition):
                    self._publish(event)

    def _publish(self, message: Bid | Evaluation | SurveyFinding | Condition) -> None:
        self._link.publish(self._topics.up_control(self.config.name), encode_message(message))

    def _presence(self, *, online: bool, reason: str = "", exit_code: int | None = None) -> bytes:
        presence = Presence(
            name=self.config.name,
            session=self._session,
            online=online,
            reason=reason,
            exit_code=exit_code,
        )
        return encode_message(presence)

    def _will(self) -> Will:
        gone = self._presence(online=False, reason=VANISHED)
        return Will(self._topics.presence(self.config.name), gone)

    def _goodbye(self, link: Link) -> None:
        if not self._replaced:  # the retained presence is the other program's by now
            ending = self._ending
            gone = self._presence(online=False, reason=ending.told, exit_code=ending.code)
            link.publish(self._topics.presence(self.config.name), gone, retain=True)
        link.close()


# -- for programs --------------------------------------------------------------------------------


class Device:
    """A device in an asyncio program.

        async with Device(config, data) as device:
            await device.run()

    `data` is arrays `(x, y)`, a function that loads them, or the place of either; None: as
    configured. Leaving the block, or cancelling `run`, stops the device.
    """

    def __init__(self, config: DeviceConfig, data: Data | None = None, **options: Any) -> None:
        """Takes the options of `DeviceService` and raises what it raises."""
        self._service = DeviceService(config, data, **options)

    async def __aenter__(self) -> Device:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._service.stop()

    async def run(self) -> None:
        """Run the device in a thread of its own. See `DeviceService.run`."""
        import asyncio  # 5 MB that a device without an event loop does not need

        running = asyncio.ensure_future(asyncio.to_thread(self._service.run))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._service.stop()
            await running
            raise


def run_device(config: DeviceConfig, data: Data | None = None) -> None:
    """Take part until the run is finished. Blocks; see `DeviceService`."""
    DeviceService(config, data).run()
