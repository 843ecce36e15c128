"""Blocks as bytes. Version 1.

    message = length of header as uint32 ‖ header ‖ zeros up to a multiple of 16 ‖ payload
    header  = msgpack [ "tessera-blocks", 1, kind, keep | nil, zstd, plan hash, [mask per axis] ]
    payload = the parts below, one after the other; with zstd a frame of them (`zstd.py`)

    fp32      values as float32
    fp16      values as float16 ‖ an exponent per block as int8
    int8      a step per block as float32 ‖ values as int8
    top-k     kept values as float16 ‖ an exponent per block as int8 ‖ positions (`top_k.py`)

All numbers are little-endian. The plan's hash is 32 bytes, `keep` float64 (top-k only). Bit `g` of
an axis's mask means that group `g` is chosen: masks and plan give every block's number, size and
place, so nothing else is written. In every part the blocks are in ascending order, and parts of
wider numbers come first, so that each is aligned in the message; fp32 is read where it lies.

`quantisation.py` and `top_k.py` say what the numbers mean and how near the decoded values are.
Top-k's values are fp16 because what rounding loses goes into the residual with the rest
(`device.stores.residuals`). Compression that saves nothing is left out, and the header says so.

Laws: `decode_blocks(plan, encode_blocks(plan, S, b, …)) == (S, b)` within the encoding's bound,
bit for bit with fp32; `len(encode_blocks(plan, S, …)) == encoded_size(plan, S, …)`, or at most that
with zstd.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.canonical import count, flag, packed, text, unpacked
from edge_sdk.protocol.encoding.encoding import DEFAULT_KEEP, Encoding, Kind
from edge_sdk.protocol.encoding.quantisation import (
    quantise_fp16,
    quantise_int8,
    restore_fp16,
    restore_int8,
)
from edge_sdk.protocol.encoding.top_k import kept_counts, pick, place_bytes, put_back
from edge_sdk.protocol.encoding.zstd import compress, decompress
from edge_sdk.protocol.errors import BlockError, EncodingError, GroupError
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.layout import Array, Indices, Raw, room_for
from edge_sdk.protocol.plan.plan import Chosen, Groups, ModelPlan

MAGIC = "tessera-blocks"
FLOAT32: np.dtype[Any] = np.dtype("<f4")
VERSION = 1
ALIGNMENT = 16
MOST_HEADERS = 1024
"""Headers that are remembered."""

Part = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Header:
    """Description of a message's payload."""

    encoding: Encoding
    """Encoding as written: without zstd where compressing saved nothing."""
    groups: dict[str, tuple[int, ...]]
    size_bytes: int
    """Bytes of the header itself, up to the payload."""


_HEADERS: dict[tuple[str, bytes], Header] = {}
"""Headers that were read, by the hash of the plan and their bytes."""


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a payload: the type of its numbers, and the count of them in every block."""

    dtype: np.dtype[Any]
    counts: Indices

    @property
    def size_bytes(self) -> int:
        """Bytes of all its numbers."""
        return self.dtype.itemsize * int(np.add.reduce(self.counts))


def encode_blocks(
    plan: ModelPlan,
    groups: Groups,
    blocks: Blocks,
    encoding: Encoding,
    stream: np.random.Generator,
) -> bytes:
    """Write the blocks of a submodel as a message. Only int8 draws from the stream.

    Raises `GroupError` or `BlockError` if these are not the submodel's blocks, `EncodingError` if
    the encoding is not available here.
    """
    chosen = plan.choose(groups)
    held = plan.held(chosen)
    blocks.check(held.ids, plan.block_sizes)
    parts = encode_parts(blocks.values, held.sizes, encoding, stream)
    return join_message(plan, chosen, encoding, parts)


def encode_arrays(
    plan: ModelPlan,
    groups: Groups,
    arrays: Mapping[str, Array],
    encoding: Encoding,
    stream: np.random.Generator,
    room: Raw | None = None,
) -> bytes | memoryview:
    """Write a submodel's arrays as a message: that of their blocks, with fp32 in one copy.

    `room`: memory for the message, if it is large enough: with fp32 it then lies there.
    Raises as `encode_blocks`, and `TensorError` if these are not the submodel's arrays.
    """
    chosen = plan.choose(groups)
    header = _header(plan, chosen, encoding)
    size = FLOAT32.itemsize * plan.held(chosen).parameters
    if encoding != Encoding() or sys.byteorder != "little":
        values = room_for(size, room)[:size].view(np.float32)
        return encode_blocks(plan, groups, plan.scatter(arrays, groups, values), encoding, stream)
    message = room_for(len(header) + size, room)[: len(header) + size]
    message[: len(header)] = np.frombuffer(header, np.uint8)
    plan.scatter(arrays, groups, message[len(header) :].view(FLOAT32))
    return message.data.toreadonly()


def decode_blocks(
    plan: ModelPlan, data: bytes | bytearray | memoryview
) -> tuple[dict[str, tuple[int, ...]], Blocks]:
    """Read groups and blocks of a message; the values are read-only, fp32 ones a view of `data`.

    Raises only `BlockError`, for any bytes that are not blocks of this plan. Every size is checked
    against the plan before anything is allocated. Values may be NaN or infinite.
    """
    header = decode_header(plan, data)
    ids = plan.block_ids(plan.choose(header.groups))
    payload = memoryview(data).cast("B")[header.size_bytes :]
    return header.groups, decode_payload(plan, ids, header.encoding, payload)


def decode_header(plan: ModelPlan, data: bytes | bytearray | memoryview) -> Header:
    """Read a message's header; the payload is not looked at. Raises only `BlockError`."""
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:4], "little")
    # An envelope of fixed fields, and up to nine bytes for the mask of each axis.
    if len(view) < 4 or length > min(len(view) - 4, 128 + 9 * len(plan.axes)):
        raise BlockError("these bytes are not blocks of this plan: the header's size is wrong")
    # Most messages of a run begin like one before: what was read of that one holds.
    key = plan.hash, bytes(view[: _padded(length)])
    if (known := _HEADERS.get(key)) is not None:
        return Header(known.encoding, dict(known.groups), known.size_bytes)
    header = _read_header(plan, view, length)
    if len(_HEADERS) >= MOST_HEADERS:
        _HEADERS.clear()
    _HEADERS[key] = Header(header.encoding, dict(header.groups), header.size_bytes)
    return header


