"""A device that only bids and pulls the whole model: the downward part of a round."""

from __future__ import annotations

import queue
import threading
from contextlib import ExitStack
from pathlib import Path

from edge_sdk.device.transfer.chunk_cache import ChunkCache
from edge_sdk.device.transfer.fetching import Fetcher
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import Assignment, Bid, RoundOpen
from edge_sdk.protocol.messages.topics import Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import ControlMessage, decode_received, encode_message
from edge_sdk.protocol.packs.index import MAX_INDEX_BYTES, decode_index, needed_chunks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.transport.link import LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings

STOP_S = 10.0


class PullingDevice:
    """Runs for the duration of a context; `pulled` is set when it has the whole model."""

    def __init__(
        self, name: str, task: str, plan: ModelPlan, broker: BrokerSettings, folder: Path
    ) -> None:
        self.pulled = threading.Event()
        self.failure: Exception | None = None
        self._name = name
        self._plan = plan
        self._broker = broker
        self._folder = folder
        self._topics = Topics(task)
        self._said: queue.SimpleQueue[ControlMessage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> PullingDevice:
        topics, name = self._topics, self._name
        with ExitStack() as stack:
            self._link = open_link(self._broker, name=name, deliver=self._deliver)
            stack.callback(self._link.close)
            cache = ChunkCache(self._folder, 2**40)
            self._stopping = False
            self._fetcher = Fetcher(
                self._link, topics, name, cache, should_stop=lambda: self._stopping
            )
            self._thread.start()
            self._link.subscribe(topics.round)
            self._link.subscribe(topics.down_control(name))
            self._link.subscribe(topics.down_chunks(name), bulk=True)
            there = Presence(name=name, session=1, online=True)
            self._link.publish(topics.presence(name), encode_message(there), retain=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            self._stopping = True
            self._fetcher.wake()
            self._said.put(None)
            self._thread.join(STOP_S)

    def _deliver(self, event: LinkEvent) -> None:
        """Hand an event over; called on the link's threads."""
        if not isinstance(event, Received) or not event.payload:
            return
        topic = parse_topic(event.topic)
        if topic.hash is not None:
            direct = topic.device is not None
            self._fetcher.arrived(topic.hash, event.payload, direct=direct)
        else:
            self._said.put(decode_received(topic, event.payload))

    def _run(self) -> None:
        try:
            opened: RoundOpen | None = None
            while (message := self._said.get()) is not None:
                match message:
                    case RoundOpen():
                        opened = message
                        self._bid(opened)
                    case Assignment() if opened is not None:
                        self._pull(opened, message)
                        self.pulled.set()
                        return
        except Exception as error:
            self.failure = error

    def _bid(self, opened: RoundOpen) -> None:
        bid = Bid(
            device=self._name, round=opened.round, level=1.0, reason="full model", run=opened.run
        )
        self._link.publish(self._topics.up_control(self._name), encode_message(bid))

    def _pull(self, opened: RoundOpen, assignment: Assignment) -> None:
        if opened.model is None:
            raise MessageError(f"round {opened.round} does not say where its model is")
        data = self._fetcher.fetch_blob(opened.model, MAX_INDEX_BYTES, "the model's index")
        index = decode_index(self._plan, data)
        self._fetcher.fetch(needed_chunks(self._plan, index, assignment.groups))
