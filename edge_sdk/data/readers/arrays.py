"""Arrays from .npz and .npy files, a few samples at a time.

In every .npz file `x` (or x0, x1 …) are the model's inputs and `y` the targets, samples first. Of
.npy files there is one for each: x.npy (or x0.npy, x1.npy …) and y.npy.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

from edge_sdk.data.block import Block, rows_of
from edge_sdk.data.errors import DataError
from edge_sdk.data.readers.files import FoundFiles
from edge_sdk.protocol.plan.layout import Array

_NAME = re.compile(r"x[0-9]*|y")
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# zlib.error, and what zipfile raises for members that it does not know or cannot decrypt
_BROKEN = (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile, NotImplementedError)


def read_arrays(found: FoundFiles, *, labelled: bool) -> Iterator[Block]:
    """Yield the samples of all files. `labelled`: targets must be there. Raises `DataError`."""
    suffixes = {each.path.suffix.lower() for each in found.files}
    if len(suffixes) > 1:
        raise DataError(f"{found.root} has .npy and .npz files: keep one kind")
    if suffixes == {".npz"}:
        for each in found.files:
            yield from _read_npz(each.path, found.name_of(each.path), labelled)
        return
    paths = {each.path.stem: each.path for each in found.files}
    if found.root.is_file():  # a single input
        paths = {"x": found.root}
    with ExitStack() as stack:
        streams = {}
        for name, path in paths.items():
            try:
                file = stack.enter_context(path.open("rb"))
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
            streams[name] = _Stream(file, path.name)
        yield from _blocks(streams, found.name_of(found.root), labelled)


def _read_npz(path: Path, name: str, labelled: bool) -> Iterator[Block]:
    import zlib

    try:
        with zipfile.ZipFile(path) as archive, ExitStack() as stack:
            streams = {}
            for member in archive.namelist():
                if not member.endswith(".npy"):
                    raise DataError(f"{name}: {member!r} is not an array")
                file = stack.enter_context(archive.open(member))
                streams[member.removesuffix(".npy")] = _Stream(file, f"{name}, {member}")
            yield from _blocks(streams, name, labelled)
    except (*_BROKEN, RuntimeError, zlib.error) as error:
        raise DataError(f"{name} cannot be read as plain numpy arrays: {_words(error)}") from error


def _blocks(streams: Mapping[str, _Stream], name: str, labelled: bool) -> Iterator[Block]:
    streams = dict(streams)
    for odd in streams:
        if not _NAME.fullmatch(odd):
            raise DataError(
                f"{name}: {odd!r} is neither an input nor the targets: name inputs x, or x0, x1 …, "
                "and targets y"
            )
    targets = streams.pop("y", None)
    if "x" in streams and "x0" not in streams:
        streams["x0"] = streams.pop("x")
    if not streams:
        raise DataError(f"{name} has no inputs: name them x, or x0, x1 …")
    wanted = [f"x{number}" for number in range(len(streams))]
    if sorted(streams) != sorted(wanted):
        raise DataError(f"{name} has {', '.join(sorted(streams))}: name inputs x, or x0, x1 …")
    if targets is None and labelled:
        raise DataError(f"{name} has no targets: name them y")
    inputs = [streams[each] for each in wanted]
    everything = [*inputs, *([] if targets is None else [targets])]
    lengths = {stream.length for stream in everything}
    if len(lengths) > 1:
        raise DataError(
            f"{name}: every array needs as many samples as the others, not "
            f"{' and '.join(map(str, sorted(lengths)))}"
        )
    step, start = rows_of(sum(stream.row_bytes for stream in everything)), 0
    (length,) = lengths
    while start < length:
        rows = min(step, length - start)
        arrays = [stream.read(rows) for stream in everything]
        yield Block(
            tuple(arrays[: len(inputs)]),
            None if targets is None else arrays[-1],
            _Place(name, start),
            "ready",
        )
        start += rows


class _Place:
    """Names samples by their number."""

    def __init__(self, name: str, start: int) -> None:
        self._name, self._start = name, start

    def __call__(self, sample: int) -> str:
        return f"{self._name}, sample {self._start + sample}"


class _Stream:
    """An array in numpy's format, read row by row from where it is."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._whole: Array | None = None
        self._at = 0
        try:
            version = np.lib.format.read_magic(file)
            if version not in _HEADERS:
                raise ValueError(f"version {version} of numpy's format is not known")
            shape, column_first, dtype = _HEADERS[version](file)
        except (ValueError, EOFError, OSError, UnicodeDecodeError, SyntaxError) as error:
            raise DataError(f"{name} cannot be read as a numpy array: {_words(error)}") from error
        if dtype.hasobject or dtype.kind not in "biufUS":
            raise DataError(f"{name} is {dtype.name}: must be plain numbers or names")
        if not shape:
            raise DataError(f"{name} is a single number: samples come first")
        self.length: int = shape[0]
        self._inner: tuple[int, ...] = shape[1:]
        self._dtype: np.dtype[Any] = dtype
        self.row_bytes = int(np.prod(self._inner, dtype=np.float64)) * dtype.itemsize
        if column_first and len(shape) > 1:  # rows are scattered: there is no reading by row
            flat = self._values(int(np.prod(shape)))
            self._whole = flat.reshape(shape[::-1]).transpose()

    def read(self, rows: int) -> Array:
        """Return the next rows."""
        if self._whole is not None:
            self._at += rows
            return np.ascontiguousarray(self._whole[self._at - rows : self._at])
        count = rows * int(np.prod(self._inner))
        return self._values(count).reshape(rows, *self._inner)

    def _values(self, count: int) -> Array:
        wanted = count * self._dtype.itemsize
        data = self._file.read(wanted)
        if len(data) != wanted:
            raise DataError(f"{self._name} ends too early: it is damaged, or not complete")
        array = np.frombuffer(data, self._dtype)
        native: Array = array.astype(self._dtype.newbyteorder("="), copy=False)
        return native


def _words(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
