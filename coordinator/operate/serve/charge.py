"""Take charge of a task at the start of a coordinator, unless another one has it.

The broker retains the claim of the last coordinator, its presence and its round. Compared with what
the run's folder knows, they tell whether this folder is the one that was served last:

| the broker retains | the folder | |
|---|---|---|
| no claim, or the folder's own or an earlier one | any | goes on |
| a later claim | was served before | refused: an old copy, or another machine has taken over |
| a later round of this run | was served before | refused: an old copy, or a restored backup |
| a coordinator that is online | new, or a copy | refused: it would be stopped |

A folder that was packed to move (`pack --move`) is refused whatever the broker retains.

`--take-over` goes on in all cases. Rounds then count on above those that devices have heard of, so
that no number of a round is used twice.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from coordinator.run.folder import Run
from coordinator.service.outgoing.fence import FencedError
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.epoch import Echo, Epoch, next_epoch
from edge_sdk.protocol.messages.round import RoundClosed, RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.topics import COORDINATOR, Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import decode_stamped, encode_message
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    LinkEvent,
    OpenLink,
    Received,
    Refused,
)
from edge_sdk.transport.settings import DeniedError

log = logging.getLogger(__name__)

LISTEN_S = 3.0
"""Seconds to listen for a coordinator whose connection may just have been taken by ours."""
ECHO_S = 15.0
"""Seconds to wait for our own message from a broker that may not give it to us."""
POLL_S = 0.2
MARGIN = 1
"""Rounds that another coordinator may open before it hears our claim."""


@dataclass(frozen=True, slots=True)
class LastServed:
    """Facts of a run's folder about its last coordinator."""

    epoch: Epoch | None
    session: int
    opened: int
    copied: bool
    moved: float | None = None
    """Unix seconds when the run was packed to go on elsewhere; None: it was not."""

    @classmethod
    def of(cls, run: Run) -> LastServed:
        """Return what a folder knows."""
        return cls(run.epoch, run.session, run.opened, run.copied, run.moved)


@dataclass(slots=True)
class RetainedFacts:
    """Facts of the broker about a task, as far as they were heard."""

    epoch: Epoch | None = None
    """The largest of all messages."""
    session: int | None = None
    """Session of a coordinator that is online."""
    round: int = 0
    """Newest round of our run that devices have heard of."""
    losses: int = 0
    """Connections that ended, perhaps because another program has our name."""

    def hear(self, received: Received, run: str) -> None:
        """Note a message. Raises `MessageError`."""
        message, epoch = decode_stamped(parse_topic(received.topic), received.payload)
        if isinstance(message, Echo):
            return
        if epoch is not None and (self.epoch is None or epoch > self.epoch):
            self.epoch = epoch
        if isinstance(message, Presence):
            self.session = message.session if message.online else None
        elif isinstance(message, RoundOpen | RoundClosed | Survey) and message.run == run:
            self.round = max(self.round, message.round)


def is_later(known: LastServed, seen: RetainedFacts) -> bool:
    """True if another coordinator was started after the last one of this folder."""
    return seen.epoch is not None and (known.epoch is None or seen.epoch > known.epoch)


def objection(known: LastServed, seen: RetainedFacts, task: str) -> str | None:
    """Say why a coordinator must not start without --take-over; None: it may."""
    served = known.epoch is not None
    cure = "and start once with --take-over to continue from this folder"
    if known.moved is not None:
        when = datetime.fromtimestamp(known.moved, timezone.utc)
        return (
            f"this run was packed to go on elsewhere ({when:%Y-%m-%d %H:%M} UTC, pack --move). "
            f"Serve the unpacked folder; or make sure that nobody does, {cure}"
        )
    if served and is_later(known, seen):
        return (
            f"another coordinator of task {task!r} was started after the last one of this folder "
            f"(epoch {seen.epoch} at the broker, {known.epoch} here): the folder is an old copy, "
            f"or another machine has taken over. Serve the other folder; or stop that one, {cure}"
        )
    if served and seen.round > known.opened:
        return (
            f"devices have heard of round {seen.round} of this run, but this folder knows only "
            f"{known.opened}: it is an old copy or a restored backup. Serve the newer folder; or "
            f"stop its coordinator, {cure}"
        )
    ours = seen.session == known.session and not known.copied
    if (not served or known.copied) and not ours and (seen.session is not None or seen.losses > 1):
        copy = ", and this folder is a copy of the one it serves" if known.copied else ""
        return (
            f"another coordinator of task {task!r} is online{copy}. Stop that one; or set another "
            "task.name; or start with --take-over, which makes the other stop"
        )
    return None


