"""What a device must not lose survives whatever ends the process."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.device.stores.movements import (
    DeviceFolder,
    FolderMovements,
    MemoryMovements,
    MovementStore,
    StoredMovement,
)
from edge_sdk.protocol.messages.movement import encode_movement
from edge_sdk.protocol.messages.round import Movement, Replay
from edge_sdk.transport.uploads import Outgoing
from tests.messages import MOVEMENT


def movement(round: int, *, keeps_copy: bool = False) -> Movement:
    payload, mean = bytes([round % 256]) * 50, np.full(2, round, dtype=np.float32)
    made = replace(MOVEMENT, payload=payload, statistics={"mean": mean}, keeps_copy=keeps_copy)
    return replace(made, round=round)


AnyStore = MovementStore[Movement | Replay | StoredMovement]


def sent(store: AnyStore, round: int, answers: int | None = None) -> tuple[int | None, bytes]:
    """The round that is answered, and the bytes of the upload."""
    match store.again(round, answers=answers):
        case Movement() as kept:
            return None, encode_movement(kept)
        case Replay() as replay:
            return replay.round, encode_movement(replay.movement)
        case StoredMovement() as stored:
            assert stored.round == round
            return stored.answers, bytes(stored.data)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AnyStore:
    return MemoryMovements() if request.param == "memory" else FolderMovements(tmp_path)


def test_movement_is_there_until_its_receipt(store: AnyStore) -> None:
    for round in (3, 5):
        store.keep(movement(round))
    assert store.waiting == {3, 5}
    assert store.copy is None
    assert sent(store, 3) == (None, encode_movement(movement(3)))
    assert bytes(store.payload(3)) == movement(3).payload
    store.forget(3)
    store.forget(3)
    assert store.waiting == {5}
    with pytest.raises(KeyError):
        store.again(3)
    with pytest.raises(KeyError):
        store.payload(3)


def test_copy_outlives_its_receipt_until_the_next_movement(store: AnyStore) -> None:
    store.keep(movement(3, keeps_copy=True))
    store.forget(3)
    assert (store.waiting, store.copy) == (frozenset(), 3)
    assert sent(store, 3, answers=5) == (5, encode_movement(movement(3, keeps_copy=True)))
    store.keep(movement(4))
    assert store.copy is None
    with pytest.raises(KeyError):
        store.again(3)
    with pytest.raises(KeyError):
        store.payload(3)


@settings(max_examples=60)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["keep", "forget", "restart"]), st.integers(0, 5)), max_size=14
    ),
)
def test_folder_remembers_what_memory_does_whenever_it_is_opened_again(
    tmp_path_factory: pytest.TempPathFactory, keeps_copy: bool, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("movements")
    on_disk, oracle, round = FolderMovements(folder), MemoryMovements(), 0
    for action, back in steps:
        if action == "keep":
            round += 1
            on_disk.keep(movement(round, keeps_copy=keeps_copy))
            oracle.keep(movement(round, keeps_copy=keeps_copy))
        elif action == "forget":
            on_disk.forget(round - back)
            oracle.forget(round - back)
        else:
            on_disk = FolderMovements(folder)
        assert (on_disk.waiting, on_disk.copy) == (oracle.waiting, oracle.copy)
        for each in oracle.waiting | ({oracle.copy} - {None}):
            assert each is not None
            assert sent(on_disk, each) == sent(oracle, each)


def test_rejected_movement_is_no_copy(store: AnyStore) -> None:
    store.keep(movement(3, keeps_copy=True))
    store.forget(3, rejected=True)
    assert (store.waiting, store.copy) == (frozenset(), None)
    with pytest.raises(KeyError):
        store.again(3)
    with pytest.raises(KeyError):
        store.payload(3)


def test_restart_finds_the_copy_again(tmp_path: Path) -> None:
    store = FolderMovements(tmp_path)
    store.keep(movement(2))
    store.keep(movement(3, keeps_copy=True))
    assert FolderMovements(tmp_path).copy == 3
    store.forget(3)
    again = FolderMovements(tmp_path)
    assert (again.copy, again.waiting) == (3, frozenset({2}))


def test_mapped_bytes_outlive_the_file(tmp_path: Path) -> None:
    store = FolderMovements(tmp_path)
    store.keep(movement(2))
    data = store.again(2).data
    store.forget(2)
    assert bytes(data) == encode_movement(movement(2))


def test_large_movement_is_sent_again_without_a_copy_of_it(tmp_path: Path) -> None:
    large = replace(movement(2, keeps_copy=True), payload=Random(1).randbytes(2**23))
    FolderMovements(tmp_path).keep(large)
    upload = encode_movement(large)
    tracemalloc.start()
    try:
        store = FolderMovements(tmp_path)
        stored = store.again(2)
        payload = store.payload(2)
        offer = Outgoing(
            stored.data, device="pi", run="a" * 16, round=2, answers=None, chunk_bytes=2**18
        ).offer
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (offer.size, offer.sha256) == (len(upload), sha256(upload).digest())
    assert stored.data == upload
    assert payload == large.payload
    assert peak < 2**20


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:20],
        lambda data: b"",
        lambda data: b"\xff" * len(data),
        lambda data: data[:-1],
        lambda data: data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        lambda data: data[:-1] + bytes([data[-1] ^ 128]),
        lambda _: encode_movement(movement(9)),
        lambda _: encode_movement(movement(2)),  # as earlier versions wrote it
    ],
)
def test_damaged_movement_is_left_aside(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    store = FolderMovements(tmp_path)
    store.keep(movement(2))
    store.keep(movement(3))
    path = tmp_path / "2.movement"
    path.write_bytes(damage(path.read_bytes()))
    assert FolderMovements(tmp_path).waiting == {3}
    assert "2.movement" in caplog.text


def test_sessions_count_up_at_every_start(tmp_path: Path) -> None:
    sessions = [DeviceFolder(tmp_path, "digits", "pi").next_session() for _ in range(3)]
    assert [session >> 16 for session in sessions] == [1, 2, 3]
    assert DeviceFolder(tmp_path, "digits", "other").next_session() >> 16 == 1


def test_sessions_of_programs_that_share_no_folder_differ(tmp_path: Path) -> None:
    folders = [DeviceFolder(tmp_path / str(number), "digits", "pi") for number in range(8)]
    assert len({folder.next_session() for folder in folders}) > 1


def test_session_is_above_what_was_heard_of(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "digits", "pi")
    heard = (70 << 16) + 0xFFFF
    assert folder.next_session(above=heard) > heard
    assert folder.next_session() >> 16 == 72


@pytest.mark.parametrize("content", [b"\0\0", b"", b"many"])
def test_damaged_session_begins_anew(tmp_path: Path, content: bytes) -> None:
    folder = DeviceFolder(tmp_path, "digits", "pi")
    folder.next_session()
    (folder.path / "session").write_bytes(content)
    assert folder.next_session() >> 16 == 1


def test_session_goes_on_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = DeviceFolder(tmp_path, "digits", "pi")
    folder.next_session()

    def full(_: int) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert folder.next_session() >> 16 == 2
    assert "no space left" in caplog.text


def test_new_run_removes_what_was_kept_of_others(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "digits", "pi")
    FolderMovements(folder.start_run("a" * 16) / "movements").keep(movement(1))
    assert FolderMovements(folder.start_run("a" * 16) / "movements").waiting == {1}
    folder.start_run("b" * 16)
    assert FolderMovements(folder.start_run("a" * 16) / "movements").waiting == frozenset()


def test_movement_costs_one_durable_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and its name; the receipt needs none, for a movement offered twice harms nobody."""
    store = FolderMovements(tmp_path)
    synced: list[int] = []
    sync = os.fsync

    def counted(handle: int) -> None:
        synced.append(handle)
        sync(handle)

    monkeypatch.setattr(os, "fsync", counted)
    for round in (1, 2, 3):
        synced.clear()
        store.keep(movement(round, keeps_copy=round != 2))
        assert len(synced) == 2
        store.again(round)
        store.forget(round)
        assert len(synced) == 2


def test_upload_has_the_hash_of_what_was_made_and_not_of_what_the_disk_has(tmp_path: Path) -> None:
    store = FolderMovements(tmp_path)
    store.keep(movement(1))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-9] + b"x" + path.read_bytes()[-8:])
    made = sha256(encode_movement(movement(1))).digest()
    assert store.again(1).sha256 == made  # the coordinator will find out
    assert sha256(store.again(1).data).digest() != made
    again = FolderMovements(tmp_path)
    assert again.waiting == frozenset()  # and so does the next start
