"""Server-sent events: what changed in a run, at most one message of each kind a second.

All streams of a run look at it at the same moment, so streams that keep up share one answer: it is
made once, however many watch. A stream that is slow skips moments, and gets all changes at once.
The id of an event names the process, the sequence and the round it goes up to; a browser sends it
back when it connects again, and gets what it missed.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from coordinator.operate.http.answers.calls import Calls, to_json
from coordinator.operate.http.refusal import RefusalError
from coordinator.operate.http.viewed import ViewedRun

MAX_STREAMS = 32
EVERY_S = 1.0
QUIET_S = 15.0
"""Seconds without an event after which a comment shows that the stream is alive."""
RETRY_MS = 2_000

_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,18})\.([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A place in a run's changes: up to where somebody knows them."""

    sequence: int = 0
    round: int = 0


class Streams:
    """All streams of events. For the server's loop."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._process = secrets.token_hex(4)
        self._open = 0
        self._ending = asyncio.Event()
        self._moment = 0
        self._made: dict[tuple[str, StreamPlace], asyncio.Task[tuple[bytes, StreamPlace]]] = {}

    def __len__(self) -> int:
        return self._open

    def end(self) -> None:
        """End all streams, soon."""
        self._ending.set()

    def place(self, header: str | None) -> StreamPlace | None:
        """Read the header Last-Event-ID; None: it is not of this process."""
        match = _ID.fullmatch(header or "")
        if match is None or match[1] != self._process:
            return None
        return StreamPlace(int(match[2]), int(match[3]))

    def open(
        self, run: ViewedRun, start: StreamPlace, may: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Return the events of a run behind `start`, until `may` is false or `end` is called.

        Raises `RefusalError` if there are too many streams.
        """
        if self._open >= MAX_STREAMS:
            raise RefusalError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{MAX_STREAMS} streams of events are open, which is the most: close a page",
                retry_s=30,
            )
        return self._events(run, start, may)

    async def _events(
        self, run: ViewedRun, place: StreamPlace, may: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            loop = asyncio.get_running_loop()
            yield b"retry: %d\n\n" % RETRY_MS
            spoken, first = loop.time(), True
            while may() and not self._ending.is_set():
                if first or run.overview.sequence != place.sequence:
                    text, place = await self._changes(run, place)
                    yield text
                    spoken, first = loop.time(), False
                elif loop.time() - spoken >= QUIET_S:
                    yield b": alive\n\n"
                    spoken = loop.time()
                await self._next_moment()
        finally:
            self._open -= 1

    async def _next_moment(self) -> None:
        """Wait for the next whole second of the loop's clock, or for the end."""
        now = asyncio.get_running_loop().time()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ending.wait(), EVERY_S - now % EVERY_S)

    async def _changes(self, run: ViewedRun, place: StreamPlace) -> tuple[bytes, StreamPlace]:
        moment = int(asyncio.get_running_loop().time() / EVERY_S)
        if moment != self._moment:
            self._moment = moment
            self._made.clear()
        key = (run.task, place)
        if (task := self._made.get(key)) is None:
            task = asyncio.ensure_future(self._calls.read(lambda: self._render(run, place)))
            self._made[key] = task
        return await asyncio.shield(task)

    def _render(self, run: ViewedRun, place: StreamPlace) -> tuple[bytes, StreamPlace]:
        """Write the events behind `place`; returns the new place as well."""
        view = run.overview
        sequence = view.sequence  # before the rest: what changes meanwhile is told again
        since = place if place.sequence <= sequence else StreamPlace()
        status, devices = view.status(), view.devices(since.sequence)
        rounds = view.rounds(since.round)
        last = max([since.round, *(row["round"] for row in rounds)])
        end = StreamPlace(sequence, last)
        name = f"{self._process}-{end.sequence}.{end.round}".encode()
        parts: list[tuple[bytes, object]] = [(b"status", status)]
        parts += [
            (kind, rows) for kind, rows in ((b"devices", devices), (b"rounds", rounds)) if rows
        ]
        # The id stands in the last one: a stream that breaks off before it is repeated.
        text = b"".join(
            b"event: %s\n%sdata: %s\n\n"
            % (kind, b"id: %s\n" % name if number == len(parts) else b"", to_json(content))
            for number, (kind, content) in enumerate(parts, 1)
        )
        return text, end
