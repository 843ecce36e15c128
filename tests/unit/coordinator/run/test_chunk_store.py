"""Chunks that devices may ask for: all that sets need, and about as many bytes as they have."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.run.chunk_store import ChunkStore
from edge_sdk.protocol.chunks import chunk_hash


def chunk(number: int) -> tuple[bytes, bytes]:
    data = bytes([number]) * (100 + 50 * number)
    return chunk_hash(data), data


@settings(max_examples=50)
@given(versions=st.lists(st.sets(st.integers(0, 30), min_size=1), min_size=1, max_size=12))
def test_store_has_what_is_needed_in_about_so_many_bytes(
    tmp_path_factory: pytest.TempPathFactory, versions: list[set[int]]
) -> None:
    folder = tmp_path_factory.mktemp("run") / "chunks"
    store = ChunkStore(folder)
    for number, members in enumerate(versions):
        store.add(str(number), map(chunk, sorted(members)))
        if number > 1:
            store.drop(str(number - 2))
        needed = set().union(*versions[max(0, number - 1) : number + 1])
        assert set(store) == {chunk(each)[0] for each in needed}
        assert all(store[chunk(each)[0]] == chunk(each)[1] for each in needed)
        on_disk = sum(path.stat().st_size for path in folder.iterdir())
        assert on_disk <= 2 * sum(len(chunk(each)[1]) for each in needed)
    for name in store.names():
        store.drop(name)
    assert list(folder.iterdir()) == []
    store.close()


def test_store_without_room_keeps_files_with_gaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ChunkStore(tmp_path / "chunks")
    store.add("old", map(chunk, range(10)))
    store.add("new", map(chunk, range(9, 11)))

    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", no_space)
    store.drop("old")
    monkeypatch.undo()
    assert all(store[chunk(each)[0]] == chunk(each)[1] for each in (9, 10))
    store.close()
