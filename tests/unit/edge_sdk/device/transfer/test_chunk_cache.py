"""Chunks on disk: they cost what they weigh, the oldest go first, and a crash costs a few."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.device.transfer.chunk_cache import (
    BLOCK_BYTES,
    PACK_BYTES,
    SMALL_BYTES,
    ChunkCache,
    read_chunk,
)
from edge_sdk.protocol.chunks import chunk_hash

LARGE = 10 * BLOCK_BYTES
ROOM = 3 * LARGE
assert SMALL_BYTES <= LARGE


def chunk(number: int, size: int = LARGE) -> tuple[bytes, bytes]:
    data = number.to_bytes(4, "big") * (size // 4)
    return chunk_hash(data), data


def here(cache: ChunkCache, *numbers: int, size: int = LARGE) -> list[bool]:
    return [chunk(number, size)[0] in cache for number in numbers]


def on_disk(folder: Path) -> int:
    """What the folder's files take, counted by the system's blocks."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir())


def test_cache_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    for number in (1, 2, 3):
        cache.put(*chunk(number))
    cache.use([chunk(1)[0]])
    cache.use([])
    cache.put(*chunk(4))
    assert here(cache, 1, 2, 3, 4) == [True, False, True, True]
    assert cache.taken_bytes == ROOM == on_disk(tmp_path)


