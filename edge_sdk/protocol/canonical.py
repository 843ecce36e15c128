"""Canonical msgpack, and readers that check foreign values one by one.

`packed` gives every value a single encoding: arrays, strings, numbers, booleans and bytes in
msgpack's shortest forms. `unpacked` raises the caller's error for bytes that are not msgpack. The
readers raise `TypeError`, which a decoder turns into its own error.
"""

from __future__ import annotations

from typing import Any

import msgpack

from edge_sdk.protocol.errors import ProtocolError

MAX_ARRAY = 2**16
"""Most entries of one array; costs and groups have the longest."""
MAX_ENTRIES = 2**18
"""Most entries of all arrays: a plan of ten thousand tensors has half as many. This bounds memory,
because an empty array takes one byte in msgpack and sixty in memory."""


def packed(value: Any) -> bytes:
    """Encode the value in its only form."""
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def unpacked(data: bytes, error: type[ProtocolError], what: str) -> Any:
    """Decode the value in these bytes; raises `error` if they are not canonical msgpack at all.

    The result takes at most some tens of MB besides the bytes.
    """
    entries = 0

    def check_array(array: list[Any]) -> list[Any]:
        nonlocal entries
        entries += 1 + len(array)
        if entries > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        return array

    try:
        return msgpack.unpackb(
            data, raw=False, list_hook=check_array, max_array_len=MAX_ARRAY, max_map_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as cause:
        raise error(f"these bytes are not {what}: {cause}") from cause


def text(value: Any) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def flag(value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


def count(value: Any) -> int:
    """Read a whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def counts(values: Any) -> tuple[int, ...]:
    """Read whole numbers, 0 or more."""
    return tuple(count(value) for value in values)
