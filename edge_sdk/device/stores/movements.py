"""Files a device must not lose: movements until their receipt, the copy for replays, its sessions.

    <state_dir>/<task>/<device>/
        session                     counts the device's starts
        epoch                       of the coordinator that the device obeys
        chunks/                     `chunk_cache.ChunkCache`
        runs/<run>/movements/       12.movement   has no receipt yet
                                    11.copy       has one; kept for replays
        runs/<run>/residuals/       `residuals.FolderStore`

A file appears whole or not at all, and is on the disk when the call returns. Files of another run
are useless and are removed when a new run begins. A file holds the very bytes of the upload, which
are sent again as they are, mapped and not decoded. Behind them stands their CRC-32, which is
compared before they are used. A file without it, of an earlier version, counts as damaged: the
device trains again if its round is still open.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import BinaryIO, Protocol, TypeVar

from edge_sdk.program.files import (
    make_folder,
    move,
    remove,
    remove_folder,
    remove_leftovers,
    write_whole,
)
from edge_sdk.program.logs import fact
from edge_sdk.protocol.errors import MessageError, ProtocolError
from edge_sdk.protocol.messages.epoch import Epoch
from edge_sdk.protocol.messages.movement import decode_movement, movement_pieces
from edge_sdk.protocol.messages.round import Movement, Replay

log = logging.getLogger(__name__)

EPOCH = "epoch"
"""File, in the device's folder, of the epoch that it obeys."""


K_co = TypeVar("K_co", covariant=True)


class MovementStore(Protocol[K_co]):
    """The movements of one device and run. `K_co` is the form in which it gives them to be sent."""

    def keep(self, movement: Movement) -> None:
        """Store a movement until its receipt; it takes the place of the copy for replays."""

    def forget(self, round: int, *, rejected: bool = False) -> None:
        """Drop a movement that has its receipt; harmless if there is none of this round.

        A rejected movement does not stay as the copy either.
        """

    def again(self, round: int, *, answers: int | None = None) -> K_co:
        """Return a waiting movement, or the copy, to be sent.

        `answers` is the round that a replay answers; None: it is no replay. Raises `KeyError`.
        """

    def payload(self, round: int) -> bytes | memoryview:
        """Return the blocks of a waiting movement, or of the copy. Raises `KeyError`."""

    @property
    def waiting(self) -> frozenset[int]:
        """Rounds whose movement has no receipt yet."""

    @property
    def copy(self) -> int | None:
        """The round of the copy for replays: the last movement, if its device keeps one."""


class MemoryMovements:
    """A `MovementStore` in memory."""

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

    def again(self, round: int, *, answers: int | None = None) -> Movement | Replay:
        """See `MovementStore`."""
        movement = self._find(round)
        return movement if answers is None else Replay(round=answers, movement=movement)

    def payload(self, round: int) -> bytes | memoryview:
        """See `MovementStore`."""
        return self._find(round).payload

    def _find(self, round: int) -> Movement:
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


@dataclass(frozen=True, slots=True, eq=False)
class StoredMovement:
    """A movement to send as its file holds it."""

    round: int
    data: memoryview
    """The upload's bytes, mapped from the file. They stay readable when the file is removed."""
    answers: int | None
    """The round that a replay answers; None: it is no replay."""
    sha256: bytes | None = None
    """Hash of the bytes as this process made them; None: it did not, and they were checked."""


class FolderMovements:
    """A `MovementStore` in a folder, one file per movement. Raises `OSError` where the disk does.

    A damaged file is renamed to `….damaged` and logged.
    """

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        remove_leftovers(folder)
        self._folder = folder
        self._made: tuple[int, bytes] | None = None
        """The movement made last, by this process: its round and its hash."""
        self.waiting: frozenset[int] = frozenset()
        self.copy: int | None = None
        found = [(_round_of(path), path) for path in folder.iterdir()]
        for round, path in sorted((round, path) for round, path in found if round is not None):
            movement = _read_or_set_aside(path, round)
            if movement is None:
                continue
            if path.suffix == WAITING:
                self.waiting |= {round}
            self.copy = round if movement.keeps_copy else None

    def keep(self, movement: Movement) -> None:
        """See `MovementStore`."""
        round = movement.round
        pieces = movement_pieces(movement)
        made, check = hashlib.sha256(), 0

        def write(stream: BinaryIO) -> None:
            nonlocal check
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for start in range(0, len(view), PIECE_BYTES):
                    # Hashed and written while it is in the processor's cache.
                    part = view[start : start + PIECE_BYTES]
                    made.update(part)
                    check = zlib.crc32(part, check)
                    stream.write(part)
            stream.write(check.to_bytes(CHECK_BYTES, "little"))

        self._made = None
        write_whole(self._path(round, WAITING), write)
        self._made = round, made.digest()
        self.waiting |= {round}
        self.copy = round if movement.keeps_copy else None
        for path in self._folder.glob(f"*{COPY}"):
            remove(path)

    def forget(self, round: int, *, rejected: bool = False) -> None:
        """See `MovementStore`."""
        if round not in self.waiting:
            return
        if rejected and round == self.copy:
            self.copy = None
        # Not synced: the next movement syncs the folder. After a power cut before that the movement
        # is offered once more, as if the receipt had been lost.
        path = self._path(round, WAITING)
        if round == self.copy:
            move(path, self._path(round, COPY), synced=False)
        else:
            remove(path)
        self.waiting -= {round}

    def again(self, round: int, *, answers: int | None = None) -> StoredMovement:
        """See `MovementStore`. Raises `ProtocolError` for a damaged file.

        What this process made is sent with the hash of what it made: the coordinator compares it.
        """
        if self._made is not None and self._made[0] == round:
            return StoredMovement(round, self._map(round, checked=False), answers, self._made[1])
        return StoredMovement(round, self._map(round), answers)

    def payload(self, round: int) -> bytes | memoryview:
        """See `MovementStore`. Raises `ProtocolError` for a damaged file."""
        return decode_movement(self._map(round)).payload

    def _map(self, round: int, *, checked: bool = True) -> memoryview:
        if round not in self.waiting and round != self.copy:
            raise KeyError(round)
        path = self._path(round, WAITING if round in self.waiting else COPY)
        return _mapped(path, checked=checked)

    def _path(self, round: int, suffix: str) -> Path:
        return self._folder / f"{round}{suffix}"


