"""The whole model in packs, so that every device pulls what its groups need and hardly more.

A **pack** holds all blocks of one signature, from any tensor, and the parts of the statistics with
that signature: a device that needs one of them needs all. Plan and encoding determine the packs,
their order (`packs.py`) and their content, so the index names chunks and nothing else. Version 1:

    index = msgpack [ "tessera-model", 1, plan hash, encoding, chunk_bytes, sizes | nil, hashes ]
    pack  = payload of its blocks (`encoding/codec.py`) ‖ bytes of its parts of buffers

The plan's hash is 32 bytes, the encoding text; `hashes` are those of all packs' chunks, one after
the other, 16 bytes each. A pack is cut into chunks of `chunk_bytes`, the last one shorter. `sizes`
(with zstd only) are the bytes of every pack; where one is smaller than the plan makes it, the
payload of its blocks is compressed.

Within a pack, blocks and parts are in ascending order; a part is row-major and little-endian.

Law: `unpack_model(plan, *pack_model(plan, encoded, b, n), S)` is
`decode_blocks(plan, encoded.cut(S))[1]` and `plan.cut_buffers(b, S)`, bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.canonical import count, counts, packed, text
from edge_sdk.protocol.chunks import (
    HASH_BYTES,
    MAX_CHUNK_BYTES,
    Blob,
    Chunks,
    chunk_count,
    chunk_hash,
)
from edge_sdk.protocol.encoding.codec import FLOAT32, decode_payload, part_specs
from edge_sdk.protocol.encoding.encoded_model import EncodedModel
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.encoding.zstd import compress
from edge_sdk.protocol.errors import EncodingError, MessageError
from edge_sdk.protocol.messages.fields import read_array
from edge_sdk.protocol.packs.packs import Packs, find_packs
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs
from edge_sdk.protocol.plan.layout import (
    ALIGNED_BYTES,
    ROOM_BYTES,
    Array,
    Indices,
    Raw,
    pack,
    room_for,
    unpack,
)
from edge_sdk.protocol.plan.plan import Chosen, Groups, ModelPlan, per_dim, spans_of

MAGIC = "tessera-model"
VERSION = 1
FIELDS = 7
MAX_INDEX_BYTES = 2**24
"""Enough for a million chunks."""

PLAIN = Encoding()

SHORT_RUN = 256
"""Longest runs of blocks, in values, that are moved by index, many at a time."""
SCATTERED = 2**12
"""Blocks moved by index at a time: bounds the memory in use."""


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """Chunks of the model: one blob per pack, in the order of the plan's packs."""

    encoding: Encoding
    chunk_bytes: int
    packs: tuple[Blob, ...]

    @property
    def chunk_sizes(self) -> dict[bytes, int]:
        """Bytes of every chunk."""
        sizes: dict[bytes, int] = {}
        for blob in self.packs:
            sizes |= dict.fromkeys(blob.chunks[:-1], self.chunk_bytes)
            if blob.chunks:
                last = blob.size - self.chunk_bytes * (len(blob.chunks) - 1)
                sizes.setdefault(blob.chunks[-1], last)
        return sizes


def pack_model(
    plan: ModelPlan, encoded: EncodedModel, buffers: Mapping[str, Array], chunk_bytes: int
) -> tuple[ModelIndex, dict[bytes, bytes]]:
    """Return the index of a model and all its chunks by hash; equal chunks appear once.

    `buffers` are the whole model's. Raises `TensorError` if they are not the plan's,
    `EncodingError` if zstd is requested but not available.
    """
    blobs: dict[int, Blob] = {}
    chunks = dict(pack_chunks(plan, encoded, buffers, chunk_bytes, blobs))
    return ModelIndex(encoded.encoding, chunk_bytes, tuple(blobs.values())), chunks


