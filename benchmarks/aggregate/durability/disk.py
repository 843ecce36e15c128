"""A disk that fails at a chosen step, under the one durable-file module.

`edge_sdk/program/files.py` makes every change of a file by one call of its `os`. `FaultyDisk` puts
itself in the place of that `os` and counts those calls as steps. At a chosen step it

    kill     ends the process before the step
    unsent   the same, and the messages that the link had not passed on are lost
    torn     writes half of the bytes, then ends the process
    short    writes half of the bytes and says so
    error    fails with an input/output error (EIO), once
    full     fails with "no space left" (ENOSPC), as does all that needs room, `PATIENCE` times or
             until `make_room`
    lost     cuts the power: whatever no `fsync` has brought to the disk may be gone

A cut leaves one of several plausible states (`CUTS`), made from two facts that the layer follows:
the content of every file at its last `fsync`, and the names in every folder at its last `fsync`.

SQLite writes by itself. Each COMMIT is one step: kill before it, an error or a full disk in place
of it. A cut leaves its files as they were after the last COMMIT, or as they are; that its own
journal survives a cut within a COMMIT (`synchronous = FULL`) is taken from SQLite's tests. Bytes
that were written through a map count as written when the file is synced.

A process that ends leaves the state of the disk in another folder (`left`), so nothing that its
remains do later can change it.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast
from zlib import crc32

from edge_sdk.program import files

FaultKind = Literal["kill", "unsent", "torn", "short", "error", "full", "lost"]

CUTS = ("nothing", "empty", "zeros", "unnamed", "mixed-1", "mixed-2", "mixed-3")
"""States that a cut leaves of what was not synced: nothing of it; the names without the contents
(empty files, or zeros); the contents without the names; a mixture, which the number seeds."""


PATIENCE = 4
"""Steps that find no room before there is some again."""


class Killed(BaseException):
    """The process ends here."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The failure of a step; `cut` is one of `CUTS` if the power is cut."""

    step: int
    kind: FaultKind
    cut: str = ""

    def __str__(self) -> str:
        return f"{self.step}:{self.kind}" + (f":{self.cut}" if self.cut else "")


@dataclass(frozen=True, slots=True)
class DiskStep:
    """One operation that can fail."""

    number: int
    operation: str
    """`write`, `fsync`, …, `commit` (SQLite) or `send` (a message)."""
    subject: str
    """The file, relative to the folder; the topic and the message, if it was sent."""

    @property
    def writes(self) -> bool:
        """True if a part of it can be done."""
        return self.operation in ("write", "pwrite")

    @property
    def is_file(self) -> bool:
        """True if it is an operation on a file."""
        return self.operation != "send"

    def __str__(self) -> str:
        return f"{self.operation} {self.subject}"


@dataclass(slots=True, eq=False)
class _Node:
    """A file or folder as the disk has it, whatever its name."""

    content: bytes | None = None
    """Bytes at the last sync; None: never synced, or a folder."""
    entries: dict[str, _Node] | None = None
    """Names of a folder at its last sync; None: a file."""
    sqlite: bool = False


