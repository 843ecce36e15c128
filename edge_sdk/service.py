"""The device as a program: it finds its task on a broker and takes part until the run is finished.

    link's threads ──events──▶ loop: presence, chunks, uploads    never blocks
                                 │ messages           ▲ bids, uploads
                                 ▼                    │
                               one thread that fetches and trains (`training_thread.py`)

    Device(config, data)        async with … as device: await device.run()
    run_device(config, data)    the same, blocking

    TesseraError
    └── BrokerError      the broker cannot be reached in time, or does not let us take part

`DataError` says that the data is not what the task wants. Whatever else can pass is waited for:
a broker that is away, a coordinator that has not started, a task that does not come.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Any

from edge_sdk.config import ConfigError, DeviceConfig
from edge_sdk.datafolder import Data, load_data
from edge_sdk.fetching import ChunkCache, Fetcher
from edge_sdk.protocol.errors import MessageError, TesseraError
from edge_sdk.protocol.messages import (
    Assignment,
    Bid,
    Receipt,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.topics import Topic, TopicKind, Topics, parse_topic
from edge_sdk.protocol.transfer import Credit, Evaluation, Presence, TaskNotice
from edge_sdk.protocol.wire import ControlMessage, decode_received, encode_message
from edge_sdk.sending import Sending
from edge_sdk.stores import DeviceFolder
from edge_sdk.training_thread import (
    Broken,
    CoordinatorStarted,
    Inbox,
    NewRun,
    Over,
    Reconnected,
    Told,
    Training,
)
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
    open_link,
)
from edge_sdk.transport.uploads import Outgoing

log = logging.getLogger(__name__)

LINGER_S = 60.0
"""How long a device waits for its last receipts when the run is finished."""
STOP_S = 10.0
"""How long a training that is told to stop may take to do so."""


class BrokerError(TesseraError):
    """The broker cannot be reached in time, or does not let this device take part."""


@dataclass(frozen=True, slots=True)
class _Stop:
    """`stop` was called."""


_LoopEvent = LinkEvent | Told | _Stop


class DeviceService:
    """A device on a broker. Made once, run once."""

    def __init__(
        self,
        config: DeviceConfig,
        data: Data | None = None,
        *,
        open_link: OpenLink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`data` None: where the configuration says. `open_link` None: MQTT.

        Raises `DataError` for data that cannot be loaded, `ConfigError` when there is none.
        """
        source = config.data if data is None else data
        if source is None:
            raise ConfigError(
                'data is missing: write data = "…" into the configuration: a folder of .npz files, '
                "or file.py:function"
            )
        self.config = config
        self.data = load_data(source)
        self._open_link = open_link
        self._clock = clock
        self._topics = Topics(config.task)
        self._events: queue.SimpleQueue[_LoopEvent] = queue.SimpleQueue()
        self._inbox = Inbox()
        self._stopping = False
        self._finished_run: str | None = None
        self._linger_until = math.inf
        self._coordinator: int | None = None
        self._online = False
        self._ever_online = False
        self._last_reason = "no answer yet"

    def stop(self) -> None:
        """Let `run` end soon, from any thread or a signal handler; what is unsent stays on disk."""
        self._stopping = True
        self._events.put(_Stop())

    def run(self) -> None:
        """Take part until the run is finished, or `stop` is called. Blocks.

        Raises `BrokerError`, `DataError`, and `GraphError`, `PlanError` or `TrainingError` for a
        task that cannot be trained here; `LinkError` for settings that cannot work.
        """
        config, name = self.config, self.config.name
        folder = DeviceFolder(config.state_dir, config.task, name)
        self._session = folder.next_session()
        cache = ChunkCache(folder.chunks, config.cache_mb * 2**20)
        opener = partial(open_link, config.broker) if self._open_link is None else self._open_link
        will = Will(self._topics.presence(name), self._presence(online=False))
        link = opener(name=name, deliver=self._events.put, will=will)
        try:
            self._serve(link, folder, cache)
        finally:
            self._goodbye(link)

    def _serve(self, link: Link, folder: DeviceFolder, cache: ChunkCache) -> None:
        name, topics = self.config.name, self._topics
        self._link = link
        self._sending = Sending(link, topics, name)
        self._fetcher = Fetcher(link, topics, name, cache, should_stop=lambda: self._stopping)
        link.subscribe(topics.coordinator)
        link.subscribe(topics.task)
        link.subscribe(topics.round)
        link.subscribe(topics.down_control(name))
        link.subscribe(topics.down_chunks(name), bulk=True)
        self._needed = {topics.task, topics.round, topics.down_control(name)}
        training = Training(
            self.config,
            self.data,
            folder,
            self._fetcher,
            self._inbox,
            publish=self._publish,
            tell=self._events.put,
            is_over=lambda run: self._stopping or self._finished_run == run,
            clock=self._clock,
        )
        thread = Thread(target=training.run, name=f"{name}-training", daemon=True)
        thread.start()
        try:
            self._loop()
        finally:
            self._stopping = True
            self._inbox.close()
            self._fetcher.wake()
            thread.join(STOP_S)

    def _loop(self) -> None:
        give_up = self._clock() + (self.config.connect_s or math.inf)
        while not self._stopping:
            now = self._clock()
            if not self._ever_online and now >= give_up:
                raise BrokerError(
                    f"no connection within {self.config.connect_s:g} s: {self._last_reason}"
                )
            if now >= self._linger_until:
                log.warning("the run is over; a movement without a receipt stays on disk")
                return
            if self._online:
                self._sending.offer_due(now)
            due = min(
                self._sending.due_s if self._online else math.inf,
                math.inf if self._ever_online else give_up,
                self._linger_until,
            )
            try:
                event = self._events.get(timeout=None if due == math.inf else max(0.0, due - now))
            except queue.Empty:
                continue
            if self._handle(event, self._clock()):
                return

    def _handle(self, event: _LoopEvent, now: float) -> bool:
        """Deal with an event; whether the device is done."""
        match event:
            case Connected(first):
                self._connected(first, now)
            case Disconnected(reason):
                self._online = False
                self._last_reason = reason
                log.warning("no connection: %s", reason)
            case Received(topic, payload, _):
                if payload:
                    self._received(topic, payload, now)
            case Refused(topic, reason):
                if topic in self._needed:
                    raise BrokerError(f"the broker does not give us {topic}: {reason}")
                log.warning("the broker refused %s: %s", topic, reason)
            case Writable(bulk):
                if bulk:
                    self._sending.flush()
            case Outgoing():
                self._sending.add(event, now)
            case NewRun():
                self._sending.clear()
                self._linger_until = math.inf
            case Over(run):
                if not self.config.stay and run == self._finished_run:
                    log.info("run %s is finished", run)
                    self._linger_until = now + LINGER_S
            case Broken(error):
                raise error
        return self._linger_until < math.inf and not self._sending.movements

    def _connected(self, first: bool, now: float) -> None:
        self._online = self._ever_online = True
        log.info("connected to %s", self.config.broker.address)
        self._link.publish(
            self._topics.presence(self.config.name), self._presence(online=True), retain=True
        )
        if not first:
            self._sending.offer_all(now)
            self._inbox.put(Reconnected())

    def _received(self, text: str, payload: bytes, now: float) -> None:
        try:
            topic = parse_topic(text)
            if topic.hash is not None:
                direct = topic.kind is TopicKind.DOWN_CHUNK
                self._fetcher.arrived(topic.hash, payload, direct=direct)
            else:
                self._told(topic, decode_received(topic, payload), now)
        except MessageError as error:
            log.warning("a message on %s is ignored: %s", text, error)

    def _told(self, topic: Topic, message: ControlMessage, now: float) -> None:
        match message:
            case Credit():
                if refused := self._sending.credited(message, now):
                    self._inbox.put(refused)
            case Presence():
                self._heard_coordinator(message, now)
            case Receipt():
                self._sending.receipted(message)
                self._inbox.put(message)
            case RoundOpen():
                if message.run == self._finished_run:
                    # The coordinator was told to go on after what had been the last round.
                    self._finished_run, self._linger_until = None, math.inf
                self._sending.drop_replays(message.round)
                self._inbox.put(message)
            case RoundClosed():
                if topic.kind is TopicKind.ROUND:
                    self._finished_run = message.run
                self._inbox.put(message)
            case TaskNotice() | Assignment():
                self._inbox.put(message)

    def _heard_coordinator(self, presence: Presence, now: float) -> None:
        if not presence.online:
            log.info("the coordinator is away")
            return
        if self._coordinator is not None and presence.session != self._coordinator:
            log.info("the coordinator was started again")
            self._sending.offer_all(now)
            self._inbox.put(CoordinatorStarted())
        self._coordinator = presence.session

    def _publish(self, message: Bid | Evaluation) -> None:
        self._link.publish(self._topics.up_control(self.config.name), encode_message(message))

    def _presence(self, *, online: bool) -> bytes:
        return encode_message(Presence(name=self.config.name, session=self._session, online=online))

    def _goodbye(self, link: Link) -> None:
        link.publish(
            self._topics.presence(self.config.name), self._presence(online=False), retain=True
        )
        link.close()


# -- for programs --------------------------------------------------------------------------------


class Device:
    """A device in an asyncio program.

        async with Device(config, data) as device:
            await device.run()

    `data` is arrays `(x, y)`, a function that loads them, or where either is; None: where the
    configuration says. Leaving the block, or cancelling `run`, stops the device.
    """

    def __init__(self, config: DeviceConfig, data: Data | None = None, **options: Any) -> None:
        """`options` are those of `DeviceService`, and raise what it raises."""
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
        """See `DeviceService.run`; the event loop goes on meanwhile."""
        import asyncio  # 5 MB that a device which runs alone has no use for

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
