"""Converted samples: in memory as far as they fit, else in files that are mapped.

    <folder>/<key>/about.json      samples, notes, warnings, counts of classes
    <folder>/<key>/x0.bin …        inputs, sample after sample
    <folder>/<key>/y.bin           targets

The key covers the files that were read (name, size, time of change), the task's data and the
settings, so that a change of any of them converts anew. A folder holds one conversion: an older one
is removed when a new one is complete. Several processes may convert at a time; the first to end
gives the files.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import DataError
from edge_sdk.data.format import DataFormat
from edge_sdk.program.files import (
    is_held,
    make_folder,
    remove_folder,
    sync_stream,
    whole_folder,
    write_whole,
)
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec

VERSION = 2
"""Raised when readers or conversions change, so that older files are not used."""
ABOUT = "about.json"


@dataclass(frozen=True, slots=True, eq=False)
class ReadData:
    """A source's samples in the task's form, and what was said about them."""

    data: ArrayData
    notes: tuple[str, ...] = ()
    """Conversions that were made."""
    warnings: tuple[str, ...] = ()
    counts: tuple[int, ...] | None = None
    """Samples of every class; None: the targets are not classes, or absent."""
    mapped: bool = False
    """True if the samples are in mapped files, not in memory."""
    labelled: bool = True
    """False if the source has no targets; `data.targets` are then zeros."""


def key_of(
    paths: Iterable[Path], spec: DataSpec, format: DataFormat, *, labelled: bool = True
) -> str:
    """Return the key of a conversion. `labelled`: targets must be there. Raises `OSError`."""
    digest = hashlib.sha256()
    facts = [VERSION, spec.to_dict(), asdict(format), labelled]
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for path in paths:
        status = path.stat()
        digest.update(f"{path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


class Collector(AbstractContextManager["Collector"]):
    """Takes converted blocks one by one and gives them back as one `ArrayData`.

    Up to `limit_bytes` they stay in memory; beyond, they go to files in `folder`. With `folder`
    None everything stays in memory.
    """

    def __init__(self, spec: DataSpec, limit_bytes: int, folder: Path | None, key: str) -> None:
        self._specs = {**{f"x{n}": each for n, each in enumerate(spec.inputs)}, "y": spec.targets}
        self._limit = limit_bytes
        self._folder = folder
        self._key = key
        self._parts: list[Sequence[Array]] = []
        self._held = 0
        self._samples = 0
        self._files: list[IO[bytes]] | None = None
        self._draft: Path | None = None
        self._open = ExitStack()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._files is not None:
            for file in self._files:
                file.close()
            self._open.__exit__(kind, error or DataError("given up"), trace)

    def add(self, arrays: Sequence[Array]) -> None:
        """Take a block: the inputs, then the targets."""
        self._samples += len(arrays[0])
        if self._files is None:
            self._parts.append(arrays)
            self._held += sum(array.nbytes for array in arrays)
            if self._folder is None or self._held <= self._limit:
                return
            self._files = self._begin(self._folder)
            for part in self._parts:
                self._write(part)
            self._parts = []
        else:
            self._write(arrays)

    def finish(self, about: ReadData) -> ReadData:
        """Return everything that was added, with what `about` says about it."""
        if self._files is None or self._folder is None or self._draft is None:
            columns = list(zip(*self._parts, strict=True))
            joined = [each[0] if len(each) == 1 else np.concatenate(each) for each in columns]
            return _with(about, ArrayData(tuple(joined[:-1]), joined[-1]), mapped=False)
        for file in self._files:
            sync_stream(file)
            file.close()
        facts = {
            "samples": self._samples,
            "notes": about.notes,
            "warnings": about.warnings,
            "counts": about.counts,
            "labelled": about.labelled,
        }
        write_whole(self._draft / ABOUT, json.dumps(facts).encode())
        self._files = None
        try:
            self._open.close()
        except OSError:
            if self._found(self._folder) is None:  # else another process was faster
                raise
        for other in self._folder.iterdir():
            if other.name != self._key and not is_held(other):
                with suppress(OSError):
                    remove_folder(other)
        found = self._found(self._folder)
        if found is None:
            raise DataError(f"{self._folder}: the converted data disappeared; start again")
        return found

    def _begin(self, folder: Path) -> list[IO[bytes]]:
        make_folder(folder)
        if (folder / self._key).exists() and self._found(folder) is None:  # it is damaged
            remove_folder(folder / self._key)
        self._draft = self._open.enter_context(whole_folder(folder / self._key))
        return [(self._draft / f"{name}.bin").open("wb") for name in self._specs]

    def _found(self, folder: Path) -> ReadData | None:
        return read_mapped(folder, self._key, tuple(self._specs.values()))

    def _write(self, arrays: Sequence[Array]) -> None:
        for file, array in zip(self._files or (), arrays, strict=True):
            np.ascontiguousarray(array).tofile(file)


def read_mapped(folder: Path, key: str, specs: Sequence[ArraySpec]) -> ReadData | None:
    """Return a conversion that is complete; None: there is none, or it is damaged.

    `specs` are those of the inputs, then of the targets.
    """
    place = folder / key
    try:
        facts = json.loads((place / ABOUT).read_bytes())
        samples = int(facts["samples"])
        names = [*(f"x{number}" for number in range(len(specs) - 1)), "y"]
        arrays = [
            _mapped(place / f"{name}.bin", spec, samples)
            for name, spec in zip(names, specs, strict=True)
        ]
        counts = facts["counts"]
        about = ReadData(
            ArrayData(tuple(arrays[:-1]), arrays[-1]),
            tuple(facts["notes"]),
            tuple(facts["warnings"]),
            None if counts is None else tuple(counts),
            labelled=bool(facts["labelled"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _with(about, about.data, mapped=True)


def _mapped(path: Path, spec: ArraySpec, samples: int) -> Array:
    shape = (samples, *spec.shape)
    wanted = int(np.prod(shape)) * np.dtype(spec.dtype).itemsize
    if path.stat().st_size != wanted:
        raise ValueError(f"{path} has not {wanted} bytes")
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(memory, "madvise"):  # batches are drawn from everywhere: reading ahead is in vain
        memory.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(memory, spec.dtype).reshape(shape)


def _with(about: ReadData, data: ArrayData, *, mapped: bool) -> ReadData:
    return ReadData(data, about.notes, about.warnings, about.counts, mapped, about.labelled)
