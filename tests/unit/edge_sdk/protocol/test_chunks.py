"""Blobs: bytes named by the hashes of their chunks."""

from __future__ import annotations

import hashlib

import pytest

from edge_sdk.protocol.chunks import Blob, chunk_hash, join_blob, split_blob
from edge_sdk.protocol.errors import MessageError

DATA = bytes(range(256)) * 4


def test_blob_names_its_chunks_by_the_start_of_their_sha256() -> None:
    blob, chunks = split_blob(DATA, 300)
    pieces = [DATA[:300], DATA[300:600], DATA[600:900], DATA[900:]]
    assert blob.size == 1024
    assert list(blob.chunks) == [hashlib.sha256(piece).digest()[:16] for piece in pieces]
    assert [chunks[name] for name in blob.chunks] == pieces
    assert chunk_hash(memoryview(DATA)) == hashlib.sha256(DATA).digest()[:16]


def test_equal_chunks_are_there_once() -> None:
    blob, chunks = split_blob(DATA, 256)
    assert len(blob.chunks) == 4
    assert len(chunks) == 1
    assert join_blob(blob, chunks) == DATA


def test_nothing_is_a_blob_without_chunks() -> None:
    assert split_blob(b"", 10) == (Blob(0, ()), {})
    assert join_blob(Blob(0, ()), {}) == b""


def test_missing_chunk_is_named() -> None:
    blob, chunks = split_blob(DATA, 300)
    del chunks[blob.chunks[2]]
    with pytest.raises(MessageError, match=f"{blob.chunks[2].hex()} is missing"):
        join_blob(blob, chunks)


def test_altered_chunk_is_named() -> None:
    blob, chunks = split_blob(DATA, 300)
    chunks[blob.chunks[1]] = bytes(300)
    with pytest.raises(MessageError, match=f"{blob.chunks[1].hex()} was altered"):
        join_blob(blob, chunks)


@pytest.mark.parametrize("size", [1, 1023, 1025, 2**40])
def test_size_that_the_chunks_do_not_have_is_refused(size: int) -> None:
    blob, chunks = split_blob(DATA, 1024)
    with pytest.raises(MessageError, match=f"not add up to its {size} bytes"):
        join_blob(Blob(size, blob.chunks), chunks)


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        (-1, ()),
        (1, ()),
        (0, (bytes(16),)),
        (1, (bytes(16), bytes(16))),
        (2**40 + 1, (bytes(16),)),
        (5, (bytes(15),)),
        (5, (b"",)),
    ],
)
def test_blob_that_cannot_be_is_refused(size: int, chunks: tuple[bytes, ...]) -> None:
    with pytest.raises(MessageError):
        Blob(size, chunks)


@pytest.mark.parametrize("chunk_bytes", [0, -1])
def test_chunks_of_nothing_are_refused(chunk_bytes: int) -> None:
    with pytest.raises(MessageError, match="at least one byte"):
        split_blob(DATA, chunk_bytes)
