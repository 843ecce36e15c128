"""Checksums of a run's files, so that a damaged one is found when it is read.

xxh3 with 64 bits: it finds damage by disks, cables and accidents, at the speed of memory. It is no
protection from people: who may write the files may write the checksums too.

    JSON             {…, "check": "<16 hex digits>"}, of all bytes before; a file or a line
    safetensors      `check` in the header's metadata, of all bytes with zeros in its own place
    other files      8 bytes at their end, or in their header
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes = bytes | bytearray | memoryview

CHECK_BYTES = 8
"""Bytes of a checksum."""
PIECE = 1 << 24
"""Bytes that are read at a time."""

_TAIL = re.compile(rb', "check": "([0-9a-f]{16})"}\n')
_TAIL_BYTES = 31
_NO_CHECK = "0" * 2 * CHECK_BYTES
_MARK = b'"check":"'
_DTYPES = {
    "|b1": "BOOL",
    "|u1": "U8",
    "|i1": "I8",
    "<i2": "I16",
    "<u2": "U16",
    "<f2": "F16",
    "<i4": "I32",
    "<u4": "U32",
    "<f4": "F32",
    "<i8": "I64",
    "<u8": "U64",
    "<f8": "F64",
}
"""Names of types in a safetensors header."""


class DamagedBytes(ValueError):
    """Bytes that do not match their checksum, or have none."""


def checksum(*parts: Bytes) -> bytes:
    """Return the checksum of some bytes, one part behind the other."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()


def open_versioned(data: bytes, version: int) -> dict[str, Any]:
    """Read what `seal_json` made, or a file of the version before, which had no checksums.

    `version`: the present one, in the content. Raises `ValueError`.
    """
    try:
        return open_json(data)
    except DamagedBytes:
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("version") != version - 1:
            raise
        return {**content, "version": version}


class RunningChecksum:
    """The checksum of a file that grows."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.size = 0
        """Bytes so far."""

    def add(self, data: Bytes) -> None:
        """Take further bytes."""
        self._state.update(data)
        self.size += len(data)

    @property
    def number(self) -> int:
        """The checksum of all bytes so far, as `checksum_number`."""
        return int.from_bytes(self._state.digest(), "big", signed=True)

    @property
    def hex(self) -> str:
        """The checksum of all bytes so far, in hex digits."""
        return self._state.hexdigest()


def checksum_number(*parts: Bytes) -> int:
    """Return the checksum as a signed number of 64 bits, as SQLite has them."""
    return int.from_bytes(checksum(*parts), "big", signed=True)


def seal_json(content: Mapping[str, Any]) -> bytes:
    """Return a mapping, which is not empty, as one line of JSON with its checksum."""
    body = json.dumps(content, allow_nan=False)[:-1].encode()
    return b'%b, "check": "%b"}\n' % (body, checksum(body).hex().encode())


def open_json(data: bytes) -> dict[str, Any]:
    """Read what `seal_json` made, without the checksum. Raises `DamagedBytes`."""
    body, tail = data[:-_TAIL_BYTES], _TAIL.fullmatch(data[-_TAIL_BYTES:])
    if tail is None:
        raise DamagedBytes("it has no checksum, or was cut short")
    if checksum(body).hex().encode() != tail[1]:
        raise DamagedBytes("its checksum does not match")
    content: dict[str, Any] = json.loads(body + b"}")
    return content


def mapped(path: Path) -> memoryview:
    """Return the bytes of a file, mapped for as long as they are referenced. Raises `OSError`."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))


def open_sealed(data: Bytes) -> memoryview:
    """Return bytes without the checksum at their end. Raises `DamagedBytes`."""
    view = memoryview(data)
    if len(view) < CHECK_BYTES or checksum(view[:-CHECK_BYTES]) != view[-CHECK_BYTES:]:
        raise DamagedBytes("its checksum does not match")
    return view[:-CHECK_BYTES]


def save_arrays(arrays: Mapping[str, NDArray[Any]]) -> tuple[Bytes, ...]:
    """Return arrays, each in C order, as a safetensors file with a checksum, in parts to write one
    by one. The arrays are not copied."""
    ordered = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"check": _NO_CHECK}}
    end = 0
    for name in ordered:
        array, start = arrays[name], end
        end += array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    encoded = memoryview(len(text).to_bytes(8, "little") + text)
    start = _place_of_check(encoded)
    before, behind = encoded[:start], encoded[start + len(_NO_CHECK) :]
    data = [arrays[name].data.cast("B") for name in ordered if arrays[name].size]
    check = checksum(before, _NO_CHECK.encode(), behind, *data).hex().encode()
    return before, check, behind, *data


def check_arrays(data: Bytes) -> None:
    """Check the bytes of a file that `save_arrays` made. Raises `DamagedBytes`."""
    view = memoryview(data)
    start = _place_of_check(view)
    end = start + len(_NO_CHECK)
    found = checksum(view[:start], _NO_CHECK.encode(), view[end:]).hex().encode()
    if found != view[start:end]:
        raise DamagedBytes("its checksum does not match")


def _place_of_check(view: memoryview) -> int:
    """Find the digits of the checksum in a safetensors header."""
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > len(view) - 8:
        raise DamagedBytes("it was cut short")
    found = bytes(view[8 : 8 + length]).find(_MARK)
    if found < 0:
        raise DamagedBytes("it has no checksum")
    return 8 + found + len(_MARK)
