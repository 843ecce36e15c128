"""The energy of a device's day, on disk: one account for all its tasks.

A `History` has the joules of the day and the interval between rounds of one task. A device spends
one budget on all its tasks, so these are kept here, and every task's history is completed from
here. The account survives crashes: it is written whenever its energy changes, and read before. The
times of rounds are written with that.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from threading import Lock

from edge_sdk.decide.budget import History
from edge_sdk.program.files import make_folder, write_whole
from edge_sdk.program.records import replace

log = logging.getLogger(__name__)

SHARED = ("day_from_s", "spent_j", "opened_s", "interval_s")
"""Fields of a `History` that belong to the device and not to one of its tasks."""


class EnergyAccount:
    """The shared part of the histories of a device's tasks. For any number of threads."""

    def __init__(self, path: Path) -> None:
        """`path`: the file that keeps it. It is made when the first round is heard of."""
        self._path = path
        self._lock = Lock()
        self._known: History | None = None
        self._unsaved = False
        self._times: History | None = None
        """The account when a round was heard of last, if the file does not have its times."""

    def complete(self, history: History) -> History:
        """Return a task's history with the account's part; unchanged while there is no account."""
        with self._lock:
            known = self._read()
        return history if known is None else _with_part(history, known)

    def adopt(self, history: History) -> None:
        """Open the account with what a task spent before there was one."""
        with self._lock:
            if self._read() is None and history.day_from_s is not None:
                self._write(_with_part(History(), history))

    def heard(self, now_s: float) -> None:
        """Note that a round of any task opens now."""
        with self._lock:
            before = self._read()
            heard = (before or History()).heard(now_s)
            times = {"opened_s": heard.opened_s, "interval_s": heard.interval_s}
            if before is not None and replace(before, **times) == heard:
                self._known = self._times = heard
            else:
                self._write(heard)

    def spent(self, joules: float) -> None:
        """Note that training took this much energy."""
        with self._lock:
            self._write((self._read() or History()).spent(joules))

    def today_j(self, now_s: float) -> float:
        """Joules spent in the day of the budget that it is now."""
        with self._lock:
            known = self._read()
        return 0.0 if known is None else known.today_j(now_s)

    def _read(self) -> History | None:
        known, times = self._read_file(), self._times
        if known is None or times is None or (times.opened_s or 0.0) < (known.opened_s or 0.0):
            return known
        return replace(known, opened_s=times.opened_s, interval_s=times.interval_s)

    def _read_file(self) -> History | None:
        if self._unsaved:
            return self._known
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            values = {name: content[name] for name in SHARED}
            for name, value in values.items():
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number and (value is not None or name == "spent_j"):
                    raise ValueError(f"{name} = {value!r}")
            self._known = History(**values)
        except FileNotFoundError:
            self._known = None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if self._known is None:
                log.warning("%s cannot be used, the energy spent is unknown: %s", self._path, error)
        return self._known

    def _write(self, history: History) -> None:
        self._known, self._times = history, None
        content = {name: getattr(history, name) for name in SHARED}
        try:
            make_folder(self._path.parent)
            write_whole(self._path, json.dumps(content, allow_nan=False).encode())
            self._unsaved = False
        except OSError as error:
            if not self._unsaved:
                log.warning("the energy spent is lost if this program stops: %s", error)
            self._unsaved = True


def _with_part(history: History, known: History) -> History:
    return replace(history, **{name: getattr(known, name) for name in SHARED})
