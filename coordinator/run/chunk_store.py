"""Chunks on disk that devices may ask for; versions of a model share equal chunks.

Each set of chunks adds one file with its new chunks. A file is deleted once no set needs any of its
chunks. Those that are less than half needed are replaced by one file with the needed chunks, so
that the disk holds at most about twice what devices may ask for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from edge_sdk.program.files import (
    PlacedFile,
    make_folder,
    remove,
    remove_folder,
    waiting_for_room,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    file: int
    offset: int
    size: int


class ChunkStore:
    """Chunks by hash, in named sets. Deletes earlier contents of its folder.

    Any thread may read. Sets are added and dropped by one thread at a time.
    """

    def __init__(self, folder: Path) -> None:
        remove_folder(folder)
        make_folder(folder, mode=0o700)
        self._folder = folder
        self._sets: dict[str, frozenset[bytes]] = {}
        self._users: Counter[bytes] = Counter()
        """Number of sets that need each chunk."""
        self._places: dict[bytes, _Place] = {}
        self._files: dict[int, PlacedFile] = {}
        """Open files, by number."""
        self._sizes: dict[int, int] = {}
        """Bytes of each file that is complete."""
        self._needed: Counter[int] = Counter()
        """Bytes of the needed chunks in each file."""
        self._next = 1
        self._lock = Lock()
        """Held while places change, and while a chunk is read."""

    def __getitem__(self, hash: bytes) -> bytes:
        with self._lock:
            place = self._places[hash]
            return self._files[place.file].read_at(place.size, place.offset)

    def get(self, hash: bytes) -> bytes | None:
        """Return a chunk's bytes; None if it is gone."""
        try:
            return self[hash]
        except KeyError:
            return None

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._places

    def __iter__(self) -> Iterator[bytes]:
        with self._lock:
            return iter(tuple(self._places))

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self, name: str, chunks: Iterable[tuple[bytes, bytes]], here: Iterable[bytes] = ()
    ) -> list[bytes]:
        """Add a set of chunks by hash, including chunks that are `here` already. Writes each chunk
        as it comes. Returns the hashes of the new ones. A set of this name is extended.
        """
        (number, file), offset = self._new_file(), 0
        members, new = set(here), []
        for hash, chunk in chunks:
            members.add(hash)
            if hash in self._places:
                continue
            file.write_at(chunk, offset)
            with self._lock:
                self._places[hash] = _Place(number, offset, len(chunk))
            offset += len(chunk)
            new.append(hash)
        self._sizes[number] = self._needed[number] = offset
        if not new:
            self._remove(number)
        before = self._sets.get(name, frozenset())
        self._users.update(members - before)
        self._sets[name] = before | members
        return new

    def names(self) -> Iterable[str]:
        """Names of the stored sets."""
        return tuple(self._sets)

    def relabel(self, name: str, to: str) -> None:
        """Give a set another name, which no set has."""
        self._sets[to] = self._sets.pop(name)

    def drop(self, name: str) -> list[bytes]:
        """Drop a set. Deletes the chunks that no other set needs and returns their hashes."""
        gone = []
        for hash in self._sets.pop(name):
            self._users[hash] -= 1
            if self._users[hash]:
                continue
            del self._users[hash]
            gone.append(hash)
            with self._lock:
                place = self._places.pop(hash)
            self._needed[place.file] -= place.size
        with waiting_for_room(None):  # tidying waits for nobody
            self._tidy()
        return gone

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _new_file(self) -> tuple[int, PlacedFile]:
        number, self._next = self._next, self._next + 1
        file = self._files[number] = PlacedFile(self._folder / f"{number:08}.bin", mode=0o600)
        return number, file

    def _tidy(self) -> None:
        """Remove files of which nothing is needed, and replace those with many gaps by one."""
        for number in [each for each in self._sizes if not self._needed[each]]:
            self._remove(number)
        sparse = {each for each, size in self._sizes.items() if 2 * self._needed[each] < size}
        if not sparse:
            return
        number, file = self._new_file()
        moved: dict[bytes, _Place] = {}
        offset = 0
        try:
            for hash, place in tuple(self._places.items()):
                if place.file in sparse:
                    file.write_at(self[hash], offset)
                    moved[hash] = _Place(number, offset, place.size)
                    offset += place.size
        except OSError as error:
            log.warning("chunks stay in files with gaps: %s", error)
            self._remove(number)
            return
        self._sizes[number] = self._needed[number] = offset
        with self._lock:
            self._places.update(moved)
        for each in sparse:
            self._remove(each)

    def _remove(self, number: int) -> None:
        self._sizes.pop(number, None)
        del self._needed[number]
        with self._lock:  # nobody reads it now
            file = self._files.pop(number)
            file.close()
        remove(file.path)