def pack_chunks(
    plan: ModelPlan,
    encoded: EncodedModel,
    buffers: Mapping[str, Array],
    chunk_bytes: int,
    blobs: dict[int, Blob],
    numbers: Iterable[int] | None = None,
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of some packs (None: all), hash and bytes, one by one, so that a large
    model is never copied as a whole. `blobs` gets each pack's blob once its last chunk is out.

    Raises as `pack_model` does.
    """
    plan.check_buffers(buffers)
    packs = find_packs(plan)
    offsets = np.concatenate(([0], np.cumsum(packs.part_sizes)))
    raw = _buffer_bytes(plan, buffers)
    for number in range(len(packs)) if numbers is None else numbers:
        blocks, parts = packs.blocks[number], packs.parts[number]
        data = _payload(encoded, blocks) if len(blocks) else b""
        if len(parts):
            runs = block_runs(parts, offsets)
            data = b"".join([data, *(raw[whole].tobytes() for whole, _ in runs)])
        names = []
        for start in range(0, len(data), chunk_bytes):
            chunk = bytes(data[start : start + chunk_bytes])
            names.append(chunk_hash(chunk))
            yield names[-1], chunk
        blobs[number] = Blob(len(data), tuple(names))


def needed_chunks(plan: ModelPlan, index: ModelIndex, groups: Groups) -> list[bytes]:
    """Return the hashes of a submodel's chunks, in order, each once.

    Raises `GroupError` for groups and `MessageError` for an index that do not fit the plan.
    """
    needed = _packs(plan, index).of_submodel(plan, plan.choose(groups))
    return list(dict.fromkeys(name for number in needed for name in index.packs[number].chunks))


def unpack_model(
    plan: ModelPlan, index: ModelIndex, groups: Groups, chunks: Chunks
) -> tuple[Blocks, dict[str, Array]]:
    """Assemble the blocks (read-only) and buffers of a submodel.

    Raises `GroupError` for groups that do not fit the plan, `MessageError` for chunks that are
    missing, altered or of a wrong size, `BlockError` for values that are not the encoding's.
    """
    unpacking = Unpacking(plan, index, groups)
    for name in unpacking.needed:
        try:
            chunk = chunks[name]
        except KeyError:
            raise MessageError(f"chunk {name.hex()} is missing") from None
        if chunk_hash(chunk) != name:
            raise MessageError(f"chunk {name.hex()} was altered: its hash does not match")
        unpacking.take(name, chunk)
    return unpacking.result()


class Unpacking:
    """Puts the chunks of a submodel into their places as they come, in any order.

    fp32 goes straight to its place. A pack in another encoding, or with buffers, is put together
    and decoded once its last chunk is here.
    """

    def __init__(
        self, plan: ModelPlan, index: ModelIndex, groups: Groups, room: Raw | None = None
    ) -> None:
        """`room`: memory for the values, if it is large enough.

        Raises `GroupError` for groups, `MessageError` for an index that do not fit the plan.
        """
        self._plan, self._index = plan, index
        self._packs, self._chosen = _packs(plan, index), plan.choose(groups)
        self._most = self._packs.sizes(plan, index.encoding)
        self._ids = plan.block_ids(self._chosen)
        part_ids = self._packs.parts_of_submodel(plan, self._chosen)
        size = FLOAT32.itemsize * int(plan.block_sizes[self._ids].sum())
        self.room = room_for(size, room, ROOM_BYTES + ALIGNED_BYTES * len(plan.tensors))
        """Memory of the values. It also has room for as many arrays, or for their message."""
        self._values: Float32 = self.room[:size].view(np.float32)
        self._raw = np.empty(int(self._packs.part_sizes[part_ids].sum()), dtype=np.uint8)
        self._starts = _starts(self._ids, plan.block_sizes)
        self._part_starts = _starts(part_ids, self._packs.part_sizes)
        self._awaited: dict[bytes, list[_Piece]] = {}
        self._left: dict[int, int] = {}
        """Chunks that every pack still waits for."""
        self._together: dict[int, bytearray] = {}
        self._runs: dict[int, _Runs] = {}
        for number in self._packs.of_submodel(plan, self._chosen):
            blob = index.packs[number]
            self._left[number] = len(blob.chunks)
            for at, name in enumerate(blob.chunks):
                self._awaited.setdefault(name, []).append(_Piece(number, at * index.chunk_bytes))
            if not blob.chunks:
                self._decode(number, b"")

    @property
    def needed(self) -> list[bytes]:
        """Hashes of the chunks that have not been taken, in order, each once."""
        return list(self._awaited)

    def take(self, name: bytes, chunk: bytes) -> None:
        """Take a chunk whose hash was checked; one that is not needed is ignored.

        Raises `MessageError` for a wrong size, `BlockError` for values that are not the encoding's.
        """
        for number, offset in self._awaited.pop(name, ()):
            size = self._index.packs[number].size
            if len(chunk) != min(self._index.chunk_bytes, size - offset):
                raise MessageError(f"the chunks of pack {number} do not add up to its {size} bytes")
            self._left[number] -= 1
            if self._is_plain(number):
                self._place(number, offset, chunk)
                continue
            whole = self._together.setdefault(number, bytearray(size))
            whole[offset : offset + len(chunk)] = chunk
            if not self._left[number]:
                self._decode(number, self._together.pop(number))

    def result(self) -> tuple[Blocks, dict[str, Array]]:
        """Return the blocks (read-only) and the buffers. Raises `MessageError` if chunks miss."""
        for name in self._awaited:
            raise MessageError(f"chunk {name.hex()} is missing")
        self._values.flags.writeable = False
        return Blocks(self._ids, self._values), _buffers_of(self._plan, self._chosen, self._raw)

    def _is_plain(self, number: int) -> bool:
        """True if the pack is nothing but values as they lie in memory."""
        return (
            self._index.encoding == PLAIN
            and sys.byteorder == "little"
            and not len(self._packs.parts[number])
            and self._index.chunk_bytes % FLOAT32.itemsize == 0
            and self._index.packs[number].size == self._most[number]
        )

    def _place(self, number: int, offset: int, chunk: bytes) -> None:
        """Move the values of a chunk to their places."""
        runs = self._runs.get(number)
        if runs is None:
            blocks = self._packs.blocks[number]
            sizes = self._plan.block_sizes[blocks]
            runs = self._runs[number] = _runs(self._starts[blocks], sizes)
        source = np.frombuffer(chunk, dtype=FLOAT32)
        begin = offset // FLOAT32.itemsize
        end = begin + len(source)
        first = int(np.searchsorted(runs.begins, begin, side="right")) - 1
        last = int(np.searchsorted(runs.begins, end, side="left"))
        if SHORT_RUN * (last - first) > len(source):
            within = np.arange(begin, end)
            at = np.searchsorted(runs.begins, within, side="right") - 1
            self._values[runs.places[at] + (within - runs.begins[at])] = source
            return
        ends = [*runs.begins[first + 1 : last].tolist(), end]
        starts, places = runs.begins[first:last].tolist(), runs.places[first:last].tolist()
        for place, start, stop in zip(places, starts, ends, strict=True):
            low = max(start, begin)
            target = self._values[place + low - start : place + stop - start]
            target[...] = source[low - begin : stop - begin]

    def _decode(self, number: int, data: bytes | bytearray) -> None:
        blocks, parts = self._packs.blocks[number], self._packs.parts[number]
        view = memoryview(data)
        end = len(view) - int(self._packs.part_sizes[parts].sum())
        if end < 0:
            raise MessageError(f"pack {number} of the model has too few bytes: {len(view)}")
        if len(blocks):
            encoding = self._index.encoding
            compressed = encoding.zstd and len(view) < self._most[number]
            read = decode_payload(
                self._plan, blocks, replace(encoding, zstd=compressed), view[:end]
            )
            _scatter(
                read.values, self._values, self._starts[blocks], self._plan.block_sizes[blocks]
            )
        rest = np.frombuffer(view[end:], dtype=np.uint8)
        _scatter(rest, self._raw, self._part_starts[parts], self._packs.part_sizes[parts])


class _Piece(NamedTuple):
    """A chunk's place: the number of its pack, and its first byte there."""

    pack: int
    offset: int


class _Runs(NamedTuple):
    """Runs of adjacent values: where each begins in a pack, and its place in the submodel."""

    begins: Indices
    places: Indices


def _runs(starts: Indices, sizes: Indices) -> _Runs:
    """Find the runs of consecutive blocks that lie at these starts."""
    first = np.flatnonzero(np.concatenate(([True], starts[1:] != starts[:-1] + sizes[:-1])))
    begins = (np.cumsum(sizes) - sizes)[first]
    return _Runs(begins, starts[first])


def encode_index(plan: ModelPlan, index: ModelIndex) -> bytes:
    """Encode the index."""
    return packed(
        [
            MAGIC,
            VERSION,
            bytes.fromhex(plan.hash),
            str(index.encoding),
            index.chunk_bytes,
            [blob.size for blob in index.packs] if index.encoding.zstd else None,
            b"".join(name for blob in index.packs for name in blob.chunks),
        ]
    )


def decode_index(plan: ModelPlan, data: bytes) -> ModelIndex:
    """Decode an index. Raises only `MessageError`, for any other bytes."""
    if len(data) > MAX_INDEX_BYTES:
        raise MessageError(f"{len(data)} bytes are too many for an index (≤ {MAX_INDEX_BYTES})")
    fields = _unpacked(data, max(FIELDS, len(find_packs(plan))))
    if not isinstance(fields, list) or len(fields) < 2 or fields[0] != MAGIC:
        raise MessageError("these bytes are not the index of a model")
    if fields[1] != VERSION:
        theirs = repr(fields[1])[:40]
        raise MessageError(f"version {theirs} of an index is unknown; this side has {VERSION}")
    try:
        index = _decode_fields(plan, fields)
    except (TypeError, ValueError, EncodingError) as error:
        raise MessageError(f"the index has the wrong structure: {str(error)[:200]}") from error
    if encode_index(plan, index) != data:
        raise MessageError("the index is not in canonical form")
    return index


def _unpacked(data: bytes, most: int) -> Any:
    """Decode the value in these bytes: two arrays at most, of `most` entries."""
    arrays = 0

    def check_array(array: list[Any]) -> list[Any]:
        nonlocal arrays
        arrays += 1
        if arrays > 2:
            raise ValueError("more than two arrays")
        return array

    try:
        return msgpack.unpackb(
            data, raw=False, list_hook=check_array, max_array_len=most, max_map_len=0
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise MessageError(f"these bytes are not the index of a model: {error}") from error


def _decode_fields(plan: ModelPlan, fields: list[Any]) -> ModelIndex:
    _, _, plan_hash, encoding_text, chunk_bytes, sizes, hashes = fields
    if not isinstance(plan_hash, bytes) or not isinstance(hashes, bytes):
        raise TypeError("hashes must be bytes")
    if plan_hash.hex() != plan.hash:
        raise MessageError(f"the index is of plan {plan_hash.hex()[:12]}…, not {plan.hash[:12]}…")
    if not 1 <= count(chunk_bytes) <= MAX_CHUNK_BYTES:
        raise ValueError(f"a chunk has 1 to {MAX_CHUNK_BYTES} bytes, not {chunk_bytes}")
    encoding = Encoding.parse(text(encoding_text)[:80])
    most = find_packs(plan).sizes(plan, encoding)
    pack_sizes = most if sizes is None else counts(sizes)
    if len(pack_sizes) != len(most):
        raise ValueError(f"{len(pack_sizes)} packs; the plan has {len(most)}")
    if not all(1 <= size <= limit for size, limit in zip(pack_sizes, most, strict=True)):
        raise ValueError("a pack's size differs from the plan's")
    numbers = [chunk_count(size, chunk_bytes) for size in pack_sizes]
    if len(hashes) != HASH_BYTES * sum(numbers):
        raise ValueError(f"{len(hashes)} bytes of hashes for {sum(numbers)} chunks")
    names = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    packs, start = [], 0
    for size, number in zip(pack_sizes, numbers, strict=True):
        packs.append(Blob(size, tuple(names[start : start + number])))
        start += number
    return ModelIndex(encoding, chunk_bytes, tuple(packs))


def _packs(plan: ModelPlan, index: ModelIndex) -> Packs:
    packs = find_packs(plan)
    if len(index.packs) != len(packs):
        raise MessageError(f"an index of {len(index.packs)} packs; the plan has {len(packs)}")
    return packs


def _payload(encoded: EncodedModel, blocks: Indices) -> bytes | memoryview:
    """Return the bytes of a pack's blocks, compressed if the encoding asks for it and it helps."""
    payload = encoded.payload(blocks)
    if not encoded.encoding.zstd:
        return payload
    arrays, start = [], 0
    for spec in part_specs(encoded.plan.block_sizes[blocks], encoded.encoding):
        arrays.append(np.frombuffer(payload, spec.dtype, int(spec.counts.sum()), start))
        start += spec.size_bytes
    compressed = compress(arrays)
    return compressed if len(compressed) < len(payload) else payload


def _starts(ids: Indices, sizes: Indices) -> Indices:
    """Return where each of these blocks starts if only they are present; others are undefined."""
    starts = np.zeros(len(sizes), dtype=np.int64)
    ends = np.cumsum(sizes[ids])
    starts[ids] = ends - sizes[ids]
    return starts


def _scatter(source: Array, target: Array, starts: Indices, sizes: Indices) -> None:
    """Move consecutive blocks in `source` to their starts in `target`."""
    if not len(starts):
        return
    ends = np.cumsum(sizes)
    first = np.flatnonzero(np.concatenate(([True], starts[1:] != starts[:-1] + sizes[:-1])))
    if SHORT_RUN * len(first) <= len(source):
        places = starts[first].tolist()
        begins = (ends[first] - sizes[first]).tolist()
        for place, begin, end in zip(places, begins, [*begins[1:], len(source)], strict=True):
            target[place : place + end - begin] = source[begin:end]
        return
    for at in range(0, len(starts), SCATTERED):
        some = slice(at, at + SCATTERED)
        begin, end = int(ends[at] - sizes[at]), int(ends[some][-1])
        shift = np.repeat(starts[some] - (ends[some] - sizes[some]), sizes[some])
        target[np.arange(begin, end) + shift] = source[begin:end]


def _buffer_bytes(plan: ModelPlan, buffers: Mapping[str, Array]) -> NDArray[np.uint8]:
    """Return the parts of all buffers, one after the other."""
    pieces = [np.zeros(0, dtype=np.uint8)]
    for buffer in plan.buffers:
        array = buffers[buffer.name]
        flat = np.empty(array.size, dtype=np.dtype(buffer.dtype).newbyteorder("<"))
        pack(array, spans_of(buffer, plan.axes), flat)
        pieces.append(flat.view(np.uint8))
    return np.concatenate(pieces)


def _buffers_of(plan: ModelPlan, chosen: Chosen, data: NDArray[np.uint8]) -> dict[str, Array]:
    """Assemble a submodel's buffers from its parts."""
    buffers, start = {}, 0
    for buffer in plan.buffers:
        along = per_dim(buffer, chosen, [len(axis.groups) for axis in plan.axes])
        kept = [
            span.keep(groups)
            for span, groups in zip(spans_of(buffer, plan.axes), along, strict=True)
        ]
        dtype, size = np.dtype(buffer.dtype), prod(span.size for span in kept)
        end = start + size * dtype.itemsize
        flat = read_array(data[start:end], dtype, (size,), buffer.name)
        buffers[buffer.name] = unpack(flat, kept)
        start = end
    return buffers
