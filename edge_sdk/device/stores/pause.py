"""The owner's pause: a file in the device's folder, so that it outlives programs and restarts.

    {"since": 1789000000.0, "until": 1789007200.0}     until null: until it is lifted

The file is the truth. A program that runs looks at it about once a second, so a pause works even
where no socket does. One that cannot be read counts as a pause without an end: the owner wanted
one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

from edge_sdk.program.files import make_folder, remove, write_whole

log = logging.getLogger(__name__)

REASON = "paused by its owner"
LOOK_S = 1.0
"""Seconds between two looks at the file."""


@dataclass(frozen=True, slots=True)
class PauseTerms:
    """A pause: times in seconds since 1970; `until` None: until it is lifted."""

    since: float | None
    until: float | None


class Pause:
    """The pause of one device, for any number of threads."""

    def __init__(
        self,
        path: Path,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wall` tells when a pause ends, `clock` when to look at the file again."""
        self._path = path
        self._wall = wall
        self._clock = clock
        self._lock = Lock()
        self._terms: PauseTerms | None = None
        self._looked_s = -math.inf

    @property
    def active(self) -> bool:
        """True while the device is paused."""
        return self.terms is not None

    @property
    def terms(self) -> PauseTerms | None:
        """The pause; None: there is none, or it is over."""
        with self._lock:
            if self._clock() - self._looked_s >= LOOK_S:
                self._look()
            terms = self._terms
        if terms is not None and terms.until is not None and self._wall() >= terms.until:
            return None
        return terms

    def begin(self, for_s: float | None = None) -> PauseTerms:
        """Pause, in place of any earlier pause. None: until it is lifted. Raises `OSError`."""
        now = self._wall()
        terms = PauseTerms(now, None if for_s is None else now + for_s)
        make_folder(self._path.parent)
        write_whole(self._path, json.dumps(asdict(terms)).encode())
        self._know(terms)
        return terms

    def lift(self) -> bool:
        """End the pause; False if there was none. Raises `OSError`."""
        with self._lock:
            self._look()
        was = self.active
        remove(self._path)
        self._know(None)
        return was

    def _know(self, terms: PauseTerms | None) -> None:
        with self._lock:
            self._terms, self._looked_s = terms, self._clock()

    def _look(self) -> None:
        self._looked_s, before = self._clock(), self._terms
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            since, until = content["since"], content["until"]
            for each in (since, until):
                if each is not None and not (
                    isinstance(each, int | float) and math.isfinite(each) and each >= 0
                ):
                    raise ValueError(f"{each!r} is no time")
            self._terms = PauseTerms(since, until)
        except FileNotFoundError:
            self._terms = None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._terms = PauseTerms(None, None)
            if before != self._terms:
                log.warning("%s cannot be read, so the device stays paused: %s", self._path, error)
