"""Chunks on disk that devices may ask for; versions of a model share equal chunks.

Each set of chunks adds one file with its new chunks. A file is deleted once no set needs any of its
chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.program.files import PlacedFile, make_folder, remove, remove_folder


@dataclass(frozen=True, slots=True)
class _Place:
    file: int
    offset: int
    size: int


class ChunkStore:
    """Chunks by hash, in named sets. Deletes earlier contents of its folder."""

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
        self._held: Counter[int] = Counter()
        """Number of needed chunks in each file."""
        self._next = 1

    def __getitem__(self, hash: bytes) -> bytes:
        place = self._places[hash]
        return self._files[place.file].read_at(place.size, place.offset)

    def get(self, hash: bytes) -> bytes | None:
        """Return a chunk's bytes; None if it is gone."""
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
        """Add a set of chunks by hash, including chunks that are `here` already. Writes each chunk
        as it comes. Returns the hashes of the new ones. A set of this name is extended.
        """
        number, self._next = self._next, self._next + 1
        file, offset = PlacedFile(self._folder / f"{number:08}.bin", mode=0o600), 0
        self._files[number] = file
        members, new = set(here), []
        for hash, chunk in chunks:
            members.add(hash)
            if hash in self._places:
                continue
            file.write_at(chunk, offset)
            self._places[hash] = _Place(number, offset, len(chunk))
            offset += len(chunk)
            new.append(hash)
        self._held[number] = len(new)
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
            self._release(self._places.pop(hash).file)
        return gone

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _release(self, number: int) -> None:
        self._held[number] -= 1
        if not self._held[number]:
            self._remove(number)

    def _remove(self, number: int) -> None:
        del self._held[number]
        file = self._files.pop(number)
        file.close()
        remove(file.path)
