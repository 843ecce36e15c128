"""Canonical msgpack, and reading foreign values one by one.

What `packed` writes has one encoding: arrays, strings, numbers, booleans and bytes in msgpack's
shortest forms. `unpacked` raises the caller's one error for bytes that are not msgpack. The
readers raise `TypeError`, which a decoder turns into its own error.
"""

from __future__ import annotations

from typing import Any

import msgpack

from edge_sdk.protocol.errors import ProtocolError


def packed(value: Any) -> bytes:
    """The value's only encoding."""
    data: bytes = msgpack.packb(value, use_bin_type=True)
    return data


def unpacked(data: bytes, error: type[ProtocolError], what: str) -> Any:
    """The value in these bytes; raises `error` if they are not msgpack at all."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as cause:
        raise error(f"these bytes are not {what}: {cause}") from cause


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return value


def count(value: Any) -> int:
    """A whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def counts(values: Any) -> tuple[int, ...]:
    """Whole numbers, 0 or more."""
    return tuple(count(value) for value in values)
