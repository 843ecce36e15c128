"""Where a device's samples come from, and how they become the task's.

    source = open_data(config.data, config.format)    finds the files, or calls the function
    read = source.read(manifest.data)                  converts the samples
    read.data, read.notes, read.warnings, read.counts

Opening says what is missing before the task is known; reading needs the task's description. What
does not fit into memory is converted once, to a mapped file (`mapped.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.block import Block
from edge_sdk.data.conversion import Converter
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.data.function import Data, call_reference, load_arrays, split_reference
from edge_sdk.data.mapped import Collector, ReadData, key_of, read_mapped
from edge_sdk.data.readers.arrays import read_arrays
from edge_sdk.data.readers.files import FoundFiles, find_files
from edge_sdk.data.readers.images import read_images
from edge_sdk.data.readers.samples import read_table
from edge_sdk.data.readers.sound import read_sound
from edge_sdk.machine.sensors.files import Files
from edge_sdk.machine.sensors.linux.cgroup import read_limits
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec

MEMORY_SHARE = 0.25
"""Share of the free memory that samples take at most, unless a limit is given."""


MAX_CLASSES = 20
"""Most classes whose samples are counted in one line."""


class SampleSource:
    """Samples in files, or arrays in memory. Made by `open_data`."""

    def __init__(self, origin: FoundFiles | ArrayData, format: DataFormat, name: str) -> None:
        self._origin = origin
        self._format = format
        self._last: tuple[DataSpec, bool, ReadData] | None = None
        self.name = name
        """Its path, or what it is, for messages."""

    def describe(self) -> str:
        """Describe the source in a few words, before it is read."""
        origin = self._origin
        if isinstance(origin, ArrayData):
            shapes = ", ".join(_array_words(each) for each in origin.inputs)
            return f"{len(origin)} samples, {shapes}"
        count = len(origin.files)
        return f"{origin.kind}: {count} file{'s' if count > 1 else ''} in {self.name}"

    def read(
        self,
        spec: DataSpec,
        *,
        cache: Path | None = None,
        limit_bytes: int | None = None,
        labelled: bool = True,
    ) -> ReadData:
        """Return the samples in the task's form; those read last are kept. Raises `DataError`.

        Samples of more than `limit_bytes` (None: a quarter of the free memory) are kept in mapped
        files in `cache`; None: everything is held in memory. Without `labelled`, targets may be
        absent or not the task's, which is a note.
        """
        if self._last is None or self._last[:2] != (spec, labelled):
            self._last = (spec, labelled, self._read(spec, cache, limit_bytes, labelled))
        return self._last[2]

    def _read(
        self, spec: DataSpec, cache: Path | None, limit_bytes: int | None, labelled: bool
    ) -> ReadData:
        origin = self._origin
        if isinstance(origin, ArrayData):
            return self._convert(spec, origin, labelled)
        if len(spec.inputs) > 1 and origin.kind != "arrays":
            raise DataError(
                f"{self.name}: the task has {len(spec.inputs)} inputs; use .npz files with x0, x1 "
                "…, or a function"
            )
        try:
            paths = [each.path for each in origin.files]
            key = key_of(paths, spec, self._format, labelled=labelled)
            if cache is not None:
                found = read_mapped(cache, key, (*spec.inputs, spec.targets))
                if found is not None:
                    return found
            limit = _free_bytes() if limit_bytes is None else limit_bytes
            with Collector(spec, limit, cache, key) as collector:
                return self._collect(collector, spec, origin, labelled)
        except OSError as error:
            place = error.filename or self.name
            raise DataError(f"{place}: {error.strerror or error}") from error

    def blocks(self, spec: DataSpec, *, labelled: bool = True) -> Iterator[Block]:
        """Yield the source's raw samples, some at a time. Raises `DataError`."""
        origin = self._origin
        if isinstance(origin, ArrayData):
            yield Block(origin.inputs, origin.targets, self._place, "ready")
        elif origin.kind == "arrays":
            yield from read_arrays(origin, labelled=labelled)
        elif origin.kind == "images":
            yield from read_images(origin, spec, labelled=labelled)
        elif origin.kind == "sound":
            yield from read_sound(origin, spec, self._format, labelled=labelled)
        else:
            yield from read_table(origin, spec, self._format, labelled=labelled)

    def _place(self, sample: int) -> str:
        return f"{self.name}, sample {sample}"

    def _convert(self, spec: DataSpec, data: ArrayData, labelled: bool) -> ReadData:
        """Convert arrays that are in memory; those in the right form are not copied."""
        if not len(data):
            raise DataError(f"{self.name} is empty: it has no samples")
        converter = Converter(spec, self._format, labelled=labelled)
        (block,) = self.blocks(spec)
        inputs, targets = converter.convert(block)
        return _read(converter, ArrayData(inputs, _or_zeros(targets, inputs, spec)))

    def _collect(
        self, collector: Collector, spec: DataSpec, origin: FoundFiles, labelled: bool
    ) -> ReadData:
        converter = Converter(spec, self._format, labelled=labelled)
        for block in self.blocks(spec, labelled=labelled):
            inputs, targets = converter.convert(block)
            collector.add((*inputs, _or_zeros(targets, inputs, spec)))
        if not converter.samples:
            raise DataError(f"{origin.root} is empty: it has no samples")
        empty = ArrayData((), np.zeros(0))
        return collector.finish(_read(converter, empty))


def open_data(data: Data, format: DataFormat | None = None) -> SampleSource:
    """Find a device's data. Raises `DataError` if it is not there, or of no known kind."""
    format = DataFormat() if format is None else format
    if not isinstance(data, str):
        return SampleSource(load_arrays(data), format, "the data")
    reference = split_reference(data)
    if reference is not None:
        return SampleSource(call_reference(*reference), format, data)
    return SampleSource(find_files(Path(data)), format, data)


def describe_read(read: ReadData, spec: DataSpec) -> str:
    """Describe samples in a line: how many, of which class, and where they are held."""
    parts = [f"{len(read.data)} samples"]
    if read.counts is not None:
        names = spec.classes or [str(number) for number in range(len(read.counts))]
        there = [(name, count) for name, count in zip(names, read.counts, strict=True) if count]
        more = f", … ({len(there)} classes)" if len(there) > MAX_CLASSES else ""
        counted = ", ".join(f"{name}: {count}" for name, count in there[:MAX_CLASSES])
        parts.append(f"{counted}{more}")
    if read.mapped:
        parts.append("mapped from a file, because memory does not hold them")
    return "; ".join(parts)


def _or_zeros(targets: Array | None, inputs: tuple[Array, ...], spec: DataSpec) -> Array:
    if targets is not None:
        return targets
    return np.zeros((len(inputs[0]), *spec.targets.shape), spec.targets.dtype)


def _read(converter: Converter, data: ArrayData) -> ReadData:
    counts = converter.counts
    return ReadData(
        data,
        tuple(converter.notes),
        tuple(converter.warnings()),
        None if counts is None or converter.without_targets else tuple(counts),
        labelled=not converter.without_targets,
    )


def _array_words(array: Array) -> str:
    return f"{array.dtype.name} {'×'.join(map(str, array.shape[1:])) or 'numbers'}"


def _free_bytes() -> int:
    import psutil

    free = float(psutil.virtual_memory().available)
    group = read_limits(Files()).available_bytes  # none outside Linux
    return int(MEMORY_SHARE * (free if group is None else min(free, group)))