def _read_header(plan: ModelPlan, view: memoryview, length: int) -> Header:
    fields = unpacked(bytes(view[4 : 4 + length]), BlockError, "blocks")
    if not isinstance(fields, list) or len(fields) < 2 or fields[0] != MAGIC:
        raise BlockError("these bytes are not blocks")
    if fields[1] != VERSION:
        raise BlockError(
            f"version {fields[1]!r} of blocks is unknown; this side uses version {VERSION}"
        )
    try:
        encoding, chosen = _decode_fields(plan, fields)
    except (TypeError, ValueError, EncodingError, GroupError) as error:
        raise BlockError(f"the header of blocks has the wrong structure: {error}") from error
    expected = _header(plan, chosen, encoding)
    if view[: len(expected)] != expected:
        raise BlockError("the header of blocks is not in canonical form")
    names = (axis.name for axis in plan.axes)
    return Header(encoding, dict(zip(names, chosen, strict=True)), len(expected))


def encoded_size(plan: ModelPlan, groups: Groups, encoding: Encoding) -> int:
    """Return the bytes of a submodel's message, with zstd the most. Raises `GroupError`."""
    chosen = plan.choose(groups)
    specs = part_specs(plan.held(chosen).sizes, encoding)
    return len(_header(plan, chosen, encoding)) + sum(spec.size_bytes for spec in specs)


# -- payloads, without a header ------------------------------------------------------------------


def part_specs(sizes: Indices, encoding: Encoding) -> tuple[PartSpec, ...]:
    """Describe the parts of a payload of blocks of these sizes."""
    if encoding.kind == "fp32":
        return (PartSpec(FLOAT32, sizes),)
    one = np.ones(len(sizes), dtype=np.int64)
    match encoding.kind:
        case "fp16":
            parts = [("<f2", sizes), ("i1", one)]
        case "int8":
            parts = [("<f4", one), ("i1", sizes)]
        case "top-k":
            kept, places = kept_counts(sizes, encoding.keep), place_bytes(sizes, encoding.keep)
            parts = [("<f2", kept), ("i1", one), ("u1", places)]
    return tuple(PartSpec(np.dtype(dtype), counts) for dtype, counts in parts)


def encode_parts(
    values: Float32, sizes: Indices, encoding: Encoding, stream: np.random.Generator
) -> list[Part]:
    """Encode values as the parts of a payload. fp32 is not copied."""
    values = np.ascontiguousarray(values)
    parts: list[Part]
    match encoding.kind:
        case "fp32":
            parts = [values]
        case "fp16":
            parts = [*quantise_fp16(values, sizes)]
        case "int8":
            parts = [*quantise_int8(values, sizes, stream)]
        case "top-k":
            kept, places = pick(values, sizes, encoding.keep)
            parts = [*quantise_fp16(kept, kept_counts(sizes, encoding.keep)), places]
    specs = part_specs(sizes, encoding)
    return [part.astype(spec.dtype, copy=False) for part, spec in zip(parts, specs, strict=True)]


