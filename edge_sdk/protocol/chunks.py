"""Bytes in chunks that are named by their content.

A *blob* describes a byte string in transit: its size, and the hashes of its chunks in order. All
chunks except the last have the same size. A chunk's hash is the first 16 bytes of its SHA-256, so
its name alone is enough to check it, an unchanged chunk keeps its name, and chunks of two versions
cannot be mixed.

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
"""Brokers refuse larger messages, and their sending time grows with the square of their size."""
MAX_BLOB_BYTES = 2**40
"""Largest size a blob may claim; a fetching program sets its own limit."""


class Chunks(Protocol):
    """Chunks by hash: a dict, or a cache on disk."""

    def __getitem__(self, hash: bytes, /) -> bytes:
        """Return the chunk with this hash. Raises `KeyError` if it is not here."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A byte string, named by its chunks. Raises `MessageError` for impossible values."""

    size: int
    """Size in bytes."""
    chunks: tuple[bytes, ...]
    """Hashes of the chunks, in order."""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_BLOB_BYTES:
            raise MessageError(f"a blob has 0 to {MAX_BLOB_BYTES} bytes, not {self.size!r}")
        if len(self.chunks) > self.size or bool(self.size) != bool(self.chunks):
            raise MessageError(f"{self.size} bytes cannot be {len(self.chunks)} chunks")
        if any(len(each) != HASH_BYTES for each in self.chunks):
            raise MessageError(f"the hash of a chunk has {HASH_BYTES} bytes")


def chunk_hash(chunk: bytes | memoryview) -> bytes:
    """Return a chunk's name: the first 16 bytes of its SHA-256."""
    return hashlib.sha256(chunk).digest()[:HASH_BYTES]


def chunk_count(size: int, chunk_bytes: int) -> int:
    """Number of chunks for this many bytes."""
    return -(-size // chunk_bytes)


def split_blob(data: bytes, chunk_bytes: int) -> tuple[Blob, dict[bytes, bytes]]:
    """Return the blob of these bytes, and its chunks by hash; equal chunks appear once."""
    if chunk_bytes < 1:
        raise MessageError(f"a chunk has at least one byte, not {chunk_bytes}")
    pieces = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    hashes = tuple(chunk_hash(piece) for piece in pieces)
    return Blob(len(data), hashes), dict(zip(hashes, pieces, strict=True))


def join_blob(blob: Blob, chunks: Chunks) -> bytes:
    """Join the bytes again. Raises `MessageError` for a missing, altered or wrongly sized chunk."""
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
            raise MessageError(f"chunk {name.hex()} was altered: its hash does not match")
        pieces.append(piece)
    if left != 0:
        raise MessageError(f"the chunks of a blob do not add up to its {blob.size} bytes")
    return b"".join(pieces)
