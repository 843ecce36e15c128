"""Sessions of browsers that have signed in, kept in this process alone.

A session's id is random; only its hash is kept. Sessions end after a time, at the end of the
process, and when somebody signs out. Of too many, the oldest ends.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.operate.http.access.tokens import Holder

MAX_SESSIONS = 64


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that has signed in."""

    holder: Holder
    until: float
    """Its end, by the clock of `Sessions`."""


class Sessions:
    """All sessions, for the thread of the server; any may count them."""

    def __init__(self, lasts_s: float, *, clock: Callable[[], float] = time.time) -> None:
        self.lasts_s = lasts_s
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        now = self._clock()
        return sum(now < session.until for session in list(self._sessions.values()))

    def begin(self, holder: Holder) -> tuple[str, Session]:
        """Begin a session; returns its id as well."""
        self._expire()
        while len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        name, session = secrets.token_urlsafe(32), Session(holder, self._clock() + self.lasts_s)
        self._sessions[_digest(name)] = session
        return name, session

    def find(self, name: str) -> Session | None:
        """Return the session of an id; None: there is none, or it has ended."""
        session = self._sessions.get(_digest(name))
        return None if session is None or self._clock() >= session.until else session

    def end(self, name: str) -> None:
        """End a session, if there is one."""
        self._sessions.pop(_digest(name), None)

    def _expire(self) -> None:
        now = self._clock()
        for digest in [each for each, session in self._sessions.items() if now >= session.until]:
            del self._sessions[digest]


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
