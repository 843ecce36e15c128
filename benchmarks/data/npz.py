"""Reads arrays of an .npz file, with sizes checked before anything is allocated.

numpy allocates what an array's header claims before it reads a value, so the header is first
compared with the size of its file in the archive. Pickled objects are rejected.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from benchmarks.data.dataset import DatasetError

MOST_BYTES = 1 << 28
"""Most bytes in one array."""
PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Packings that numpy writes."""
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

_DAMAGED = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, TokenError),
    *(ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError),
    *(NotImplementedError, RuntimeError),  # packings and passwords unknown to zipfile
)
"""Errors that zipfile and numpy raise for damaged files."""


def read_npz(path: Path, keys: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read the arrays of these names. Raises `DatasetError`."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {each.filename: each for each in archive.infolist()}
            if missing := [key for key in keys if f"{key}.npy" not in entries]:
                raise DatasetError(f"{path} has no {missing[0]!r}; it should have {_names(keys)}")
            return {key: _read(path, archive, entries[f"{key}.npy"]) for key in keys}
    except _DAMAGED as error:
        raise DatasetError(f"{path} cannot be read ({error}): get it anew") from error


def _read(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    if entry.compress_type not in PACKINGS:
        raise DatasetError(f"{path}: {entry.filename} is packed in a way that numpy does not write")
    with archive.open(entry) as file:
        shape, dtype = _header(file)
        if dtype.hasobject:
            raise DatasetError(
                f"{path}: {entry.filename} holds pickled objects, which can run any program: they "
                "are not read"
            )
        size = math.prod(shape) * dtype.itemsize
        there = entry.file_size - file.tell()
        if size != there or size > MOST_BYTES:
            raise DatasetError(
                f"{path}: {entry.filename} claims {size:,} bytes of values and has {there:,}; up "
                f"to {MOST_BYTES:,} are read"
            )
        file.seek(0)
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
        return array


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = npy.read_magic(file)
    shape, _, dtype = HEADERS[version](file)
    return shape, dtype


def _names(keys: Iterable[str]) -> str:
    return ", ".join(keys)
