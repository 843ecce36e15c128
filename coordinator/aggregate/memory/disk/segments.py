"""Segment files: movements one behind the other, written once, read through maps.

A segment takes all that one commit stores. It is only ever appended to before its commit, and never
written to after it: what is replaced stays where it is until the whole file goes.

    segment-<number>.bin    header of 64 bytes: magic, number; then movements, each at a multiple
                            of 64: scales (float64 per block, types with scales only), values
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.memory.contract import Float64
from coordinator.aggregate.memory.errors import ADVICE, MemoryDamaged, MemoryStoreError
from coordinator.aggregate.memory.values import Held, ValueType
from coordinator.checksums import RunningChecksum, checksum_number
from edge_sdk.program.files import PlacedFile

ALIGN = 64
MAGIC = b"tessera memory segment 1"
HEADER = struct.Struct(f"<24sq{ALIGN - 32}x")
MOST_MAPS = 64
"""Maps that are kept open for the next reader."""


def aligned(position: int) -> int:
    """Round up to a position that a movement may start at."""
    return -(-position // ALIGN) * ALIGN


def segment_name(number: int) -> str:
    """Return the name of a segment's file."""
    return f"segment-{number}.bin"


@dataclass(frozen=True, slots=True, eq=False)
class FileSlot:
    """Room for one movement's values in a file, now or later."""

    file: PlacedFile
    start: int
    itemsize: int
    later: list[tuple[int, int, Held]] | None
    """Takes positions, starts and read-only values, for the next `flush`; None: all is written at
    once."""

    def put(self, at: int, values: Held) -> None:
        """See `Slot`."""
        position = self.start + at * self.itemsize
        if self.later is None or values.flags.writeable:
            write_at(self.file, values, position)
        else:
            self.later.append((position, self.start, values))


class SegmentWriter:
    """The segment that the next commit makes durable.

    Values of a type without scales are held as they came. If they are read-only, as those of an
    upload are, they are written later, when the round has its model, and not within the pass that
    makes it.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.path = folder / segment_name(number)
        self._file = PlacedFile(self.path, mode=0o600)
        self.size = HEADER.size
        self._file.write_at(HEADER.pack(MAGIC, number), 0)
        self._later: list[tuple[int, int, Held]] = []
        self._contents: dict[int, RunningChecksum] = {}
        """Checksums of movements that were put aside, by their starts, as far as they follow."""

    def reserve(self, scales: Float64, values: int, kind: ValueType) -> tuple[int, FileSlot]:
        """Reserve room for a movement: its offset, and the slot for its values."""
        offset = aligned(self.size)
        start = values_start(offset, len(scales))
        if len(scales):
            write_at(self._file, scales, offset)
        self.size = start + values * kind.dtype.itemsize
        later = None if kind.scaled else self._later
        return offset, FileSlot(self._file, start, kind.dtype.itemsize, later)

    def flush(self) -> None:
        """Write what was put aside, so that it can be read."""
        later = sorted(self._later, key=lambda part: part[0])
        self._later.clear()
        for position, start, values in later:
            write_at(self._file, values, position)
            taken = self._contents.setdefault(start, RunningChecksum())
            if start + taken.size == position:
                taken.add(np.ascontiguousarray(values).data.cast("B"))

    def content(self, start: int, size: int) -> int | None:
        """Return the checksum of a movement's values, which take `size` bytes; None: not known."""
        taken = self._contents.get(start)
        return None if taken is None or taken.size != size else taken.number

    def sync(self) -> None:
        """Wait until all of it is on disk."""
        self.flush()
        # The last movement may be followed by nothing: the file is as long as the index says.
        self._file.truncate(self.size)
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SegmentMaps:
    """Maps of segments to read from. A few stay open; a view keeps its own map."""

    def __init__(self, folder: Path, kind: ValueType) -> None:
        self._folder = folder
        self._kind = kind
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()

    def read(self, number: int, offset: int, scales: int, values: int) -> tuple[Float64, Held]:
        """Return the scales and values of a movement, read-only views of the file.

        Raises `MemoryDamaged` when the file does not hold them.
        """
        start = values_start(offset, scales)
        opened = self._open(number, start + values * self._kind.dtype.itemsize)
        return (
            np.frombuffer(opened, np.float64, scales, offset if scales else 0),
            np.frombuffer(opened, self._kind.dtype, values, start if values else 0),
        )

    def content(self, number: int, offset: int, scales: int, values: int) -> int:
        """Return the checksum of a movement's scales and values. Raises `MemoryDamaged`."""
        end = values_start(offset, scales) + values * self._kind.dtype.itemsize
        return checksum_number(memoryview(self._open(number, end))[offset:end])

    def forget(self, number: int) -> None:
        """Drop the map of a deleted segment."""
        self._maps.pop(number, None)

    def close(self) -> None:
        """Drop all maps that no view needs."""
        self._maps.clear()

    def _open(self, number: int, size: int) -> mmap.mmap:
        opened = self._maps.pop(number, None)
        if opened is None or len(opened) < size:
            opened = map_segment(self._folder / segment_name(number), number, size)
        self._maps[number] = opened
        if len(self._maps) > MOST_MAPS:
            self._maps.popitem(last=False)
        return opened


def map_segment(path: Path, number: int, size: int) -> mmap.mmap:
    """Map a whole segment, read-only. Raises `MemoryDamaged` unless it has `size` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise MemoryDamaged(
            f"{path} is missing, and the memory's index names it; {ADVICE}"
        ) from error
    try:
        there = os.fstat(descriptor).st_size
        if there < max(size, HEADER.size):
            raise MemoryDamaged(f"{path} was cut short: {there} bytes of at least {size}; {ADVICE}")
        if os.pread(descriptor, HEADER.size, 0) != HEADER.pack(MAGIC, number):
            raise MemoryDamaged(
                f"{path} does not begin as segment {number} of a memory does; {ADVICE}"
            )
        return mmap.mmap(descriptor, there, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    finally:
        os.close(descriptor)


def values_start(offset: int, scales: int) -> int:
    """Return the start of a movement's values, behind its scales."""
    return aligned(offset + 8 * scales)


def write_at(file: PlacedFile, array: NDArray[Any], position: int) -> None:
    """Write all of an array. Raises `MemoryStoreError`, which names the file."""
    if not array.size:
        return
    try:
        file.write_at(np.ascontiguousarray(array).data, position)
    except OSError as error:
        raise MemoryStoreError(f"cannot write to {file.path}: {error.strerror}") from error
