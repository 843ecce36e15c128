"""The code book: join codes on disk, and who used them; of a run, or of a process with many runs.

    <folder>/join/  codes.json    every code with its secret, readable by its owner only
                 lock          held by the process that has the book open

A device is entered before it gets its answer. The same name and key may ask again with the same
code, which then counts once: an answer that was lost can be fetched again.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from coordinator.checksums import open_versioned, seal_json
from coordinator.errors import CoordinatorError
from edge_sdk.join.code import MAX_TASKS, SECRET_BYTES, JoinCode
from edge_sdk.program.files import lock_file, make_folder, remove_leftovers, write_whole
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import check_name

FOLDER, BOOK, LOCK = "join", "codes.json", "lock"
VERSION = 2
MAX_CODES = 1_000
"""Most codes of a book; the oldest that cannot be used any more are dropped first."""
MAX_HOURS = 24 * 366

CodeState = Literal["open", "used up", "expired", "revoked"]


class CodeError(CoordinatorError):
    """A code that cannot be made, found or used; the text says why."""


@dataclass(frozen=True, slots=True)
class JoinPlace:
    """Where devices join, and what they are told of it in codes."""

    host: str
    port: int
    task: str | None
    """The task of codes for which none is named; None: they must name theirs."""
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Guest:
    """A device that joined: its name, a digest of its key (empty without one), and when."""

    name: str
    key: str
    at: datetime


@dataclass(frozen=True, slots=True)
class CodeEntry:
    """A code in the book. Times are UTC."""

    code: JoinCode
    made: datetime
    until: datetime
    devices: int
    guests: tuple[Guest, ...] = ()
    revoked: datetime | None = None
    more: tuple[str, ...] = ()
    """Further tasks that it is for, after that in the code."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it is for, the most important first."""
        return (self.code.task, *self.more)

    def state(self, now: datetime) -> CodeState:
        """Return whether the code still lets devices in."""
        if self.revoked is not None:
            return "revoked"
        if now >= self.until:
            return "expired"
        return "open" if len(self.guests) < self.devices else "used up"

    def facts(self, now: datetime) -> dict[str, Any]:
        """Describe the code for lists; the code itself only while it lets devices in."""
        state = self.state(now)
        return {
            "id": self.code.id,
            "state": state,
            "devices": self.devices,
            "tasks": list(self.tasks),
            "joined": [guest.name for guest in self.guests],
            "made": self.made.isoformat(),
            "until": self.until.isoformat(),
            "code": self.code.text if state == "open" else None,
        }


def utc_now() -> datetime:
    """Return the current time, to the second."""
    return datetime.now(timezone.utc).replace(microsecond=0)


