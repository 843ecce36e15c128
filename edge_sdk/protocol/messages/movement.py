"""The bytes of an uploaded movement. Version 1.

    movement   = length of header as uint32 ‖ header ‖ statistics ‖ payload
    header     = msgpack { "v": 1, "type": "movement", …fields, "statistics": [ statistic … ] }
    statistic  = [ name, dtype, shape ]
    statistics = the arrays that the header lists, each row-major, one after the other

All numbers are little-endian. The payload, to the end, is blocks (`encoding/codec.py`). A replay is
the same bytes; the `Offer` says which round it answers.

Law: `decode_movement(encode_movement(m))` has the fields of `m`, bit for bit.
"""

from __future__ import annotations

from math import prod
from mmap import mmap
from typing import Any

import numpy as np

from edge_sdk.protocol.canonical import text
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.fields import (
    COUNT,
    FLAG,
    NAME,
    NUMBER,
    SHA256,
    Forms,
    count,
    optional,
    pack_map,
    read_array,
    read_fields,
    unpack_map,
    write_fields,
)
from edge_sdk.protocol.messages.round import Movement
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.specs import BUFFER_DTYPES, MAX_DIMS

TYPE = "movement"
MAX_HEADER_BYTES = 2**20
"""Enough for some ten thousand statistics."""

MOVEMENT_FORMS: Forms = {
    "device": NAME,
    "round": COUNT,
    "plan_hash": SHA256,
    "learning_rate": NUMBER,
    "level": NUMBER,
    "samples": COUNT,
    "loss": NUMBER,
    "train_s": NUMBER,
    "keeps_copy": FLAG,
    "energy_j": optional(NUMBER)._replace(omits=None),
}
"""All fields except the statistics and the payload."""


def encode_movement(movement: Movement) -> bytes:
    """Write a movement as bytes. Raises `MessageError` if it could not be read again."""
    return b"".join(movement_pieces(movement))


def movement_pieces(movement: Movement) -> list[bytes | memoryview]:
    """Return the bytes of a movement in pieces, so that the payload, the last, is not copied.

    Raises as `encode_movement`.
    """
    arrays = [
        np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        for array in movement.statistics.values()
    ]
    described = [
        [name, array.dtype.name, list(array.shape)]
        for name, array in zip(movement.statistics, arrays, strict=True)
    ]
    fields = write_fields(movement, MOVEMENT_FORMS)
    header = pack_map(TYPE, {**fields, "statistics": described})
    _read_specs(described)
    if len(header) > MAX_HEADER_BYTES:
        raise MessageError(f"{len(arrays)} statistics are too many for a movement")
    pieces = [len(header).to_bytes(4, "little"), header]
    return [*pieces, *(array.tobytes() for array in arrays), movement.payload]


def decode_movement(data: bytes | bytearray | memoryview | mmap) -> Movement:
    """Read a movement; whether it fits a plan is not checked here.

    Raises `MessageError`, and nothing else, for any other bytes. Sizes are checked before anything
    is allocated. Statistics are copies; the payload is a read-only view of `data`, at any address:
    its numbers need not be aligned.
    """
    view = memoryview(data).cast("B").toreadonly()
    length = int.from_bytes(view[:4], "little")
    if len(view) < 4 or length > min(len(view) - 4, MAX_HEADER_BYTES):
        raise MessageError("these bytes are not a movement: the header's size is wrong")
    content = unpack_map(view[4 : 4 + length], "a movement", MAX_HEADER_BYTES)
    if content.get("type") != TYPE:
        raise MessageError("these bytes are not a movement")
    arguments = read_fields(Movement, content, MOVEMENT_FORMS)
    specs = _read_specs(content.get("statistics", []))
    sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in specs]
    start = 4 + length
    if sum(sizes) > len(view) - start:
        raise MessageError(f"statistics need {sum(sizes)} bytes, {len(view) - start} are there")
    statistics: dict[str, Array] = {}
    for (name, dtype, shape), size in zip(specs, sizes, strict=True):
        statistics[name] = read_array(view[start : start + size], dtype, shape, name)
        start += size
    return Movement(**arguments, statistics=statistics, payload=view[start:])


def _read_specs(value: Any) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
    try:
        specs = [_read_spec(*entry) for entry in value]
    except (TypeError, ValueError) as error:
        raise MessageError(f"the statistics of a movement are wrong: {str(error)[:200]}") from error
    if len({name for name, _, _ in specs}) != len(specs):
        raise MessageError("a movement has two statistics with the same name")
    return specs


def _read_spec(name: Any, dtype: Any, shape: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    if text(dtype) not in BUFFER_DTYPES:
        raise ValueError(f"{dtype!r} is not a type of statistics")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise TypeError(f"{shape!r} is not a shape")
    sizes = tuple(count(size) for size in shape)
    if 0 in sizes:
        raise ValueError(f"{name!r} has an empty dimension")
    return text(name), np.dtype(dtype), sizes