def take_charge(
    run: Run,
    open_link: OpenLink,
    *,
    take_over: bool,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
    listen_s: float = LISTEN_S,
) -> Epoch | None:
    """Return the epoch of this start, noted in the folder; None: a stop was requested.

    Waits until the broker answers. Raises `FencedError` if another coordinator has the task, and
    `DeniedError` if the broker refuses us.
    """
    instance, task, known = secrets.token_hex(8), run.about.task, LastServed.of(run)
    seen = _look(run, open_link, instance, known, stop, clock, listen_s)
    if seen is None:
        return None
    why = objection(known, seen, task)
    if why is not None and not take_over:
        raise FencedError(f"{run.folder}: {why}")
    epoch = run.take_epoch(instance, seen.epoch)
    if seen.round > known.opened:
        run.note_opened(seen.round + MARGIN)
    if why is not None:
        log.warning("taking over: %s", why, extra={"facts": {"event": "taken_over"}})
    elif known.copied:
        log.warning(
            "%s is a copy of the folder that was served last; the broker has heard of nothing "
            "newer, so the run goes on here",
            run.folder,
            extra={"facts": {"event": "copied"}},
        )
    return epoch


def _look(
    run: Run,
    open_link: OpenLink,
    instance: str,
    known: LastServed,
    stop: threading.Event,
    clock: Callable[[], float],
    listen_s: float,
) -> RetainedFacts | None:
    """Connect, and return what the broker retains; None: a stop was requested.

    A broker that takes client ids from certificates ends the connection of another coordinator for
    ours. Its will then hides that it is online, but it soon returns and ends our connection: so
    where it matters, we listen on.
    """
    task, topics = run.about.task, Topics(run.about.task)
    events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
    echo = encode_message(Echo(number=0), next_epoch(instance))
    seen, until, connected = RetainedFacts(), float("inf"), False
    link = open_link(name=f"{COORDINATOR}-{task}-{instance[:8]}", deliver=events.put)
    try:
        for topic in (topics.epoch, topics.coordinator, topics.round, topics.echo):
            link.subscribe(topic)
        while clock() < until:
            if stop.is_set():
                return None
            try:
                event = events.get(timeout=POLL_S)
            except queue.Empty:
                continue
            match event:
                case Connected():
                    connected, until = True, clock() + ECHO_S
                    link.publish(topics.echo, echo)
                case Disconnected(reason, denials):
                    if denials:
                        raise DeniedError(f"the broker refuses the coordinator: {reason}")
                    log.warning("no connection: %s; trying again", reason)
                    seen.losses, until = seen.losses + connected, float("inf")
                    connected = False
                    if seen.losses > 1:
                        break
                case Refused(topic, reason):
                    log.warning("the broker refused %s: %s", topic, reason)
                    break
                case Received(topic, payload) if topic == topics.echo and payload == echo:
                    foreign = known.copied or is_later(known, seen)
                    until = clock() + (listen_s if foreign else 0.0)
                    if foreign and objection(known, seen, task) is not None:
                        break  # there is nothing more to learn
                case Received(payload=payload) if payload:
                    with suppress(MessageError):
                        seen.hear(event, run.about.run)
                case _:
                    pass
        return seen
    finally:
        link.close(flush=False)