@dataclass(slots=True)
class FaultyDisk:
    """Follows all changes in a folder, and fails as it is told. A context manager.

    `left` is where the state of the disk is put when the process ends; it must not exist.
    """

    folder: Path
    left: Path
    fault: Fault | None = None
    steps: list[DiskStep] = field(default_factory=list)
    dead: bool = False
    full: bool = False
    """True while there is no room."""
    refusals: int = 0
    """Operations that failed for lack of room."""
    looks: bool = False
    """True: note the cuts that leave a state of their own at every step."""
    emptied: tuple[str, ...] = ()
    """Folders that every process empties when it starts: what is left in them does not matter."""
    cuts: dict[int, list[str]] = field(default_factory=dict)
    """Those cuts, by step."""
    on_kill: Callable[[bool], None] | None = None
    """Called when the process ends; True: its unsent messages are lost."""
    _paths: dict[int, Path] = field(default_factory=dict)
    _nodes: dict[tuple[int, int], _Node] = field(default_factory=dict)
    root: _Node = field(default_factory=_Node)
    _before: list[tuple[Any, str, Any]] = field(default_factory=list)

    def __enter__(self) -> FaultyDisk:
        self.root = self._follow(self.folder)
        self._patch(files, "os", _FaultyOs(self))
        self._patch(sqlite3, "connect", self._connect)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for owner, name, before in reversed(self._before):
            setattr(owner, name, before)
        for handle in list(self._paths):
            with suppress(OSError):
                os.close(handle)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    # -- steps ------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Let the disk have room again."""
        self.full = False

    def step(self, operation: str, subject: str, *, needs_room: bool = False) -> FaultKind | None:
        """Count a step. Ends the process or fails if it is to; returns another fault to act out."""
        if self.dead:
            raise Killed
        at = DiskStep(len(self.steps), operation, subject)
        self.steps.append(at)
        if self.looks and at.is_file:
            self._look(at.number)
        fault = self.fault if self.fault is not None and self.fault.step == at.number else None
        if fault is not None and fault.kind == "full":
            self.full = True
        if self.full and needs_room:
            self.refusals += 1
            self.full = self.refusals < PATIENCE
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault is None or fault.kind == "full":
            return None
        match fault.kind:
            case "kill" | "unsent" | "lost":
                self.die(cut=fault.cut, unsent=fault.kind != "kill")
            case "error" if at.is_file:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fault.kind

    def die(self, *, cut: str = "", unsent: bool = False) -> None:
        """Leave the disk as it is now, or as a cut leaves it, and end the process."""
        self.dead = True
        if cut:
            _write(_Cutter(self).state(cut), self.left)
        else:
            shutil.copytree(self.folder, self.left, symlinks=True)
        if self.on_kill is not None:
            self.on_kill(unsent)
        raise Killed

    def _look(self, number: int) -> None:
        cutter, seen = _Cutter(self), set[int]()
        self.cuts[number] = []
        for cut in CUTS:
            state = tuple(
                (_steady(path), content)
                for path, content in cutter.state(cut).items()
                if not path.startswith(self.emptied)
            )
            if hash(state) not in seen:
                seen.add(hash(state))
                self.cuts[number].append(cut)

    # -- what is on the disk ----------------------------------------------------------------

    def node_at(self, path: Path) -> _Node | None:
        """Return the file or folder that has this name now; None: there is none, or a stranger."""
        try:
            found = os.lstat(path)
        except OSError:
            return None
        return self._nodes.get((found.st_dev, found.st_ino))

    def covers(self, path: Path) -> bool:
        """True if a path is in the folder."""
        return path.is_relative_to(self.folder)

    def named(self, path: Path) -> str:
        """Return a path as steps name it: drafts without their random part."""
        try:
            inner = path.relative_to(self.folder)
        except ValueError:
            return str(path)
        return f"{_steady(str(inner))}.draft" if inner.suffix == ".draft" else str(inner)

    def _follow(self, path: Path) -> _Node:
        """Take what exists as synced."""
        found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode):
            entries = {name: self._follow(path / name) for name in os.listdir(path)}
            node = _Node(entries=entries)
        else:
            node = _Node(content=path.read_bytes(), sqlite=_is_sqlite(path))
        self._nodes[found.st_dev, found.st_ino] = node
        return node

    def opened(self, handle: int, path: Path, *, new: bool) -> None:
        """Note a descriptor, and the file if it is new."""
        self._paths[handle] = path
        if new:
            self.added(path)

    def added(self, path: Path, *, folder: bool = False) -> None:
        """Note a new file or folder, of which nothing is synced."""
        found = os.lstat(path)
        node = _Node(entries={} if folder else None, sqlite=_is_sqlite(path))
        self._nodes[found.st_dev, found.st_ino] = node

    def dropped(self, path: Path) -> None:
        """Forget the number of a file that has no name any more: it may be used again."""
        found = os.lstat(path)
        self._nodes.pop((found.st_dev, found.st_ino), None)

    def path_of(self, handle: int) -> Path:
        """Return the path that a descriptor was opened with."""
        return self._paths.get(handle, Path("?"))

    def closed(self, handle: int) -> None:
        """Forget a descriptor."""
        self._paths.pop(handle, None)

    def synced(self, handle: int) -> None:
        """Note that a file's content, or a folder's names, are on the disk."""
        found = os.fstat(handle)
        node = self._nodes.get((found.st_dev, found.st_ino))
        if node is None:
            return
        if node.entries is not None:
            node.entries = self.names(self.path_of(handle))
        else:
            node.content = Path(f"/proc/self/fd/{handle}").read_bytes()

    def names(self, folder: Path) -> dict[str, _Node]:
        """Return what a folder holds now, by name."""
        found = {name: self.node_at(folder / name) for name in os.listdir(folder)}
        return {name: node for name, node in found.items() if node is not None}

    # -- SQLite -----------------------------------------------------------------------------

    def _connect(self, path: str | Path, **options: Any) -> sqlite3.Connection:
        disk, place = self, Path(path)

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if statement == "COMMIT":
                    disk._before_commit(place)
                done = super().execute(statement, *values)
                if statement == "COMMIT":
                    disk._committed(place)
                return done

            def executescript(self, script: str) -> sqlite3.Cursor:
                disk._before_commit(place)
                done = super().executescript(script)
                disk._committed(place)
                return done

            def close(self) -> None:
                super().close()
                if not disk.dead:
                    disk._committed(place)  # its log has become part of it

        real = next(before for owner, name, before in self._before if owner is sqlite3)
        return cast(sqlite3.Connection, real(path, factory=Connection, **options))

    def _before_commit(self, path: Path) -> None:
        try:
            self.step("commit", self.named(path), needs_room=True)
        except OSError as error:
            words = "disk I/O error" if error.errno == errno.EIO else "database or disk is full"
            raise sqlite3.OperationalError(words) from None

    def _committed(self, path: Path) -> None:
        """Note that SQLite's files are synced, with their names."""
        parent = self.node_at(path.parent)
        if parent is None or parent.entries is None:
            return
        for each in (path, path.with_name(path.name + "-wal")):
            if each.exists():
                found = os.lstat(each)
                node = _Node(content=each.read_bytes(), sqlite=True)
                self._nodes[found.st_dev, found.st_ino] = node
                parent.entries[each.name] = node
            else:
                parent.entries.pop(each.name, None)


