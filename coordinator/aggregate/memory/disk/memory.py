"""Memory on disk: entries of devices take no RAM, and a crash loses no movement.

    index.sqlite         devices, movements, segments                     (`index.py`)
    segment-<n>.bin      the values, in the order they were stored        (`segments.py`)
    sums-0.bin, -1.bin   the running sums: those of the last commit, and room for those of the next
    lock                 held by the process that has the folder open

Everything has a checksum. The index and the sums are checked when the folder is opened, a movement
when it is first read: opening takes no longer for devices that nobody asks for.

Nothing that the index of the last commit names is ever written to. `commit` brings new files to
disk first and then changes the index in one transaction, so `kill -9` anywhere leaves one commit or
the next, to the bit. Files that the index does not name are deleted on opening.

A segment of which less than half is live is rewritten into the next one, so a folder stays within
about twice of what is live, and a value is copied at most once for each that died beside it.

RAM: the sums (8 bytes a parameter) and a few pieces of work; nothing for every device.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Weighting
from coordinator.aggregate.memory.contract import (
    Float64,
    Made,
    MemoryConfig,
    MemoryType,
    Rounds,
)
from coordinator.aggregate.memory.disk.index import VERSION, MemoryIndex, Row, SegmentRow
from coordinator.aggregate.memory.disk.segments import (
    FileSlot,
    SegmentMaps,
    SegmentWriter,
    segment_name,
    write_at,
)
from coordinator.aggregate.memory.disk.space import SHARE_LIVE, check_space, estimate_bytes
from coordinator.aggregate.memory.errors import (
    ADVICE,
    MemoryBusy,
    MemoryDamaged,
    MemoryStoreError,
)
from coordinator.aggregate.memory.newest import Memory, pick
from coordinator.aggregate.memory.store import DeviceMemory, Slot, Stored
from coordinator.aggregate.memory.sums import Sums
from coordinator.aggregate.memory.values import VALUE_TYPES
from coordinator.checksums import CHECK_BYTES, checksum
from coordinator.errors import ConfigError
from edge_sdk.program.files import PlacedFile, lock_file, make_folder, remove, sync_folder
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

INDEX = "index.sqlite"
LOCK = "lock"

SUMS_MAGIC = b"tessera memory sums 2   "
SUMS_HEADER = struct.Struct("<24sq8s24x")
"""Magic, the number of the commit, and the checksum of both and of the sums."""


class DiskMemory(Memory):
    """A memory in a folder of its own, which one process at a time has open.

    A new folder is made; an old one must be of the same plan, dtype, damping, weighting and sums.
    """

    def __init__(
        self,
        folder: Path,
        plan: ModelPlan,
        config: MemoryConfig,
        *,
        devices: int = 0,
        reserve_bytes: int = 1 << 30,
    ) -> None:
        """Open the folder with room for `devices` devices in full, `reserve_bytes` left free.

        Raises `MemoryBusy` when another process has it open, `MemoryDamaged` when a file is not
        what it should be, `MemoryStoreError` when it was made for something else, `ConfigError`
        when the disk is too small.
        """
        sums = Sums(
            plan, VALUE_TYPES[config.memory_type], totals=config.sums, threads=config.threads
        )
        try:
            store = DiskStore(folder, plan, config, devices, reserve_bytes)
            try:
                now = store.restore(sums.arrays)
            except BaseException:
                store.close()
                raise
        except BaseException:
            sums.close()
            raise
        super().__init__(plan, config, store, sums, now)


def stored_config(folder: Path, plan: ModelPlan) -> MemoryConfig:
    """Return the settings that the memory in a folder was made with. Raises `MemoryStoreError`.

    Its entries stay however old they are.
    """
    _check_index_there(folder)
    index = MemoryIndex(folder / INDEX, plan.block_count)
    try:
        return memory_config(index)
    except (KeyError, ValueError, ConfigError) as error:
        raise MemoryDamaged(f"{folder / INDEX} does not say its settings: {error}") from error
    finally:
        index.close()


def memory_config(index: MemoryIndex) -> MemoryConfig:
    """Return the settings that a memory was made with, as its index says."""
    about = index.about()
    return MemoryConfig(
        memory_type=cast("MemoryType", about["dtype"]),
        damping=float(about["damping"]),
        weighting=cast("Weighting", about["weighting"]),
        sums=about["sums"] == "True",
    )


class DiskStore:
    """Movements in segment files, found through an index."""

    def __init__(
        self,
        folder: Path,
        plan: ModelPlan,
        config: MemoryConfig,
        devices: int,
        reserve_bytes: int,
    ) -> None:
        make_folder(folder, mode=0o700)
        self._folder = folder
        self._sizes = plan.block_sizes
        self._kind = VALUE_TYPES[config.memory_type]
        self._maps = SegmentMaps(folder, self._kind)
        self._writer: SegmentWriter | None = None
        self._added = 0
        """Values put in the writer's segment."""
        self._unsealed: set[int] = set()
        """Keys of movements whose values have no checksum yet."""
        self._checked: set[int] = set()
        """Keys of movements whose values match their checksum."""
        self._gone: list[int] = []
        """Segments that nothing refers to once the prepared changes are committed."""
        self._useless: list[int] = []
        """Segments that nothing refers to."""
        self._died: dict[int, int] = {}
        """Values that died since the last commit, by segment."""
        self._lock: int | None = _lock(folder)
        """Descriptor of the lock file; None once closed."""
        try:
            needed = estimate_bytes(plan, devices, config.memory_type, sums=config.sums)
            check_space(folder, needed, reserve_bytes)
            _check_index_there(folder)
            _make_index(folder)
            self._index = MemoryIndex(folder / INDEX, plan.block_count)
        except BaseException:
            self._unlock()
            raise
        try:
            self._check_about(plan, config)
            self._check_files()
        except BaseException:
            self.close()
            raise

    # -- opening ----------------------------------------------------------------------------

    def _check_about(self, plan: ModelPlan, config: MemoryConfig) -> None:
        """Mark a new folder as this memory's, or check that it is."""
        wanted = {
            "version": VERSION,
            "plan": plan.hash,
            "dtype": config.memory_type,
            "damping": config.damping,
            "weighting": config.weighting,
            "sums": config.sums,
        }
        about = self._index.about()
        if not about:
            self._index.set_about({**wanted, "commits": 0, "now": 0, "next_segment": 1})
            self._index.commit()
            about = self._index.about()
        for name, value in wanted.items():
            if about.get(name) != str(value):
                raise MemoryStoreError(
                    f"{self._folder / INDEX} holds a memory of {name} {about.get(name)}, not "
                    f"{value}: open it as it was made, or name another folder"
                )
        try:
            self._commits = int(about["commits"])
            self._now = int(about["now"])
            self._next_segment = int(about["next_segment"])
        except (KeyError, ValueError) as error:
            raise MemoryDamaged(
                f"{self._folder / INDEX} does not say its state: {error}"
            ) from error

    def _check_files(self) -> None:
        """Check that all segments are whole; delete files that the index does not name."""
        named = {segment_name(row.number): row.size for row in self._index.segments()}
        sizes = {path.name: path.stat().st_size for path in self._folder.glob("segment-*.bin")}
        for name, size in named.items():
            if name not in sizes:
                raise MemoryDamaged(
                    f"{self._folder / name} is missing, and the index names it; {ADVICE}"
                )
            if sizes[name] < size:
                raise MemoryDamaged(
                    f"{self._folder / name} was cut short: {sizes[name]} of {size} bytes; {ADVICE}"
                )
        for name in sizes.keys() - named.keys():
            remove(self._folder / name)

    def restore(self, sums: Sequence[NDArray[np.generic]]) -> int:
        """Fill the sums with those of the last commit. Returns its round."""
        if self._commits:
            read_sums(self._folder, self._commits, sums)
        return self._now

    # -- reading ----------------------------------------------------------------------------

    def kept(self, device: str) -> DeviceMemory:
        """See `Store`."""
        rows = self._index.of_device(device)
        if self._writer is not None and any(row.segment == self._writer.number for row in rows):
            self._writer.flush()
        return DeviceMemory(self._index.rounds(device), [self._stored(row) for row in rows])

    def made_before(self, round: int, most: int) -> list[str]:
        """See `Store`."""
        return self._index.made_before(round, most)

    def oldest(self) -> int | None:
        """See `Store`."""
        return self._index.oldest()

    def _stored(self, row: Row) -> Stored:
        place = self._place(row)
        if row.content is not None and row.key not in self._checked:
            if self._maps.content(*place) != row.content:
                raise MemoryDamaged(
                    f"{self._folder / segment_name(row.segment)}: the movement of {row.device!r} "
                    f"of round {row.made.round} does not match its checksum; {ADVICE}"
                )
            self._checked.add(row.key)
        scales, values = self._maps.read(*place)
        return Stored(row.key, row.made, row.ids, values, scales, row.segment)

    def _place(self, row: Row) -> tuple[int, int, int, int]:
        """Return a movement's segment and offset, and the number of its scales and values."""
        scales = len(row.ids) if self._kind.scaled else 0
        return row.segment, row.offset, scales, int(self._sizes[row.ids].sum())

    # -- changing ---------------------------------------------------------------------------

    def add(self, device: str, made: Made, ids: Indices, scales: Float64, size: int) -> Slot:
        """See `Store`."""
        segment, offset, slot = self._reserve(scales, size)
        self._unsealed.add(self._index.add(device, made, segment, offset, ids))
        return slot

    def update(self, device: str, rounds: Rounds, lost: Sequence[tuple[Stored, int, int]]) -> None:
        """See `Store`."""
        self._index.set_rounds(device, rounds)
        for stored, died, left in lost:
            self._died[stored.segment] = self._died.get(stored.segment, 0) + died
            if not left:
                self._index.drop(stored.key)
                self._unsealed.discard(stored.key)
                self._checked.discard(stored.key)

    def prepare(self, sums: Sequence[NDArray[np.generic]]) -> None:
        """See `Store`."""
        self._gone += self._settle()
        if self._writer is not None:
            self._writer.sync()
        self._seal()
        write_sums(self._folder, self._commits + 1, sums)
        sync_folder(self._folder)

    def commit(self, now: int) -> None:
        """See `Store`."""
        self._commits += 1
        self._index.set_about(
            {"commits": self._commits, "now": now, "next_segment": self._next_segment}
        )
        self._index.commit()
        if self._writer is not None:
            self._writer.close()
        self._writer, self._added = None, 0
        self._useless += self._gone
        self._gone = []

    def tidy(self) -> None:
        """See `Store`."""
        while self._useless:
            number = self._useless.pop()
            self._maps.forget(number)
            remove(self._folder / segment_name(number))

    def _seal(self) -> None:
        """Note the checksums of the values that are new since the last commit."""
        for key in sorted(self._unsealed):
            row = self._index.of_key(key)
            if row is None:
                continue
            place, content = self._place(row), None
            if self._writer is not None and row.segment == self._writer.number:
                content = self._writer.content(row.offset, place[-1] * self._kind.dtype.itemsize)
            self._index.seal(row, self._maps.content(*place) if content is None else content)
        self._unsealed.clear()

    def close(self) -> None:
        """See `Store`."""
        self._maps.close()
        if self._writer is not None:
            self._writer.close()
            remove(self._writer.path)
            self._writer = None
        self._index.close()
        self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _reserve(self, scales: Float64, size: int) -> tuple[int, int, FileSlot]:
        """Reserve `size` values in the next commit's segment: its number, an offset, a slot."""
        if self._writer is None:
            self._writer = SegmentWriter(self._folder, self._next_segment)
            self._next_segment += 1
        offset, slot = self._writer.reserve(scales, size, self._kind)
        self._added += size
        return self._writer.number, offset, slot

    def _settle(self) -> list[int]:
        """Count values that died, and rewrite segments with too little left.

        Returns the segments that nothing refers to any more.
        """
        died, self._died = self._died, {}
        gone = []
        for number in sorted(died):
            row = self._index.segment(number)
            if row is None:
                continue  # the one being written, see below
            live = row.live - died[number]
            if SHARE_LIVE * live < row.total:
                self._rewrite(number)
                self._index.drop_segment(number)
                gone.append(number)
            else:
                self._index.set_segment(SegmentRow(number, row.size, row.total, live))
        if self._writer is not None:
            number, size = self._writer.number, self._writer.size
            live = self._added - died.get(number, 0)
            self._index.set_segment(SegmentRow(number, size, self._added, live))
            if SHARE_LIVE * live < self._added:
                self._died[number] = 0  # looked at again by the next commit
        return gone

    def _rewrite(self, number: int) -> None:
        """Copy the live values of a segment to the one being written."""
        for row in self._index.of_segment(number):
            stored = self._stored(row)
            live = stored.live(self._index.rounds(row.device))
            values = pick(stored.values, self._sizes[row.ids], live)
            scales = stored.scales[live] if self._kind.scaled else stored.scales
            segment, offset, slot = self._reserve(scales, len(values))
            slot.put(0, values)
            self._index.move(row, segment, offset, row.ids[live])
            self._unsealed.add(row.key)