WAITING = ".movement"
COPY = ".copy"
CHECK_BYTES = 4
PIECE_BYTES = 2**18
"""Bytes that are hashed and written at a time."""
RANDOM_BITS = 16
"""Random bits of a session. 37 of the 53 bits that a count has on the wire are left for starts."""


def device_path(state_dir: Path, task: str, device: str) -> Path:
    """Return the folder of a device's files for a task.

    Both names fit into a topic, and so into a path.
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
        """The folder of cached chunks."""
        return self.path / "chunks"

    def next_session(self, above: int = 0) -> int:
        """Count a start and return its session, which is higher than `above`.

        A session is `starts · 2¹⁶ + random`. The random bits tell programs apart that share no
        folder, or that read the count at the same time. A count that cannot be read begins again
        at 1; the broker retains the last session, and the device then counts on from that.
        """
        path = self.path / "session"
        try:
            last = int(path.read_text())
        except FileNotFoundError:
            last = 0
        except (OSError, ValueError) as error:
            last = 0
            log.warning("cannot read %s, so sessions are counted from 1 again: %s", path, error)
        starts = (max(last, above) >> RANDOM_BITS) + 1
        session = (starts << RANDOM_BITS) + randbits(RANDOM_BITS)
        try:
            write_whole(path, str(session).encode())
        except OSError as error:
            log.error("cannot write %s: %s", path, error, extra=fact("disk"))
        return session

    def read_epoch(self) -> Epoch | None:
        """Return the epoch of the coordinator that the device obeyed last; None: not known."""
        path = self.path / EPOCH
        try:
            counter, instance = path.read_text().split()
            return Epoch(int(counter), instance)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ProtocolError) as error:
            log.warning("cannot read %s, so any coordinator is obeyed: %s", path, error)
            return None

    def keep_epoch(self, epoch: Epoch | None) -> None:
        """Note the epoch of the coordinator that the device obeys; None: one without an epoch."""
        path = self.path / EPOCH
        try:
            if epoch is None:
                remove(path)
            else:
                write_whole(path, f"{epoch.counter} {epoch.instance}".encode())
        except OSError as error:
            log.error("cannot write %s: %s", path, error, extra=fact("disk"))

    def start_run(self, run: str) -> Path:
        """Return the folder of this run, and remove those of other runs."""
        runs = self.path / "runs"
        make_folder(runs / run)
        for other in runs.iterdir():
            if other.name != run:
                log.info("removing the files of run %s", other.name)
                with suppress(OSError):
                    remove_folder(other)
        return runs / run


def _round_of(path: Path) -> int | None:
    known = path.suffix in (WAITING, COPY) and path.stem.isdecimal()
    return int(path.stem) if known else None


def _mapped(path: Path, *, checked: bool = True) -> memoryview:
    """Return the bytes of a movement. Raises `MessageError` if they do not match their checksum,
    where that is `checked`.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    data, check = whole[:-CHECK_BYTES], whole[-CHECK_BYTES:]
    if checked and check != _check_of(data):
        raise MessageError("its checksum does not match, or it has none")
    return data


def _check_of(data: bytes | memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(CHECK_BYTES, "little")


def _read_or_set_aside(path: Path, round: int) -> Movement | None:
    """Read a movement, whose payload stays in the file."""
    try:
        movement = decode_movement(_mapped(path))
        if movement.round == round:
            return movement
        problem = f"it holds a movement of round {movement.round}"
    except ProtocolError as error:
        problem = str(error)
    log.warning("%s is damaged and is set aside: %s", path, problem)
    move(path, path.with_name(path.name + ".damaged"))
    return None
