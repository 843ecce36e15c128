"""Memory that processes share: one data set for all of them, and trays for what they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np

from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.protocol.plan.layout import Array, Indices


@dataclass(frozen=True, slots=True, eq=False)
class DealtData:
    """Samples, and which of them each device has."""

    data: ArrayData
    rows: Indices
    """Numbers of samples, those of one device beside each other."""
    ends: Indices
    """Per device, the end of its part of `rows`."""

    def part(self, number: int) -> Indices:
        """Return the samples of the n-th device."""
        start = 0 if number == 0 else int(self.ends[number - 1])
        return self.rows[start : int(self.ends[number])]

    def counts(self) -> list[int]:
        """Return the number of samples of every device."""
        return [int(count) for count in np.diff(self.ends, prepend=0)]

    def batches(
        self, number: int, steps: int, size: int, stream: np.random.Generator
    ) -> Iterator[Batch]:
        """Yield batches of a device's samples: those that its own `ArrayData` would give."""
        part = self.part(number)
        for _, rows in ArrayData((), part).batches(steps, size, stream):
            yield Batch(tuple(x[rows] for x in self.data.inputs), self.data.targets[rows])


def arrays_of(dealt: DealtData) -> tuple[Array, ...]:
    """Return all arrays of dealt data, each in one piece."""
    arrays = (*dealt.data.inputs, dealt.data.targets, dealt.rows, dealt.ends)
    return tuple(np.ascontiguousarray(array) for array in arrays)


def dealt_from(arrays: Sequence[Array]) -> DealtData:
    """Return dealt data from the arrays that `arrays_of` gave."""
    *inputs, targets, rows, ends = arrays
    return DealtData(ArrayData(tuple(inputs), targets), rows, ends)


def deal_out(data: ArrayData, parts: Sequence[Indices]) -> DealtData:
    """Deal samples to devices: `parts` has the numbers of each device's samples."""
    rows = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
    return DealtData(data, rows, np.cumsum([len(part) for part in parts]))


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Where an array lies in shared memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class SharedData:
    """Dealt data in shared memory, until it is closed. `places` lets other processes map it."""

    def __init__(self, dealt: DealtData) -> None:
        self._blocks: list[SharedMemory] = []
        try:
            self.places = tuple(self._put(array) for array in arrays_of(dealt))
        except BaseException:
            self.close()
            raise

    def _put(self, array: Array) -> ArrayPlace:
        block = SharedMemory(create=True, size=max(1, array.nbytes))
        self._blocks.append(block)
        np.ndarray(array.shape, array.dtype, buffer=block.buf)[...] = array
        return ArrayPlace(block.name, array.dtype.str, array.shape)

    def close(self) -> None:
        """Give the memory back once no process maps it any more."""
        _remove(self._blocks)


def map_data(places: Sequence[ArrayPlace]) -> tuple[DealtData, list[SharedMemory]]:
    """Map data that another process shares; the second value must live as long as the first."""
    blocks, arrays = [], []
    for place in places:
        block = attach(place.name)
        blocks.append(block)
        array: Any = np.ndarray(place.shape, np.dtype(place.dtype), buffer=block.buf)
        array.flags.writeable = False
        arrays.append(array)
    return dealt_from(arrays), blocks


class Trays:
    """Blocks of shared memory of one size, in which processes hand over bytes; used again."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._all: list[SharedMemory] = []
        self._free: list[SharedMemory] = []

    def take(self) -> SharedMemory:
        """Return a tray that nobody uses."""
        if not self._free:
            self._all.append(SharedMemory(create=True, size=self._size_bytes))
            self._free.append(self._all[-1])
        return self._free.pop()

    def give_back(self, tray: SharedMemory) -> None:
        """Let a tray be used again."""
        self._free.append(tray)

    def close(self) -> None:
        """Give all memory back."""
        self._free.clear()
        _remove(self._all)


def _remove(blocks: list[SharedMemory]) -> None:
    while blocks:
        block = blocks.pop()
        block.close()
        with suppress(FileNotFoundError):
            block.unlink()


def view_of(block: SharedMemory) -> memoryview:
    """Return the bytes of shared memory. Raises `ValueError` if it is closed."""
    if block.buf is None:
        raise ValueError(f"the shared memory {block.name} is closed")
    return block.buf


def attach(name: str) -> SharedMemory:
    """Open a block that another process owns.

    Python would also have this process remove the block at its end (until 3.13, bpo-38119).
    """
    register = resource_tracker.register
    resource_tracker.register = lambda *_: None
    try:
        return SharedMemory(name)
    finally:
        resource_tracker.register = register