def decode_parts(parts: Sequence[Part], sizes: Indices, encoding: Encoding) -> Float32:
    """Decode parts to values; fp32 is not copied. Raises `BlockError` for wrong top-k positions."""
    match encoding.kind:
        case "fp32":
            return parts[0].astype(np.float32, copy=False)
        case "fp16":
            return restore_fp16(parts[0], parts[1], sizes)
        case "int8":
            return restore_int8(parts[0], parts[1], sizes)
        case "top-k":
            kept = restore_fp16(parts[0], parts[1], kept_counts(sizes, encoding.keep))
            return put_back(kept, parts[2], sizes, encoding.keep)


def decode_payload(
    plan: ModelPlan, ids: Indices, encoding: Encoding, payload: bytes | memoryview
) -> Blocks:
    """Read the blocks with these ascending ids from a payload. Raises only `BlockError`.

    The values are read-only; fp32 ones without zstd are a view of the payload.
    """
    view = memoryview(payload).cast("B")
    sizes = plan.block_sizes[ids]
    specs = part_specs(sizes, encoding)
    if encoding.zstd:
        shapes = [(spec.dtype, int(spec.counts.sum())) for spec in specs]
        try:
            parts = decompress(view, shapes)
        except EncodingError as error:
            raise BlockError(f"these blocks cannot be read: {error}") from error
    else:
        parts = _split(view, specs)
    values = decode_parts(parts, sizes, encoding)
    values.flags.writeable = False
    return Blocks(ids, values)


def join_message(
    plan: ModelPlan, chosen: Chosen, encoding: Encoding, parts: Sequence[Part]
) -> bytes:
    """Join header and parts to a message; compressed if the encoding asks for it and it helps."""
    if encoding.zstd:
        compressed = compress(parts)
        if len(compressed) < sum(part.nbytes for part in parts):
            return _header(plan, chosen, encoding) + compressed
    plain = replace(encoding, zstd=False) if encoding.zstd else encoding
    header = _header(plan, chosen, plain)
    return b"".join([header, *(part.data.cast("B") for part in parts)])


def _split(view: memoryview, specs: Sequence[PartSpec]) -> list[Part]:
    sizes = [spec.size_bytes for spec in specs]
    if len(view) != sum(sizes):
        raise BlockError(f"{len(view)} bytes of values for blocks that need {sum(sizes)}")
    parts, start = [], 0
    for spec, size in zip(specs, sizes, strict=True):
        end = start + size
        parts.append(np.frombuffer(view[start:end], dtype=spec.dtype))
        start = end
    return parts


def _header(plan: ModelPlan, chosen: Chosen, encoding: Encoding) -> bytes:
    header = packed(
        [
            MAGIC,
            VERSION,
            encoding.kind,
            float(encoding.keep) if encoding.kind == "top-k" else None,
            encoding.zstd,
            bytes.fromhex(plan.hash),
            [sum(1 << group for group in groups) for groups in chosen],
        ]
    )
    return (len(header).to_bytes(4, "little") + header).ljust(_padded(len(header)), b"\0")


def _padded(length: int) -> int:
    """Return the place of the payload behind a header of this length."""
    return -(-(4 + length) // ALIGNMENT) * ALIGNMENT


def _decode_fields(plan: ModelPlan, fields: list[Any]) -> tuple[Encoding, Chosen]:
    _, _, kind, keep, zstd, plan_hash, masks = fields
    if not isinstance(plan_hash, bytes) or len(plan_hash) != 32:
        raise TypeError(f"{plan_hash!r} is not a hash of 32 bytes")
    if plan_hash.hex() != plan.hash:
        raise BlockError(f"these are blocks of plan {plan_hash.hex()[:12]}…, not {plan.hash[:12]}…")
    encoding = Encoding(
        kind=cast(Kind, text(kind)), keep=DEFAULT_KEEP if keep is None else keep, zstd=flag(zstd)
    )
    if not isinstance(masks, list) or len(masks) != len(plan.axes):
        raise TypeError(f"there is not one mask for each of {len(plan.axes)} axes")
    groups = {
        axis.name: [bit for bit in range(count(mask).bit_length()) if mask >> bit & 1]
        for axis, mask in zip(plan.axes, masks, strict=True)
    }
    return encoding, plan.choose(groups)
