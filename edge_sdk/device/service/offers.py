"""The tasks that a broker has: what coordinators announce, retained, for everybody."""

from __future__ import annotations

import difflib
import queue
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from edge_sdk.device.service.ending import BrokerError
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import EVERY_COORDINATOR, EVERY_TASK, TopicKind, parse_topic
from edge_sdk.protocol.messages.transfer import Presence, TaskNotice
from edge_sdk.protocol.messages.wire import decode_received
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
)
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings, DeniedError

FILTERS = (EVERY_TASK, EVERY_COORDINATOR)
MAX_TASKS = 1_000
"""Most tasks that are noted; a hostile broker may send any number."""
MAX_LISTED = 20
QUIET_S = 1.0
"""Seconds without another task after which a list is complete."""
CONNECT_S = 20.0


@dataclass(frozen=True, slots=True)
class OfferedTask:
    """A task on a broker. `online`: its coordinator is there now."""

    name: str
    run: str
    online: bool


class TaskList:
    """Tasks heard of so far."""

    def __init__(self) -> None:
        self._runs: dict[str, str] = {}
        self._online: dict[str, bool] = {}

    def hear(self, received: Received) -> bool:
        """Note a message; True if it changed the list. Other messages are ignored."""
        try:
            topic = parse_topic(received.topic)
            if topic.kind not in (TopicKind.TASK, TopicKind.COORDINATOR):
                return False
            message = decode_received(topic, received.payload) if received.payload else None
        except MessageError:
            return False
        before = self.tasks
        known = self._runs if topic.kind is TopicKind.TASK else self._online
        if message is None:
            known.pop(topic.task, None)
        elif len(known) < MAX_TASKS or topic.task in known:
            if isinstance(message, TaskNotice):
                self._runs[topic.task] = message.run
            elif isinstance(message, Presence):
                self._online[topic.task] = message.online
        return self.tasks != before

    @property
    def tasks(self) -> tuple[OfferedTask, ...]:
        """All tasks by name."""
        return tuple(
            OfferedTask(name, run, self._online.get(name, False))
            for name, run in sorted(self._runs.items())
        )

    def advice(self, wanted: str) -> str:
        """Say that nobody offers a task, and which there are."""
        if not self._runs:
            return (
                f"nobody offers the task {wanted!r}, and the broker has no other: is its "
                "coordinator running, is this the right broker? Waiting for it"
            )
        names = [each.name for each in self.tasks]
        close = difflib.get_close_matches(wanted, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        has = ", ".join(names[:MAX_LISTED]) + (" and others" if len(names) > MAX_LISTED else "")
        return f"nobody offers the task {wanted!r}; the broker has {has}. {hint}Waiting for it"


def list_tasks(
    broker: BrokerSettings,
    name: str,
    *,
    opener: OpenLink | None = None,
) -> tuple[OfferedTask, ...]:
    """Connect and return the tasks of a broker. Raises `BrokerError`, `LinkError`."""
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    open_one = partial(open_link, broker) if opener is None else opener
    link = open_one(name=name, deliver=events.put)
    tasks, by = TaskList(), time.monotonic() + CONNECT_S
    connected, reason = False, "no answer"
    try:
        for each in FILTERS:
            link.subscribe(each)
        while (left := by - time.monotonic()) > 0:
            with suppress(queue.Empty):
                match events.get(timeout=left):
                    case Connected():
                        connected, by = True, time.monotonic() + QUIET_S
                    case Received() as received:
                        if tasks.hear(received) and connected:
                            by = time.monotonic() + QUIET_S
                    case Disconnected(reason, denials):
                        if denials:
                            raise DeniedError(f"the broker refuses this device: {reason}")
                    case Refused(topic, reason):
                        raise BrokerError(f"the broker does not let us read {topic}: {reason}")
    finally:
        link.close()
    if not connected:
        raise BrokerError(f"{broker.address}: no connection within {CONNECT_S:g} s: {reason}")
    return tasks.tasks
