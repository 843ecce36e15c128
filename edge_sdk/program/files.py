"""Durable files: complete or absent, and on disk when the call returns.

A file or folder that is replaced is written beside its place under a draft's name, synced and
renamed; then its folder is synced. A process killed in between leaves the old one or the new one,
and perhaps a draft, which the next start removes (`remove_leftovers`).

    .<name>.<8 hex digits>.draft    the only temporary name there is

Everything a run keeps is written, renamed and removed here, each step by one call of this module's
`os`. Only SQLite (the index of a memory) writes by itself.

A disk without room raises `DiskFull`, which names the file, the bytes that it needs and those that
are free. Within `waiting_for_room`, a step that finds no room is tried again instead.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, BinaryIO, TypeVar, cast

Data = bytes | bytearray | memoryview
Writer = Callable[[BinaryIO], object]
"""Writes a file's content to a stream that can seek."""

_BINARY = getattr(os, "O_BINARY", 0)  # Windows would change line ends
_DRAFT = ".draft"
_NO_ROOM = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})

T = TypeVar("T")


class DiskFull(OSError):
    """The disk has no room for a file: its path, the bytes that it needs, and the bytes free.

    `needed` counts the rest of what is being written; 0: a name alone.
    """

    def __init__(self, path: Path, needed: int, free: int, code: int = errno.ENOSPC) -> None:
        words = f"no space left on the disk: {needed:,} bytes are needed, {free:,} are free"
        super().__init__(code, words, str(path))
        self.path, self.needed, self.free = path, needed, free


WaitForRoom = Callable[[DiskFull], object]
"""Returns when a step that found no room is to be tried again. It may raise instead."""

_wait: ContextVar[WaitForRoom | None] = ContextVar("wait", default=None)


@contextmanager
def waiting_for_room(wait: WaitForRoom | None) -> Iterator[None]:
    """Call `wait` when the disk is full, and then try again; None: raise `DiskFull` at once."""
    before = _wait.set(wait)
    try:
        yield
    finally:
        _wait.reset(before)


def room_wait() -> WaitForRoom | None:
    """Return what this thread calls when the disk is full; None: `DiskFull` is raised.

    Threads that it begins do not call it.
    """
    return _wait.get()


def free_bytes(path: Path) -> int:
    """Return the bytes that are free for a file at this path, whether or not it exists."""
    place = next((each for each in (path, *path.absolute().parents) if each.exists()), Path())
    try:
        found = os.statvfs(place)
    except (OSError, AttributeError):  # Windows has no such call
        return 0
    return found.f_bavail * found.f_frsize


def _with_room(path: Path, needed: int, step: Callable[[], T]) -> T:
    """Perform a step that takes room on the disk."""
    while True:
        try:
            return step()
        except OSError as error:  # noqa: PERF203  to try again is the point
            if error.errno is None or error.errno not in _NO_ROOM:
                raise
            full = DiskFull(path, needed, free_bytes(path), error.errno)
            wait = _wait.get()
            if wait is None:
                raise full from error
            wait(full)


