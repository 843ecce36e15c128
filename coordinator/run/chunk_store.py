"""The chunks that devices may ask for, on disk: several versions of a model share what is equal.

Each set of chunks brings one file with those that were not here before. A file goes when no set
needs any of its chunks any more.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class _Place:
    file: int
    offset: int
    size: int


class ChunkStore:
    """Chunks by hash, in named sets. What a folder held before is deleted."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._sets: dict[str, frozenset[bytes]] = {}
        self._users: Counter[bytes] = Counter()
        """How many sets need a chunk."""
        self._places: dict[bytes, _Place] = {}
        self._files: dict[int, int] = {}
        """Open descriptors, by the file's number."""
        self._held: Counter[int] = Counter()
        """How many chunks of a file are needed."""
        self._next = 1

    def __getitem__(self, hash: bytes) -> bytes:
        place = self._places[hash]
        return os.pread(self._files[place.file], place.size, place.offset)

    def get(self, hash: bytes) -> bytes | None:
        """A chunk's bytes; None if it is gone."""
        return self[hash] if hash in self._places else None

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._places

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def add(
        self, name: str, chunks: Iterable[tuple[bytes, bytes]], here: Iterable[bytes] = ()
    ) -> list[bytes]:
        """Hold a set of chunks, by hash, and some that are `here` already. Each is written as it
        comes. Returns the hashes of those that were not here before.
        """
        number, self._next = self._next, self._next + 1
        path, offset = self._path(number), 0
        members, new = set(here), []
        with path.open("wb") as file:
            for hash, chunk in chunks:
                members.add(hash)
                if hash in self._places:
                    continue
                file.write(chunk)
                self._places[hash] = _Place(number, offset, len(chunk))
                offset += len(chunk)
                new.append(hash)
        if new:
            self._files[number] = os.open(path, os.O_RDONLY)
            self._held[number] = len(new)
        else:
            path.unlink()
        self._users.update(members)
        self._sets[name] = frozenset(members)
        return new

    def names(self) -> Iterable[str]:
        """The sets that are held."""
        return tuple(self._sets)

    def drop(self, name: str) -> list[bytes]:
        """Hold a set no longer. Returns the hashes that no other set needs; they are gone."""
        gone = []
        for hash in self._sets.pop(name):
            self._users[hash] -= 1
            if self._users[hash]:
                continue
            del self._users[hash]
            gone.append(hash)
            self._release(self._places.pop(hash).file)
        return gone

    def close(self) -> None:
        """Give up what is open."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _release(self, number: int) -> None:
        self._held[number] -= 1
        if not self._held[number]:
            del self._held[number]
            os.close(self._files.pop(number))
            self._path(number).unlink()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.bin"
