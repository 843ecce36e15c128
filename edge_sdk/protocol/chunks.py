"""Bytes in chunks that are named by what is in them.

A *blob* is a byte string on its way: its size, and the hashes of its chunks in order. All chunks
but the last are of one size. A chunk's hash is the first 16 bytes of its SHA-256, so a chunk that
arrives is checked by its name alone, one that did not change keeps its name, and a mix of two
versions cannot be put together.

Law: `join_blob(*split_blob(data, n)) == data` for every `n ≥ 1`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from edge_sdk.protocol.errors import MessageError

HASH_BYTES = 16
MIN_CHUNK_BYTES = 2**10
"""Smaller chunks would be mostly overhead."""
MAX_CHUNK_BYTES = 2**20
"""Brokers refuse larger messages, and sending them takes time that grows with their square."""
MAX_BLOB_BYTES = 2**40
"""What a blob may claim to be; whoever fetches one sets a limit of its own."""


class Chunks(Protocol):
    """Chunks by hash: a dict, or a cache on disk."""

    def __getitem__(self, hash: bytes, /) -> bytes:
        """The chunk with this hash. Raises `KeyError` if it is not here."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A byte string, named by its chunks. Raises `MessageError` for what cannot be one."""

    size: int
    """In bytes."""
    chunks: tuple[bytes, ...]
    """Their hashes, in order."""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_BLOB_BYTES:
            raise MessageError(f"a blob has 0 to {MAX_BLOB_BYTES} bytes, not {self.size!r}")
        if len(self.chunks) > self.size or bool(self.size) != bool(self.chunks):
            raise MessageError(f"{self.size} bytes cannot be {len(self.chunks)} chunks")
        if any(len(each) != HASH_BYTES for each in self.chunks):
            raise MessageError(f"the hash of a chunk has {HASH_BYTES} bytes")


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """A chunk's name: the first 16 bytes of its SHA-256."""
    return hashlib.sha256(chunk).digest()[:HASH_BYTES]


def chunk_count(size: int, chunk_bytes: int) -> int:
    """How many chunks so many bytes make."""
    return -(-size // chunk_bytes)


def split_blob(data: bytes, chunk_bytes: int) -> tuple[Blob, dict[bytes, bytes]]:
    """The blob that names these bytes, and its chunks by hash; equal chunks are there once."""
    if chunk_bytes < 1:
        raise MessageError(f"a chunk has at least one byte, not {chunk_bytes}")
    pieces = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    hashes = tuple(chunk_hash(piece) for piece in pieces)
    return Blob(len(data), hashes), dict(zip(hashes, pieces, strict=True))


def join_blob(blob: Blob, chunks: Chunks) -> bytes:
    """The bytes again. Raises `MessageError` if a chunk is missing, altered, or of a wrong size."""
    pieces, left = [], blob.size
    for name in blob.chunks:
        try:
            piece = chunks[name]
        except KeyError:
            raise MessageError(f"chunk {name.hex()} is missing") from None
        left -= len(piece)
        if left < 0:
            break
        if chunk_hash(piece) != name:
            raise MessageError(f"chunk {name.hex()} was altered: its bytes have another hash")
        pieces.append(piece)
    if left != 0:
        raise MessageError(f"the chunks of a blob do not add up to its {blob.size} bytes")
    return b"".join(pieces)
