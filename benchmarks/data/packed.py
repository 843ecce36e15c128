"""Finds files that may be packed, under any of their names, and reads no more than asked.

A packed file can claim to hold more than any memory, so it is unpacked piece by piece and never
beyond its expected size.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

from benchmarks.data.dataset import DatasetError

PIECE = 1 << 20


def find_packed(folder: Path, names: Sequence[str], endings: Sequence[str]) -> Path:
    """Return the first of these names, with the first of these endings, that exists.

    Raises `DatasetError` when there is none.
    """
    wanted = [folder / f"{name}{ending}" for name in names for ending in endings]
    for path in wanted:
        if path.is_file():
            return path
    others = ", ".join(path.name for path in wanted[1:])
    raise DatasetError(
        f"{wanted[0]} is missing: put it beside the others"
        + (f" (it may also be called {others})" if others else "")
    )


def read_packed(path: Path, size_bytes: int) -> bytes:
    """Read the first `size_bytes` of a file, unpacked as its ending says; fewer if that is all.

    Raises `DatasetError` when it cannot be read or unpacked.
    """
    try:
        with _open(path) as file:
            content = bytearray()
            while len(content) < size_bytes:
                piece = file.read(min(PIECE, size_bytes - len(content)))
                if not piece:
                    break
                content += piece
            return bytes(content)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DatasetError(
            f"{path} cannot be read ({error}): it may be cut off; get it anew"
        ) from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")