def write_whole(
    path: Path, data: Data | Writer, *, mode: int | None = None, synced: bool = True
) -> None:
    """Replace a file; after a crash it is the old or the new one.

    `mode`: permissions, set before the content is written; None: by the umask. Not `synced`: it is
    complete for other processes, but a power cut may leave any bytes under this name. Raises
    `OSError`, and what a writer raises; the old file is then unchanged.
    """
    draft = _draft_of(path)
    permissions = 0o666 if mode is None else 0o600
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
        handle = _with_room(path, 0, lambda: os.open(draft, flags, permissions))
        try:
            if callable(data):
                with io.BufferedWriter(_Stream(handle, path)) as stream:
                    data(cast(BinaryIO, stream))
            else:
                _write_all(handle, data, path)
            if mode is not None:
                os.fchmod(handle, mode)
            if synced:
                _with_room(path, 0, lambda: os.fsync(handle))
        finally:
            os.close(handle)
        _with_room(path, 0, lambda: os.replace(draft, path))
    except BaseException as error:
        with suppress(OSError):
            os.unlink(draft)
        _name(error, path)
        raise
    if synced:
        sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a new folder to fill with `write_whole` and `make_folder`; on success it takes the name
    `path`, where there must be nothing or an empty folder.

    Drafts of the same name that killed processes left are removed. Of several processes that make
    the folder at a time, the first to end gives it, and the others raise `OSError`.
    """
    path = path.absolute()
    for leftover in _drafts(path.parent, path.name):
        if not is_held(leftover):
            remove_folder(leftover)
    draft = _draft_of(path)
    held: int | None = None
    try:
        os.mkdir(draft)
        held = _hold(draft)
        yield draft
        if path.is_dir():
            os.rmdir(path)  # renaming onto it is not allowed everywhere
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            remove_folder(draft)
        raise
    finally:
        if held is not None:
            os.close(held)
    sync_folder(path.parent)


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Mark a folder, made if possible, as in use while the context lasts; several processes may."""
    with suppress(OSError):
        make_folder(folder)
    handle = _hold(folder, shared=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def is_held(folder: Path) -> bool:
    """True if a process that lives is in `held_folder`, or fills this draft of `whole_folder`."""
    try:
        handle = _hold(folder)
    except BlockingIOError:
        return True
    if handle is not None:
        os.close(handle)
    return False


def _hold(folder: Path, *, shared: bool = False) -> int | None:
    """Lock a folder until the descriptor is closed; None: the system cannot.

    Raises `BlockingIOError` if it is locked.
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return None
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def append_line(path: Path, line: bytes, *, mode: int = 0o666, synced: bool = True) -> None:
    """Append a line, which ends with a newline; a line that a crash cut short is ended first.

    `mode`: permissions of a new file, less the umask. Not `synced`: a power cut may lose the line.
    """
    is_new = not path.exists()
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | _BINARY
    handle = _with_room(path, len(line), lambda: os.open(path, flags, mode))
    try:
        size = os.lseek(handle, 0, os.SEEK_END)
        if size:
            os.lseek(handle, -1, os.SEEK_END)
            line = line if os.read(handle, 1) == b"\n" else b"\n" + line
        _write_all(handle, line, path)
        if synced:
            _with_room(path, 0, lambda: os.fsync(handle))
    except OSError as error:
        _name(error, path)
        raise
    finally:
        os.close(handle)
    if is_new and synced:
        sync_folder(path.parent)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder and its parents, unless they exist."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent, mode=mode)
    with suppress(FileExistsError):
        _with_room(path, 0, lambda: os.mkdir(path, mode))
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file, not a folder")
    sync_folder(path.parent)


def move(path: Path, to: Path, *, synced: bool = True) -> None:
    """Rename a file that is on disk, replacing any file of that name.

    Not `synced`: a power cut may bring back the old name, unless the folder is synced.
    """
    os.replace(path, to)
    if synced:
        sync_folder(to.parent)


def remove(path: Path) -> None:
    """Remove a file, if it exists. A power cut may bring it back, unless its folder is synced."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove a folder with its contents, or a file, if it exists."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_folder:
        remove(path)
        return
    for name in os.listdir(path):
        remove_folder(path / name)
    os.rmdir(path)


def remove_leftovers(folder: Path, *, older_than_s: float = 0.0) -> None:
    """Remove the drafts of processes that were killed.

    Called at start, by the only process that writes there; in a shared folder, `older_than_s`
    spares drafts that another process may still be writing.
    """
    for draft in _drafts(folder):
        with suppress(FileNotFoundError):
            if os.stat(draft).st_mtime <= time.time() - older_than_s:
                remove_folder(draft)


def sync_stream(stream: IO[bytes]) -> None:
    """Return when everything written to a stream is on disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make new and removed file names durable; Windows neither needs nor allows this."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path, *, mode: int = 0o644) -> int:
    """Lock a file, made if necessary, until the returned descriptor is closed.

    Raises `BlockingIOError` while another process has it locked.
    """
    import fcntl  # not on Windows, where no coordinator runs

    handle = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


def mark(handle: int, content: bytes) -> None:
    """Replace what an open file holds, such as a lock's; a crash may leave nothing."""
    os.ftruncate(handle, 0)
    if content:
        os.pwrite(handle, content, 0)


class PlacedFile:
    """A file written in place. Nothing durable may name it before `sync` returns."""

    def __init__(self, path: Path, *, new: bool = True, mode: int = 0o644) -> None:
        """Opens a file, which must not exist yet if it is `new`."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if new else 0)
        self._handle = _with_room(path, 0, lambda: os.open(path, flags, mode))

    def fileno(self) -> int:
        """Its descriptor, to map it."""
        return self._handle

    def write_at(self, data: Data, position: int) -> None:
        """Write all of the bytes."""
        rest = memoryview(data).cast("B")

        def write() -> int:
            return os.pwrite(self._handle, rest, position)

        try:
            while rest:
                written = _with_room(self.path, len(rest), write)
                rest, position = rest[written:], position + written
        except OSError as error:
            _name(error, self.path)
            raise

    def read_at(self, size: int, position: int) -> bytes:
        """Read this many bytes, fewer at the end of the file."""
        return os.pread(self._handle, size, position)

    def reserve(self, size: int) -> None:
        """Reserve room on disk now, so that writing to a map of the file cannot fail."""
        if hasattr(os, "posix_fallocate"):
            try:
                _with_room(self.path, size, lambda: os.posix_fallocate(self._handle, 0, size))
            except OSError as error:
                _name(error, self.path)
                raise
            return
        for start in range(0, size, 2**20):
            self.write_at(bytes(min(2**20, size - start)), start)

    def truncate(self, size: int) -> None:
        """Make the file this long."""
        os.ftruncate(self._handle, size)

    def sync(self) -> None:
        """Return when everything written is on disk; the name may need `sync_folder`."""
        _with_room(self.path, 0, lambda: os.fsync(self._handle))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._handle)


class _Stream(io.RawIOBase):
    """A descriptor as a stream; it stays open when the stream is closed."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self._path = path

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._handle, offset, whence)

    def write(self, data: object) -> int:
        whole = memoryview(cast(Data, data))
        return _with_room(self._path, whole.nbytes, lambda: os.write(self._handle, whole))


def _write_all(handle: int, data: Data, path: Path) -> None:
    rest = memoryview(data).cast("B")

    def write() -> int:
        return os.write(handle, rest)

    while rest:
        rest = rest[_with_room(path, len(rest), write) :]


def _name(error: BaseException, path: Path) -> None:
    """Note the path in an error that does not say it, or that says a draft's."""
    if not isinstance(error, OSError) or error.errno is None:  # a name would hide its message
        return
    if error.filename is None or _DRAFT in str(error.filename):
        error.filename = str(path)


def _drafts(folder: Path, of: str | None = None) -> list[Path]:
    """The drafts in a folder; only those of one name, if it is given."""
    names = [name for name in os.listdir(folder) if name[0] == "." and name.endswith(_DRAFT)]
    if of is not None:
        names = [name for name in names if name[1 : -len(_DRAFT) - 9] == of]
    return [folder / name for name in names]


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_DRAFT}")