class CodeBook:
    """The open book; one process at a time may have it open, and any of its threads use it."""

    def __init__(
        self, run: Path, place: JoinPlace | None = None, *, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """Open the book of a run. `place` None: as noted when the run was last served.

        Raises `CodeError` if it is busy or damaged, or if no place is known.
        """
        folder = run / FOLDER
        make_folder(folder, mode=0o700)
        self._path, self._clock = folder / BOOK, clock
        self._guard = threading.Lock()
        try:
            self._lock = lock_file(folder / LOCK, mode=0o600)
        except BlockingIOError as error:
            raise CodeError(
                f"{folder} is in use by another process: the run is being served but does not "
                "answer, or another command is at work; try again"
            ) from error
        try:
            remove_leftovers(folder)
            known, self._entries = read_book(self._path)
            if place is None and known is None:
                raise CodeError(
                    f"{run} was never served, so nothing is known to put into a code: start "
                    "tessera-coordinator serve first"
                )
            self._place = place or known
            if place is not None and place != known:
                self._save(self._entries)
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> CodeBook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes open the book."""
        os.close(self._lock)

    @property
    def now(self) -> datetime:
        """The book's time."""
        return self._clock()

    @property
    def entries(self) -> tuple[CodeEntry, ...]:
        """All codes, oldest first."""
        return self._entries

    @property
    def usable(self) -> tuple[CodeEntry, ...]:
        """The codes that let devices in at the present place, oldest first."""
        now = self._clock()
        return tuple(
            each for each in self._entries if each.state(now) == "open" and self._leads_here(each)
        )

    def create(self, *, devices: int, hours: float, tasks: Sequence[str] = ()) -> CodeEntry:
        """Make a code for this many devices and hours. Raises `CodeError`.

        `tasks`: those it is for, the most important first; none: that of the place.
        """
        if not (isinstance(devices, int) and 1 <= devices <= 1_000_000):
            raise CodeError(f"a code is for 1 to 1000000 devices, not {devices}")
        if not 0 < hours <= MAX_HOURS:
            raise CodeError(f"a code lasts up to {MAX_HOURS} hours (a year), not {hours:g}")
        place = self._place
        assert place is not None  # noqa: S101  checked when the book was opened
        first, *more = self._tasks(tasks)
        with self._guard:
            now = self._clock()
            entry = CodeEntry(
                JoinCode(
                    host=place.host,
                    port=place.port,
                    task=first,
                    fingerprint=place.fingerprint,
                    secret=secrets.token_bytes(SECRET_BYTES),
                ),
                made=now,
                until=now + timedelta(hours=hours),
                devices=devices,
                more=tuple(more),
            )
            if any(each.code.id == entry.code.id for each in self._entries):
                raise CodeError("the new code's name is taken; try again")  # one in 2³²
            self._save((*self._room(now), entry))
        return entry

    def revoke(self, id: str) -> CodeEntry:
        """Let nobody in with a code any more. Devices that joined stay. Raises `CodeError`."""
        with self._guard:
            now = self._clock()
            entry = self._find(id)
            if entry is None:
                known = ", ".join(each.code.id for each in self._entries) or "none"
                raise CodeError(f"there is no code {id!r}; known are {known}")
            if entry.revoked is None:
                self._put(replace(entry, revoked=now))
        return entry

    def authenticate(self, id: str, mac: str, body: bytes) -> CodeEntry:
        """Return the code that a request was made with. Raises `CodeError`."""
        with self._guard:
            entry = self._find(id)
        if entry is None or not hmac.compare_digest(entry.code.mac(body).encode(), mac.encode()):
            raise CodeError("this code is not known here: ask for a new one")
        return entry

    def enter(
        self, entry: CodeEntry, name: str, key: str, admit: Callable[[datetime | None], None]
    ) -> None:
        """Let a device in by a code: note it, for good. Raises `CodeError`.

        `admit` is called before, with the time at which this code let the same device in (None: it
        did not); what it raises leaves the book as it was.
        """
        with self._guard:
            now = self._clock()
            current = self._find(entry.code.id) or entry
            times = [each.at for each in current.guests if (each.name, each.key) == (name, key)]
            before = times[0] if times else None
            state = current.state(now)
            if state in ("revoked", "expired") or (state == "used up" and before is None):
                raise CodeError(_refusal(current, state))
            admit(before)
            if before is None:
                guest = Guest(name, key, now)
                self._put(replace(current, guests=(*current.guests, guest)))

    # -- inside ------------------------------------------------------------------------------

    def _tasks(self, tasks: Sequence[str]) -> list[str]:
        """Return the tasks of a new code, checked. Raises `CodeError`."""
        own = self._place.task if self._place is not None else None
        wanted = list(dict.fromkeys(tasks)) or ([] if own is None else [own])
        if not wanted:
            raise CodeError("this code needs a task: name those it is for, with --task")
        if len(wanted) > MAX_TASKS:
            raise CodeError(f"a code is for at most {MAX_TASKS} tasks, not {len(wanted)}")
        try:
            return [check_name(each, "task") for each in wanted]
        except MessageError as error:
            raise CodeError(f"--task: {error}") from error

    def _leads_here(self, entry: CodeEntry) -> bool:
        """True if devices that use the code come to the present place, and its task."""
        code, place = entry.code, self._place
        if place is None or (place.task is not None and place.task not in entry.tasks):
            return False
        here = (place.host, place.port, place.fingerprint)
        return (code.host, code.port, code.fingerprint) == here

    def _find(self, id: str) -> CodeEntry | None:
        return next((each for each in self._entries if each.code.id == id), None)

    def _put(self, entry: CodeEntry) -> None:
        id = entry.code.id
        self._save(tuple(entry if each.code.id == id else each for each in self._entries))

    def _room(self, now: datetime) -> tuple[CodeEntry, ...]:
        kept = list(self._entries)
        for each in self._entries:
            if len(kept) < MAX_CODES:
                break
            if each.state(now) != "open":
                kept.remove(each)
        if len(kept) >= MAX_CODES:
            raise CodeError(f"there are {MAX_CODES} codes in use: revoke some")
        return tuple(kept)

    def _save(self, entries: tuple[CodeEntry, ...]) -> None:
        place = self._place
        assert place is not None  # noqa: S101  checked when the book was opened
        content = {
            "version": VERSION,
            "place": _write_place(place),
            "codes": [_write_entry(each) for each in entries],
        }
        write_whole(self._path, seal_json(content), mode=0o600)
        self._entries = entries


def _refusal(entry: CodeEntry, state: CodeState) -> str:
    words = {
        "revoked": "was revoked",
        "expired": f"expired on {entry.until:%Y-%m-%d at %H:%M} UTC",
        "used up": f"was for {entry.devices} device{'s' * (entry.devices > 1)}, and is used up",
    }
    return f"this code {words[state]}: ask for a new one (tessera-coordinator codes create)"


def _place_of(code: JoinCode) -> JoinPlace:
    return JoinPlace(code.host, code.port, code.task, code.fingerprint)


def _write_place(place: JoinPlace) -> dict[str, Any]:
    return {
        "host": place.host,
        "port": place.port,
        "task": place.task,
        "fingerprint": place.fingerprint.hex(),
    }


def _write_entry(entry: CodeEntry) -> dict[str, Any]:
    code = entry.code
    return {
        **_write_place(_place_of(code)),
        "secret": code.secret.hex(),
        "made": entry.made.isoformat(),
        "until": entry.until.isoformat(),
        "devices": entry.devices,
        "guests": [[each.name, each.key, each.at.isoformat()] for each in entry.guests],
        "revoked": None if entry.revoked is None else entry.revoked.isoformat(),
        "more": list(entry.more),
    }


def read_book(path: Path) -> tuple[JoinPlace | None, tuple[CodeEntry, ...]]:
    """Read a book: its place and its codes, none if there is no file. Raises `CodeError`."""
    try:
        content = open_versioned(path.read_bytes(), VERSION)
    except FileNotFoundError:
        return None, ()
    except ValueError as error:
        raise CodeError(_damaged(path, error)) from error
    try:
        if content["version"] != VERSION:
            raise CodeError(
                f"{path} has version {content['version']}; this program reads version {VERSION}"
            )
        return _read_place(content["place"]), tuple(map(_read_entry, content["codes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CodeError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception) -> str:
    return (
        f"{path} cannot be read ({type(error).__name__}: {error}): remove it, and make new codes; "
        "devices that have joined stay"
    )


def _read_place(content: dict[str, Any]) -> JoinPlace:
    return JoinPlace(
        content["host"], content["port"], content["task"], bytes.fromhex(content["fingerprint"])
    )


def _read_entry(content: dict[str, Any]) -> CodeEntry:
    revoked = content["revoked"]
    return CodeEntry(
        JoinCode(
            host=content["host"],
            port=content["port"],
            task=content["task"],
            fingerprint=bytes.fromhex(content["fingerprint"]),
            secret=bytes.fromhex(content["secret"]),
        ),
        made=datetime.fromisoformat(content["made"]),
        until=datetime.fromisoformat(content["until"]),
        devices=content["devices"],
        guests=tuple(
            Guest(name, key, datetime.fromisoformat(at)) for name, key, at in content["guests"]
        ),
        revoked=None if revoked is None else datetime.fromisoformat(revoked),
        more=tuple(content.get("more", ())),
    )
