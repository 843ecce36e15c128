"""Chunks on a device's disk, which cost about what they weigh.

    chunks/ <hash>             a large chunk
            pack-<number>      small chunks, one behind the other: hash ‖ size (uint32) ‖ bytes

A file takes whole blocks of the disk, so thousands of small files would take many times their
bytes. A process appends to packs of its own and only reads those of earlier ones. A chunk that is
dropped leaves a gap in its pack; once half of a pack is gaps, the chunks that are left move to the
newest pack, and the file goes. All bytes that files take count, the gaps and the rests of blocks
included.

Nothing is synced. Chunks have their hash for a name and are checked when they are read, so damage
shows, and the chunk is pulled again. A pack that a crash cut short ends with its last whole chunk.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from edge_sdk.program.files import PlacedFile, make_folder, move, remove
from edge_sdk.program.logs import fact
from edge_sdk.protocol.chunks import HASH_BYTES

log = logging.getLogger(__name__)

SMALL_BYTES = 2**15
"""Chunks below this size are packed."""
PACK_BYTES = 2**21
"""A pack of this size gets no further chunks."""
BLOCK_BYTES = 4096
"""Unit in which file systems give room to files."""

_PACK = "pack-"
_HEAD_BYTES = HASH_BYTES + 4


@dataclass(slots=True, eq=False)
class _File:
    """A pack, or the file of one large chunk."""

    path: Path
    size: int = 0
    """Bytes written, gaps included."""
    offsets: dict[bytes, int] = field(default_factory=dict)
    """Places of the chunks in it."""
    live_bytes: int = 0
    """Bytes of these chunks and their heads."""

    @property
    def taken(self) -> int:
        """Bytes that it takes on disk."""
        return -(-self.size // BLOCK_BYTES) * BLOCK_BYTES


class ChunkCache:
    """Chunks in a folder, by hash. The least recently used go when they take too many bytes.

    Chunks in use stay, however many they are. For one process and one thread. A chunk for which the
    disk has no room is held in memory while it is in use.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        make_folder(folder)
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Sizes of the chunks on disk, the least recently used first."""
        self._places: dict[bytes, _File] = {}
        self._in_use: frozenset[bytes] = frozenset()
        self._held: dict[bytes, bytes] = {}
        self._pack: _File | None = None
        """Pack that new chunks are appended to."""
        self._open: PlacedFile | None = None
        """Its file, while chunks come."""
        self._leftover: Path | None = None
        """File of a large chunk that makes room: the one that comes takes it, which costs a file
        system less than a file that goes and another that comes."""
        self._next = 1
        self._taken = 0
        self._warned = False
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime):
            if path.name.startswith(_PACK):
                self._read_pack(path)
            elif len(path.name) == 2 * HASH_BYTES:
                hash, size = bytes.fromhex(path.name), path.stat().st_size
                self._note(hash, _File(path), 0, size)
            else:
                remove(path)

    @property
    def taken_bytes(self) -> int:
        """Bytes that the files of all chunks take on disk."""
        return self._taken

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._places or hash in self._held

    def __getitem__(self, hash: bytes) -> bytes:
        """See `edge_sdk.protocol.chunks.Chunks`."""
        if hash in self._held:
            return self._held[hash]
        file, size = self._places[hash], self._sizes[hash]
        try:
            with file.path.open("rb") as stream:
                stream.seek(file.offsets[hash])
                chunk = stream.read(size)
        except FileNotFoundError:
            chunk = b""
        if len(chunk) != size:
            self._forget(hash)
            raise KeyError(hash)
        return chunk

    def use(self, hashes: Iterable[bytes]) -> None:
        """Mark these chunks, and no others, as in use."""
        self._in_use = frozenset(hashes)
        self._held = {hash: chunk for hash, chunk in self._held.items() if hash in self._in_use}
        here = [hash for hash in self._in_use if hash in self._places]
        for hash in here:
            self._sizes.move_to_end(hash)
        for file in {self._places[hash] for hash in here}:
            self._touch(file)

    def put(self, hash: bytes, chunk: bytes) -> None:
        """Keep a chunk that was checked."""
        self.drop([hash])
        if len(chunk) >= SMALL_BYTES:  # before it is written: it takes the file of one that goes
            self._evict(self._max_bytes - -(-len(chunk) // BLOCK_BYTES) * BLOCK_BYTES)
        try:
            self._write(hash, chunk)
        except OSError as error:
            self._evict(self._taken - len(chunk) - BLOCK_BYTES)
            self._remove_leftover()
            try:
                self._write(hash, chunk)
            except OSError:
                self._warn(error)
                self._held[hash] = chunk
                return
        finally:
            self._remove_leftover()
        self._evict(self._max_bytes, but=hash)
        self._remove_leftover()

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Remove chunks, if they are here."""
        for hash in hashes:
            self._held.pop(hash, None)
            if hash in self._places:
                self._tidy(self._forget(hash))
        self._remove_leftover()

    def rest(self) -> None:
        """Close the pack that is written to; the next chunk opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _remove_leftover(self) -> None:
        if self._leftover is not None:
            with suppress(OSError):
                remove(self._leftover)
            self._leftover = None

    # -- files ----------------------------------------------------------------------------------

    def _write(self, hash: bytes, chunk: bytes) -> None:
        if len(chunk) < SMALL_BYTES:
            self._append(hash, chunk)
            return
        # Under its own name at once: what a crash cuts short has another hash.
        path, leftover = self._folder / hash.hex(), self._leftover
        if leftover is not None:
            self._leftover = None
            with suppress(OSError):
                move(leftover, path, synced=False)
        file = PlacedFile(path, new=False, mode=0o600)
        try:
            file.write_at(chunk, 0)
            file.truncate(len(chunk))
        except OSError:
            remove(path)
            raise
        finally:
            file.close()
        self._note(hash, _File(path), 0, len(chunk))

    def _append(self, hash: bytes, chunk: bytes) -> None:
        if self._pack is None or self._pack.size >= PACK_BYTES:
            self.rest()
            self._pack = _File(self._new_pack())
        if self._open is None:
            self._open = PlacedFile(self._pack.path, new=False, mode=0o600)
        pack, file = self._pack, self._open
        try:
            file.write_at(hash + len(chunk).to_bytes(4, "little") + chunk, pack.size)
        except OSError:
            file.truncate(pack.size)
            raise
        self._note(hash, pack, pack.size + _HEAD_BYTES, len(chunk))

    def _new_pack(self) -> Path:
        while True:
            path, self._next = self._folder / f"{_PACK}{self._next:08}", self._next + 1
            if not path.exists():
                return path

    def _read_pack(self, path: Path) -> None:
        """Note the chunks of an earlier process's pack."""
        pack = _File(path)
        for hash, offset, size in _records(path):
            self.drop([hash])  # it moved, and a crash left the older copy
            self._note(hash, pack, offset, size)
        self._grow(pack, path.stat().st_size)  # what a crash cut short is a gap
        self._tidy(pack)

    def _note(self, hash: bytes, file: _File, offset: int, size: int) -> None:
        """Note a chunk at the end of a file."""
        self._grow(file, offset + size)
        file.offsets[hash] = offset
        file.live_bytes += _HEAD_BYTES + size
        self._sizes[hash] = size
        self._places[hash] = file

    def _grow(self, file: _File, size: int) -> None:
        self._taken -= file.taken
        file.size = size
        self._taken += file.taken

    def _leave(self, hash: bytes) -> _File:
        """Make a gap in the file of a chunk, and return the file."""
        file = self._places.pop(hash)
        file.live_bytes -= _HEAD_BYTES + self._sizes[hash]
        del file.offsets[hash]
        return file

    def _forget(self, hash: bytes) -> _File:
        file = self._leave(hash)
        del self._sizes[hash]
        return file

    def _tidy(self, file: _File) -> None:
        """Remove a file that is half gaps; the chunks in it move, and stay as recently used."""
        if file.offsets and 2 * file.live_bytes >= file.size:
            return
        if file is self._pack:
            self.rest()
            self._pack = None
        for hash in list(file.offsets):
            with suppress(KeyError):  # it cannot be read: forgotten by now
                self._move(hash, self[hash])
        self._taken -= file.taken
        if self._leftover is None and not file.path.name.startswith(_PACK):
            self._leftover = file.path
            return
        with suppress(OSError):
            remove(file.path)

    def _move(self, hash: bytes, chunk: bytes) -> None:
        self._leave(hash)
        try:
            self._append(hash, chunk)
        except OSError:
            del self._sizes[hash]
            if hash in self._in_use:
                self._held[hash] = chunk

    def _evict(self, most: int, but: bytes | None = None) -> None:
        """Remove chunks that are not in use until files take at most so many bytes."""
        if self._taken <= most:
            return
        # Chunks in use are the most recently used ones, so the first look is mostly enough.
        while self._taken > most:
            unused = (hash for hash in self._sizes if hash not in self._in_use and hash != but)
            if (old := next(unused, None)) is None:
                return
            self._tidy(self._forget(old))

    def _touch(self, file: _File) -> None:
        try:
            os.utime(file.path)
        except OSError as error:
            log.debug("%s: %s", file.path, error)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.error(
                "no room on disk for chunks, which are held in memory: %s",
                error,
                extra=fact("disk"),
            )


def read_chunk(folder: Path, hash: bytes) -> bytes:
    """Read a chunk from the folder of a cache that another process may be using.

    Raises `KeyError` if it is not there. Check its hash: it may have moved meanwhile.
    """
    with suppress(OSError):
        return (folder / hash.hex()).read_bytes()
    for pack in sorted(folder.glob(_PACK + "*")):
        with suppress(OSError):
            for each, offset, size in _records(pack):
                if each == hash:
                    with pack.open("rb") as stream:
                        stream.seek(offset)
                        return stream.read(size)
    raise KeyError(hash)


def _records(path: Path) -> Iterator[tuple[bytes, int, int]]:
    """Yield hash, offset and size of the whole chunks of a pack."""
    with path.open("rb") as stream:
        left = os.fstat(stream.fileno()).st_size
        while left >= _HEAD_BYTES:
            head = stream.read(_HEAD_BYTES)
            size = int.from_bytes(head[HASH_BYTES:], "little")
            left -= _HEAD_BYTES + size
            if left < 0:
                return
            yield head[:HASH_BYTES], stream.tell(), size
            stream.seek(size, os.SEEK_CUR)
