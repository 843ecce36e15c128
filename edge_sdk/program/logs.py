"""Logs of a program: for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

_scope: ContextVar[dict[str, Any]] = ContextVar("log scope", default={})  # noqa: B039  never changed


@contextmanager
def log_scope(**facts: Any) -> Iterator[None]:
    """Add facts to all records of this thread for the duration of the context.

    Text lines show their values in brackets before the message.
    """
    token = _scope.set(_scope.get() | facts)
    try:
        yield
    finally:
        _scope.reset(token)


def scope_of(name: str) -> Any:
    """Return the value of a fact that all records of this thread have; None: they have none."""
    return _scope.get().get(name)


class TextLines(logging.Formatter):
    """One line for people: time, level, logger, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """See `logging.Formatter`."""
        if scope := _scope.get():
            record.message = f"[{' '.join(map(str, scope.values()))}] {record.message}"
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """One JSON object per record, on one line: time (UTC), level, logger, message.

    Also `exception`, if any, the facts of `log_scope`, and those logged with `extra={"facts":
    {…}}`; a fact with one of these names appears as `fact_<name>`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        content: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in (_scope.get() | getattr(record, "facts", {})).items():
            content[f"fact_{name}" if name in content else name] = value
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False, default=str)


def fact(event: str, **facts: Any) -> dict[str, Any]:
    """Facts of a record for machines: `log.info("…", extra=fact("receipt", round=3))`."""
    return {"facts": {"event": event, **facts}}


class Seldom:
    """Lets a line of a log pass once in a while, for events that a stranger can cause at will."""

    def __init__(self, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._due_s = -math.inf
        self._held = 0

    def note(self) -> int:
        """Count an event; return how many to report now, this one included, or 0."""
        self._held += 1
        now = self._clock()
        if now < self._due_s:
            return 0
        number, self._held, self._due_s = self._held, 0, now + self._every_s
        return number


def configure_logging(
    format: Literal["text", "json"], level: str, stream: TextIO | None = None
) -> None:
    """Send all log records to `stream` (None: standard error), and nowhere else."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