def test_cache_keeps_what_is_in_use_however_much(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    numbers = [*range(5), *range(100, 600)]
    sizes = [LARGE if number < 5 else 400 for number in numbers]
    every = [chunk(number, size) for number, size in zip(numbers, sizes, strict=True)]
    cache.use([hash for hash, _ in every])
    for each in every:
        cache.put(*each)
    assert all(cache[hash] == data for hash, data in every)
    cache.use([])
    cache.put(*chunk(9))
    assert cache.taken_bytes <= ROOM
    assert here(cache, 0, 1, 2, 3, 9) == [False] * 4 + [True]


def test_small_chunks_take_about_what_they_weigh(tmp_path: Path) -> None:
    cache, every = ChunkCache(tmp_path, 2**24), [chunk(number, 448) for number in range(8_000)]
    for each in every:
        cache.put(*each)
    assert on_disk(tmp_path) < 1.1 * 8_000 * 448
    assert len(os.listdir(tmp_path)) <= 3
    again = ChunkCache(tmp_path, 2**24)
    assert again.taken_bytes == cache.taken_bytes
    assert all(again[hash] == data for hash, data in every[::100])


def test_limit_holds_for_what_small_chunks_take(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, most := 2 * PACK_BYTES)
    sizes = [200 + 37 * (number % 90) for number in range(8_000)]
    for number, size in enumerate(sizes):
        cache.put(*chunk(number, size))
        if number % 500 == 0:
            assert cache.taken_bytes <= most
    kept = [number for number, size in enumerate(sizes) if here(cache, number, size=size)[0]]
    assert on_disk(tmp_path) <= most
    assert kept == list(range(kept[0], len(sizes)))  # the newest
    assert sum(sizes[number] for number in kept) > most / 3
    assert all(cache[chunk(n, sizes[n])[0]] == chunk(n, sizes[n])[1] for n in kept[::50])


@settings(max_examples=30)
@given(st.data())
def test_cache_counts_its_files_and_has_the_bytes_that_it_says_it_has(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = ChunkCache(folder, 2**18)
    sizes = [20, 400, 5_000, SMALL_BYTES - 4, LARGE]
    numbers = st.integers(0, 20)
    for _ in range(data.draw(st.integers(1, 40))):
        number = data.draw(numbers)
        hash, content = chunk(number, sizes[number % len(sizes)])
        match data.draw(st.sampled_from(["put", "put", "drop", "use", "restart"])):
            case "put":
                cache.put(hash, content)
            case "drop":
                cache.drop([hash])
                assert hash not in cache
            case "use":
                cache.use([hash])
            case "restart":
                cache = ChunkCache(folder, 2**18)
        files = [path.stat().st_size for path in folder.iterdir()]
        assert cache.taken_bytes == sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in files)
    for number in range(21):
        hash, content = chunk(number, sizes[number % len(sizes)])
        assert hash not in cache or cache[hash] == content


def test_chunks_are_read_beside_the_process_that_has_them(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    every = [chunk(number, 400) for number in range(5)] + [chunk(7)]
    for each in every:
        cache.put(*each)
    assert all(read_chunk(tmp_path, hash) == data for hash, data in every)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(KeyError):
            read_chunk(folder, bytes(16))


def test_cache_orders_by_use_after_a_restart(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    for number in (1, 2):
        cache.put(*chunk(number))
        os.utime(tmp_path / chunk(number)[0].hex(), (number, number))
    cache.use([chunk(1)[0]])
    again = ChunkCache(tmp_path, 2 * LARGE)
    again.put(*chunk(3))
    assert here(again, 1, 2) == [True, False]


@pytest.mark.parametrize("size", [400, LARGE])
def test_cache_misses_a_file_that_somebody_removed(tmp_path: Path, size: int) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    hash, data = chunk(1, size)
    cache.put(hash, data)
    assert cache[hash] == data
    next(tmp_path.iterdir()).unlink()
    with pytest.raises(KeyError):
        cache[hash]
    assert hash not in cache


def test_cache_removes_what_a_crash_left_half_written(tmp_path: Path) -> None:
    (tmp_path / f".{'a' * 32}.0123abcd.draft").write_bytes(b"half")
    ChunkCache(tmp_path, ROOM)
    assert list(tmp_path.iterdir()) == []


def test_pack_that_was_cut_short_loses_the_chunks_behind_the_cut(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    for number in range(10):
        cache.put(*chunk(number, 400))
    (pack,) = tmp_path.iterdir()
    whole = pack.read_bytes()
    for at in (len(whole) - 1, len(whole) - 400, len(whole) - 419, 420, 100, 0):
        pack.write_bytes(whole[:at])
        again = ChunkCache(tmp_path, ROOM)
        kept = at // 420
        assert here(again, *range(10), size=400) == [True] * kept + [False] * (10 - kept)
        again.put(*chunk(9, 400))
        assert ChunkCache(tmp_path, ROOM)[chunk(9, 400)[0]] == chunk(9, 400)[1]
        for path in tmp_path.iterdir():
            path.unlink()


def test_chunk_that_had_moved_before_a_crash_is_there_once(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, ROOM)
    for number in range(10):
        cache.put(*chunk(number, 400))
    (pack,) = tmp_path.iterdir()
    before = pack.read_bytes()
    cache.drop([chunk(number, 400)[0] for number in range(6)])  # the others move
    (moved,) = tmp_path.iterdir()
    assert moved != pack
    pack.write_bytes(before)
    os.utime(pack, (1, 1))
    again = ChunkCache(tmp_path, ROOM)
    assert all(again[chunk(number, 400)[0]] == chunk(number, 400)[1] for number in range(10))
    assert again.taken_bytes == on_disk(tmp_path)


def test_chunks_without_room_on_disk_are_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ChunkCache(tmp_path, 2**20)
    cache.put(b"o" * 16, b"old")
    cache.use([b"a" * 16, b"b" * 16])
    monkeypatch.setattr("os.pwrite", no_space)
    for name in (b"a", b"b"):
        cache.put(name * 16, name * 100)
    assert cache[b"a" * 16] == b"a" * 100
    assert b"b" * 16 in cache
    assert b"o" * 16 not in cache  # it made room, in vain
    assert caplog.text.count("held in memory") == 1
    cache.use([b"b" * 16])
    assert b"a" * 16 not in cache
    monkeypatch.undo()
    cache.put(b"a" * 16, b"a" * 100)
    assert ChunkCache(tmp_path, 2**20)[b"a" * 16] == b"a" * 100


def test_chunk_in_use_that_cannot_move_is_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ChunkCache(tmp_path, 2**20)
    for number in range(10):
        cache.put(*chunk(number, 400))
    hash, data = chunk(9, 400)
    cache.use([hash])
    monkeypatch.setattr("os.pwrite", no_space)
    cache.drop([chunk(number, 400)[0] for number in range(6)])
    assert cache[hash] == data
    assert here(cache, 6, size=400) == [False]


def no_space(*_: object) -> int:
    raise OSError(28, "No space left on device")