def sums_path(folder: Path, commit: int) -> Path:
    """Return the path of the sums of a commit."""
    return folder / f"sums-{commit % 2}.bin"


def sums_header(commit: int, sums: Sequence[NDArray[np.generic]]) -> bytes:
    """Return the first bytes of the sums of a commit."""
    start = SUMS_HEADER.pack(SUMS_MAGIC, commit, bytes(CHECK_BYTES))
    check = checksum(start, *(array.data.cast("B") for array in sums if array.size))
    return SUMS_HEADER.pack(SUMS_MAGIC, commit, check)


def read_sums(folder: Path, commit: int, sums: Sequence[NDArray[np.generic]]) -> None:
    """Fill the sums with those of a commit. Raises `MemoryDamaged`."""
    path = sums_path(folder, commit)
    size = SUMS_HEADER.size + sum(array.nbytes for array in sums)
    try:
        with path.open("rb") as file:
            header = file.read(SUMS_HEADER.size)
            read = [file.readinto(array.data.cast("B")) for array in sums if array.size]
    except FileNotFoundError as error:
        raise MemoryDamaged(f"{path} is missing, and the index names it; {ADVICE}") from error
    if SUMS_HEADER.size + sum(read) < size:
        raise MemoryDamaged(
            f"{path} was cut short: {path.stat().st_size} of {size} bytes; {ADVICE}"
        )
    if header != sums_header(commit, sums):
        raise MemoryDamaged(
            f"{path} does not match its checksum, or is not of commit {commit}; {ADVICE}"
        )


def write_sums(folder: Path, commit: int, sums: Sequence[NDArray[np.generic]]) -> None:
    """Write the sums of a commit over those of the commit before the last."""
    file = PlacedFile(sums_path(folder, commit), new=False, mode=0o600)
    try:
        file.write_at(sums_header(commit, sums), 0)
        position = SUMS_HEADER.size
        for array in sums:
            write_at(file, array, position)
            position += array.nbytes
        file.sync()
    finally:
        file.close()


def _lock(folder: Path) -> int:
    try:
        return lock_file(folder / LOCK, mode=0o600)
    except BlockingIOError as error:
        raise MemoryBusy(
            f"{folder} is open in another process: stop it, or name another folder"
        ) from error


def _check_index_there(folder: Path) -> None:
    """Refuse segments without an index: they would be deleted as leftovers."""
    path = folder / INDEX
    if not (path.is_file() and path.stat().st_size) and any(folder.glob("segment-*.bin")):
        raise MemoryDamaged(f"{path} is missing or empty, and there are segments; {ADVICE}")


def _make_index(folder: Path) -> None:
    """Make an empty index that only its owner may read; SQLite's other files are then alike."""
    if not (folder / INDEX).exists():
        PlacedFile(folder / INDEX, mode=0o600).close()
