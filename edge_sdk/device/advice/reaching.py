"""A short visit to the broker: is it there, does it let us in, what does it know of the task?"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from edge_sdk.device.config import DeviceConfig
from edge_sdk.device.service.ending import BrokerError
from edge_sdk.device.service.offers import TaskList
from edge_sdk.device.service.participation import FetchBlob
from edge_sdk.device.transfer.chunk_cache import ChunkCache
from edge_sdk.device.transfer.fetching import Fetcher
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.topics import EVERY_TASK, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import TaskNotice
from edge_sdk.protocol.messages.wire import decode_received
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
)
from edge_sdk.transport.opening import open_link as open_mqtt
from edge_sdk.transport.settings import DeniedError

VISITOR = "-check"
"""Ending of the connection's name, so that a broker does not take it for the device itself."""
TASK_S = 3.0
"""Seconds to wait for a task that the broker retains."""
CACHE_BYTES = 2**30


class Visit(NamedTuple):
    """Facts about the task on the broker; None: there is nothing."""

    notice: TaskNotice | None
    opened: RoundOpen | None
    fetch: FetchBlob
    tasks: tuple[str, ...] = ()
    """Names of all tasks that the broker has, as far as it tells."""


@contextmanager
def visit_broker(
    config: DeviceConfig, *, wait_s: float, open_link: OpenLink | None = None
) -> Iterator[Visit]:
    """Connect beside the device, look for its task, and stay for as long as the context lasts.

    Raises `BrokerError` when the broker does not answer within `wait_s`, `DeniedError` when it
    refuses us, and `LinkError` for settings that cannot work.
    """
    topics = Topics(config.task)
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    fetcher: Fetcher | None = None

    def deliver(event: LinkEvent) -> None:
        if isinstance(event, Received) and fetcher is not None and _is_chunk(event, fetcher):
            return
        events.put(event)

    opener = partial(open_mqtt, config.broker) if open_link is None else open_link
    link = opener(name=config.name + VISITOR, deliver=deliver)
    try:
        with TemporaryDirectory(prefix="tessera-check-") as folder:
            cache = ChunkCache(Path(folder) / "chunks", CACHE_BYTES)
            fetcher = Fetcher(link, topics, config.name, cache)
            own = (topics.task, topics.round, topics.down_control(config.name))
            for topic in (*own, EVERY_TASK):
                link.subscribe(topic)
            link.subscribe(topics.down_chunks(config.name), bulk=True)
            _await_connection(events, wait_s)
            yield _look(events, topics, fetcher)
    finally:
        link.close()


def _is_chunk(event: Received, fetcher: Fetcher) -> bool:
    try:
        topic = parse_topic(event.topic)
    except MessageError:
        return False
    if topic.hash is None:
        return False
    fetcher.arrived(topic.hash, event.payload, direct=topic.device is not None)
    return True


def _await_connection(events: queue.SimpleQueue[LinkEvent], wait_s: float) -> None:
    until, reason = time.monotonic() + wait_s, "no answer"
    kept: list[LinkEvent] = []
    while (left := until - time.monotonic()) > 0:
        try:
            event = events.get(timeout=left)
        except queue.Empty:
            break
        if isinstance(event, Connected):
            for each in kept:  # messages may come shortly before the connection is complete
                events.put(each)
            return
        if isinstance(event, Disconnected):
            reason = event.reason
            if event.denials:
                raise DeniedError(f"the broker refuses this device: {reason}")
        else:
            kept.append(event)
    raise BrokerError(f"no connection within {wait_s:g} s: {reason}")


def _look(events: queue.SimpleQueue[LinkEvent], topics: Topics, fetcher: Fetcher) -> Visit:
    notice: TaskNotice | None = None
    opened: RoundOpen | None = None
    heard = TaskList()
    until = time.monotonic() + TASK_S
    while notice is None or opened is None:
        left = (until if notice is None else min(until, time.monotonic() + 0.2)) - time.monotonic()
        try:
            event = events.get(timeout=max(0.0, left))
        except queue.Empty:
            break
        if isinstance(event, Refused) and event.topic == topics.task:
            raise BrokerError(f"the broker does not let this device read {event.topic}")
        if not isinstance(event, Received) or not event.payload:
            continue
        heard.hear(event)
        try:
            message = decode_received(parse_topic(event.topic), event.payload)
        except MessageError:
            continue
        if isinstance(message, TaskNotice) and event.topic == topics.task:
            notice = message
        elif isinstance(message, RoundOpen):
            opened = message
    return Visit(notice, opened, fetcher.fetch_blob, tuple(each.name for each in heard.tasks))
