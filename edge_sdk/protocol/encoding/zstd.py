"""Lossless compression: byte shuffle, then zstd.

Shuffling writes the first bytes of all numbers, then all second bytes, and so on. Signs and
exponents, which resemble each other, then lie side by side, where zstd can use it; mantissas are
noise.

The package `zstandard` is optional and is imported on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.errors import BlockError, EncodingError

LEVEL = 1
"""Higher levels gain little on data that is mostly noise, and take many times as long."""

MAX_WINDOW = 2**23
"""Memory that reading a frame may take besides its output; level 1 needs 2¹⁹."""

PIECE = 2**14
"""Numbers joined at a time: all their bytes are written while they are in the cache."""


def compress(parts: Sequence[NDArray[Any]]) -> bytes:
    """Compress all parts, each shuffled, to one zstd frame. Raises `EncodingError` without zstd."""
    zstandard = _zstandard()
    shuffled = np.concatenate([_shuffled(part) for part in parts])
    compressed: bytes = zstandard.ZstdCompressor(level=LEVEL).compress(shuffled)
    return compressed


def decompress(data: memoryview, shapes: Sequence[tuple[np.dtype[Any], int]]) -> list[NDArray[Any]]:
    """Invert `compress`; `shapes` has the type and length of each part.

    Memory is allocated only if the frame announces exactly these sizes, and no more than that is
    written. Raises `BlockError` for any other frame, `EncodingError` without zstd.
    """
    zstandard = _zstandard()
    expected = sum(dtype.itemsize * length for dtype, length in shapes)
    try:
        announced = zstandard.frame_content_size(data)
        if announced != expected:
            raise BlockError(f"compressed blocks announce {announced} bytes, not {expected}")
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        shuffled = reader.decompress(data, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlockError(f"blocks cannot be decompressed: {error}") from error
    if len(shuffled) != expected:
        raise BlockError(f"compressed blocks hold {len(shuffled)} bytes, not {expected}")
    parts, start = [], 0
    for dtype, length in shapes:
        planes = np.frombuffer(shuffled, np.uint8, dtype.itemsize * length, start)
        parts.append(_unshuffled(planes, dtype))
        start += planes.size
    return parts


def _shuffled(part: NDArray[Any]) -> NDArray[np.uint8]:
    if part.itemsize == 1:
        return part.view(np.uint8)
    numbers = part.view(np.uint8).reshape(len(part), part.itemsize)
    planes = np.empty((part.itemsize, len(part)), dtype=np.uint8)
    for place in range(part.itemsize):
        planes[place] = numbers[:, place]
    return planes.reshape(-1)


def _unshuffled(planes: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.itemsize == 1:
        return planes.view(dtype)
    planes = planes.reshape(dtype.itemsize, -1)
    numbers = np.empty((planes.shape[1], dtype.itemsize), dtype=np.uint8)
    for start in range(0, len(numbers), PIECE):
        for place, plane in enumerate(planes):
            numbers[start : start + PIECE, place] = plane[start : start + PIECE]
    return numbers.view(dtype).reshape(-1)


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise EncodingError(
            "zstd needs the package zstandard here: pip install 'tessera-fl[zstd]', "
            "or choose an encoding without +zstd"
        ) from error
    return zstandard