class _FaultyOs:
    """`os` for `files.py`: changes are steps of a disk, all else is as ever."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        disk, path = self._disk, Path(path)
        new = bool(flags & os.O_CREAT) and disk.covers(path) and not os.path.lexists(path)
        if new:
            disk.step("open", disk.named(path), needs_room=True)
        handle = os.open(path, flags, mode)
        if disk.covers(path):
            disk.opened(handle, path, new=new)
        return handle

    def close(self, handle: int) -> None:
        self._disk.closed(handle)
        os.close(handle)

    def write(self, handle: int, data: Any) -> int:
        return self._write("write", handle, data, lambda part: os.write(handle, part))

    def pwrite(self, handle: int, data: Any, at: int) -> int:
        return self._write("pwrite", handle, data, lambda part: os.pwrite(handle, part, at))

    def _write(
        self, operation: str, handle: int, data: Any, write: Callable[[memoryview], int]
    ) -> int:
        disk, whole = self._disk, memoryview(data)
        kind = disk.step(operation, disk.named(disk.path_of(handle)), needs_room=True)
        if kind not in ("torn", "short") or len(whole) < 2:
            return write(whole)
        written = write(whole[: len(whole) // 2])
        if kind == "torn":
            disk.die()
        return written

    def posix_fallocate(self, handle: int, at: int, size: int) -> None:
        disk = self._disk
        disk.step("reserve", disk.named(disk.path_of(handle)), needs_room=True)
        os.posix_fallocate(handle, at, size)

    def ftruncate(self, handle: int, size: int) -> None:
        self._disk.step("truncate", self._disk.named(self._disk.path_of(handle)))
        os.ftruncate(handle, size)

    def fchmod(self, handle: int, mode: int) -> None:
        self._disk.step("chmod", self._disk.named(self._disk.path_of(handle)))
        os.fchmod(handle, mode)

    def fsync(self, handle: int) -> None:
        self._disk.step("fsync", self._disk.named(self._disk.path_of(handle)))
        os.fsync(handle)
        self._disk.synced(handle)

    def replace(self, source: Path, target: Path) -> None:
        disk = self._disk
        disk.step("rename", f"{disk.named(Path(source))} to {disk.named(Path(target))}")
        if os.path.lexists(target):
            disk.dropped(target)
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        if self._disk.dead:
            raise FileNotFoundError(path)  # also for `__del__`, which must not fail
        if os.path.lexists(path):
            try:
                self._disk.step("remove", self._disk.named(Path(path)))
            except Killed:
                raise FileNotFoundError(path) from None  # the next step ends the process
            self._disk.dropped(path)
        os.unlink(path)

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        self._disk.step("mkdir", self._disk.named(Path(path)), needs_room=True)
        os.mkdir(path, mode)
        self._disk.added(path, folder=True)

    def rmdir(self, path: Path) -> None:
        self._disk.step("rmdir", self._disk.named(Path(path)))
        self._disk.dropped(path)
        os.rmdir(path)

    def statvfs(self, path: Path) -> Any:
        found = os.statvfs(path)
        if not self._disk.full:
            return found
        return os.statvfs_result((found.f_bsize, found.f_frsize, found.f_blocks, 0, 0, *found[5:]))


DiskState = dict[str, bytes | None]
"""Files and folders by path; None: a folder."""


class _Cutter:
    """The states that a cut may leave of the disk as it is now."""

    def __init__(self, disk: FaultyDisk) -> None:
        self._disk = disk
        self._names: dict[Path, dict[str, _Node]] = {}
        """Names of every folder now."""
        self._live: dict[int, bytes] = {}
        """Bytes of the files that have a name now, by the identity of their node."""
        self._look(disk.folder)

    def _look(self, folder: Path) -> None:
        names = self._names[folder] = self._disk.names(folder)
        for name, node in names.items():
            if node.entries is not None:
                self._look(folder / name)
            else:
                self._live[id(node)] = (folder / name).read_bytes()

    def state(self, cut: str) -> DiskState:
        """Return the state that one kind of cut leaves."""
        found: DiskState = {}
        self._fill(found, cut, self._disk.root, self._disk.folder, "")
        return found

    def _fill(self, found: DiskState, cut: str, node: _Node, live: Path | None, to: str) -> None:
        """Add a folder: each name as it was synced, or as it is now."""
        synced = node.entries or {}
        now = {} if live is None else self._names[live]
        for name in sorted({*synced, *now}):
            old, new = synced.get(name), now.get(name)
            is_sqlite = any(each is not None and each.sqlite for each in (old, new))
            path = f"{to}{name}"
            keeps = old is new or is_sqlite or _keeps_name(cut, path)
            chosen = new if keeps else old
            if chosen is None:
                continue
            if chosen.entries is not None:
                found[path] = None
                here = live / name if live is not None and chosen is new else None
                self._fill(found, cut, chosen, here, f"{path}/")
            else:
                found[path] = self._content(cut, chosen, path)

    def _content(self, cut: str, node: _Node, path: str) -> bytes:
        old = b"" if node.content is None else node.content
        new = self._live.get(id(node), old)
        if old == new or node.sqlite:
            return old
        fate = cut
        if cut.startswith("mixed"):
            fate = ("nothing", "zeros", "unnamed", "half")[_draw(cut, path, "content") % 4]
        match fate:
            case "unnamed":
                return new
            case "zeros":
                return old[: len(new)] + bytes(max(0, len(new) - len(old)))
            case "half":
                return new[: len(new) // 2] + old[len(new) // 2 :]
            case _:
                return old


def _keeps_name(cut: str, path: str) -> bool:
    match cut:
        case "nothing" | "unnamed":
            return False
        case "empty" | "zeros":
            return True
        case _:
            return _draw(cut, path, "name") % 2 == 0


def _draw(cut: str, path: str, purpose: str) -> int:
    """Draw a number, always the same."""
    return crc32(f"{cut}/{purpose}/{_steady(path)}".encode()) >> 3


def _is_sqlite(path: Path) -> bool:
    """True if SQLite writes this file."""
    return ".sqlite" in path.name


def _steady(path: str) -> str:
    """Return a path without the random part of a draft's name."""
    return path if not path.endswith(".draft") else path[: -len(".draft") - 9]


def _write(state: DiskState, to: Path) -> None:
    to.mkdir()
    for name, content in state.items():
        if content is None:
            (to / name).mkdir()
        else:
            (to / name).write_bytes(content)
