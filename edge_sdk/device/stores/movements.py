"""What a device must not lose: movements until their receipt, the copy for replays, its sessions.

    <state_dir>/<task>/<device>/
        session                     how often the device was started
        chunks/<hash>               `fetching.ChunkCache`
        runs/<run>/movements/       12.movement   has no receipt yet
                                    11.copy       has one; kept for replays
        runs/<run>/residuals/       `residuals.FolderStore`

A file appears whole or not at all, and is on the disk when the call returns. Files of another run
are of no use to anybody and go when a new run begins.
"""

from __future__ import annotations

import logging
import mmap
from contextlib import suppress
from pathlib import Path
from secrets import randbits
from typing import Protocol

from edge_sdk.program.files import (
    make_folder,
    move,
    remove,
    remove_folder,
    remove_leftovers,
    sync_folder,
    write_whole,
)
from edge_sdk.program.logs import fact
from edge_sdk.protocol.errors import ProtocolError
from edge_sdk.protocol.messages.movement import decode_movement, encode_movement
from edge_sdk.protocol.messages.round import Movement

log = logging.getLogger(__name__)


class MovementStore(Protocol):
    """The movements of one device and run."""

    def keep(self, movement: Movement) -> None:
        """Store a movement until its receipt; it takes the place of the copy for replays."""

    def forget(self, round: int, *, rejected: bool = False) -> None:
        """The movement of this round has its receipt. Harmless if it is not here.

        One that was rejected is of no use as a copy either.
        """

    def read(self, round: int) -> Movement:
        """A movement that is waiting for its receipt, or the copy. Raises `KeyError`."""

    @property
    def waiting(self) -> frozenset[int]:
        """Rounds whose movement has no receipt yet."""

    @property
    def copy(self) -> int | None:
        """The round of the copy for replays: of the last movement, if it is to be kept."""


class MemoryMovements:
    """A `MovementStore` that is gone with the process."""

    def __init__(self) -> None:
        self._waiting: dict[int, Movement] = {}
        self._copy: Movement | None = None

    def keep(self, movement: Movement) -> None:
        """See `MovementStore`."""
        self._waiting[movement.round] = movement
        self._copy = movement if movement.keeps_copy else None

    def forget(self, round: int, *, rejected: bool = False) -> None:
        """See `MovementStore`."""
        self._waiting.pop(round, None)
        if rejected and self.copy == round:
            self._copy = None

    def read(self, round: int) -> Movement:
        """See `MovementStore`."""
        if self._copy is not None and self._copy.round == round:
            return self._copy
        return self._waiting[round]

    @property
    def waiting(self) -> frozenset[int]:
        """See `MovementStore`."""
        return frozenset(self._waiting)

    @property
    def copy(self) -> int | None:
        """See `MovementStore`."""
        return None if self._copy is None else self._copy.round


class FolderMovements:
    """A `MovementStore` in a folder, one file per movement. Raises `OSError` where the disk does.

    A file that cannot be read is left out, and said to be so in the log.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        remove_leftovers(folder)
        self._folder = folder
        self._waiting: set[int] = set()
        self._copy: int | None = None
        found = [(_round_of(path), path) for path in folder.iterdir()]
        for round, path in sorted((round, path) for round, path in found if round is not None):
            movement = _read_or_set_aside(path, round)
            if movement is None:
                continue
            if path.suffix == WAITING:
                self._waiting.add(round)
            self._copy = round if movement.keeps_copy else None

    def keep(self, movement: Movement) -> None:
        """See `MovementStore`."""
        round = movement.round
        write_whole(self._path(round, WAITING), encode_movement(movement))
        self._waiting.add(round)
        self._copy = round if movement.keeps_copy else None
        for path in self._folder.glob(f"*{COPY}"):
            remove(path)

    def forget(self, round: int, *, rejected: bool = False) -> None:
        """See `MovementStore`."""
        if round not in self._waiting:
            return
        if rejected and round == self._copy:
            self._copy = None
        path = self._path(round, WAITING)
        if round == self._copy:
            move(path, self._path(round, COPY))
        else:
            remove(path)
            sync_folder(self._folder)
        self._waiting.discard(round)

    def read(self, round: int) -> Movement:
        """See `MovementStore`."""
        return decode_movement(self.read_bytes(round))

    def read_bytes(self, round: int) -> memoryview:
        """A movement as it is uploaded, mapped from its file: it takes no memory until it is sent.

        It stays readable when the movement is forgotten. Raises `KeyError`.
        """
        if round not in self._waiting and round != self._copy:
            raise KeyError(round)
        path = self._path(round, WAITING if round in self._waiting else COPY)
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    @property
    def waiting(self) -> frozenset[int]:
        """See `MovementStore`."""
        return frozenset(self._waiting)

    @property
    def copy(self) -> int | None:
        """See `MovementStore`."""
        return self._copy

    def _path(self, round: int, suffix: str) -> Path:
        return self._folder / f"{round}{suffix}"


WAITING = ".movement"
COPY = ".copy"
RANDOM_BITS = 16
"""Of a session. 2³⁷ starts are left of the 53 bits that a count has on the wire."""


def device_path(state_dir: Path, task: str, device: str) -> Path:
    """Where a device keeps all that belongs to a task.

    Both are names that fit into a topic, and so into a path.
    """
    return state_dir / task / device


class DeviceFolder:
    """The folder of one device and task."""

    def __init__(self, state_dir: Path, task: str, device: str) -> None:
        """See `device_path`."""
        self.path = device_path(state_dir, task, device)
        make_folder(self.path)
        remove_leftovers(self.path)

    @property
    def chunks(self) -> Path:
        """Where chunks are cached."""
        return self.path / "chunks"

    def next_session(self, above: int = 0) -> int:
        """Count a start, or one more if a session as high as `above` was heard of.

        The count is followed by random bits, so that two programs which share no folder, or read
        the count at the same time, differ: `starts · 2¹⁶ + random`. A count that cannot be read
        begins anew; the broker, which has the last session, makes up for it.
        """
        path = self.path / "session"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except (OSError, ValueError) as error:
            last = 0
            log.warning("%s cannot be read and sessions begin anew: %s", path, error)
        starts = (max(last, above) >> RANDOM_BITS) + 1
        session = (starts << RANDOM_BITS) + randbits(RANDOM_BITS)
        try:
            write_whole(path, str(session).encode())
        except OSError as error:
            log.error("%s cannot be written: %s", path, error, extra=fact("disk"))
        return session

    def start_run(self, run: str) -> Path:
        """The folder of this run; those of other runs are removed."""
        runs = self.path / "runs"
        make_folder(runs / run)
        for other in runs.iterdir():
            if other.name != run:
                log.info("run %s is over; what was kept of it is removed", other.name)
                with suppress(OSError):
                    remove_folder(other)
        return runs / run


def _round_of(path: Path) -> int | None:
    known = path.suffix in (WAITING, COPY) and path.stem.isdecimal()
    return int(path.stem) if known else None


def _read_or_set_aside(path: Path, round: int) -> Movement | None:
    try:
        movement = decode_movement(path.read_bytes())
        if movement.round == round:
            return movement
        problem = f"it holds a movement of round {movement.round}"
    except ProtocolError as error:
        problem = str(error)
    log.warning("%s is left aside: %s", path, problem)
    move(path, path.with_name(path.name + ".damaged"))
    return None
