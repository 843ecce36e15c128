"""Chunks are pulled a few at a time, checked, cached, and asked for again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_sdk.device.transfer.chunk_cache import ChunkCache
from edge_sdk.device.transfer.fetching import (
    IDLE_S,
    RETRY_S,
    Ask,
    Fetcher,
    FetchError,
    Pull,
    PulledModel,
)
from edge_sdk.protocol.chunks import Blob, split_blob
from edge_sdk.protocol.encoding.encoded_model import encode_model
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import Assignment
from edge_sdk.protocol.messages.topics import Topics, parse_topic
from edge_sdk.protocol.messages.transfer import Want
from edge_sdk.protocol.messages.wire import decode_message
from edge_sdk.protocol.packs.index import encode_index, pack_model
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor
from edge_sdk.transport.link import Will
from tests.messages import make_opening
from tests.waiting import HANGS_S

DATA = Random(1).randbytes(50_000)
BLOB, CHUNKS = split_blob(DATA, 1024)
TOPICS = Topics("toy")


class FakeBroker:
    """A link to a broker that answers at once, and loses what it is told to."""

    def __init__(self, *, retains: bool = True, loses: Callable[[bytes], bool] | None = None):
        self.silence = float("inf")
        self.retains = retains
        self.loses = loses or (lambda _: False)
        self.fetcher: Fetcher | None = None
        self.subscribed: set[bytes] = set()
        self.most = 0
        self.wants: list[Want] = []
        self.alter: Callable[[bytes], bytes] = lambda chunk: chunk
        self.chunks: Mapping[bytes, bytes] = CHUNKS

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        want = decode_message(payload)
        assert isinstance(want, Want)
        assert topic == TOPICS.up_control("pi")
        self.wants.append(want)
        for hash in want.chunks:
            self._deliver(hash, direct=True)
        return True

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        assert bulk
        hash = parse_topic(topic_filter).hash
        assert hash is not None
        self.subscribed.add(hash)
        self.most = max(self.most, len(self.subscribed))
        if self.retains:
            self._deliver(hash, direct=False)

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        hash = parse_topic(topic_filter).hash
        assert hash is not None
        self.subscribed.discard(hash)

    def acknowledged(self, *, bulk: bool = False) -> bool:
        return True

    def silence_s(self, *, bulk: bool = False) -> float:
        return self.silence

    def reconnect(self, will: Will | None = None) -> None:
        raise AssertionError

    def close(self, *, flush: bool = True) -> None:
        pass

    def kill(self) -> None:
        pass

    def _deliver(self, hash: bytes, *, direct: bool) -> None:
        assert self.fetcher is not None
        if hash in self.chunks and not self.loses(hash):
            self.fetcher.arrived(hash, self.alter(self.chunks[hash]), direct=direct)


class Leaping:
    """A clock on which every look takes longer than a chunk that does not come."""

    def __init__(self) -> None:
        self.looks = count(1)

    def __call__(self) -> float:
        return next(self.looks) * (RETRY_S + 1)  # one step, also between threads


def make_fetcher(
    broker: FakeBroker,
    folder: Path,
    max_bytes: int = 2**20,
    clock: Callable[[], float] = time.monotonic,
) -> Fetcher:
    fetcher = Fetcher(broker, TOPICS, "pi", ChunkCache(folder, max_bytes), clock=clock)
    broker.fetcher = fetcher
    return fetcher


def test_blob_comes_whole_with_few_chunks_under_way(tmp_path: Path) -> None:
    broker = FakeBroker()
    assert make_fetcher(broker, tmp_path).fetch_blob(BLOB, 2**20, "it") == DATA
    assert broker.most == 8
    assert broker.subscribed == set()
    assert broker.wants == []


def test_what_was_fetched_is_not_fetched_again_after_a_restart(tmp_path: Path) -> None:
    make_fetcher(FakeBroker(), tmp_path).fetch_blob(BLOB, 2**20, "it")
    offline = FakeBroker(retains=False)
    assert make_fetcher(offline, tmp_path).fetch_blob(BLOB, 2**20, "it") == DATA
    assert offline.most == 0


def test_chunk_that_does_not_come_is_asked_for_directly(tmp_path: Path) -> None:
    broker = FakeBroker(retains=False)
    fetcher = make_fetcher(broker, tmp_path, clock=Leaping())
    assert fetcher.fetch_blob(BLOB, 2**20, "it") == DATA
    # Subscribed to once, when it was not known yet that it is in vain.
    assert broker.most == 8
    assert broker.subscribed == set()


def test_chunk_with_other_bytes_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broker = FakeBroker()
    broker.alter = lambda chunk: chunk[:-1] + b"x"
    fetcher = make_fetcher(broker, tmp_path, clock=Leaping())
    with pytest.raises(FetchError, match="49 of 49 chunks did not come"):
        fetcher.fetch(BLOB.chunks)
    assert "other bytes" in caplog.text
    assert broker.subscribed == set()
    assert list(tmp_path.iterdir()) == []


def test_fetch_ends_when_it_is_told_to(tmp_path: Path) -> None:
    broker = FakeBroker(retains=False)
    stop: list[bool] = []
    fetcher = Fetcher(
        broker, TOPICS, "pi", ChunkCache(tmp_path, 2**20), should_stop=lambda: bool(stop)
    )
    broker.fetcher = fetcher
    errors: list[Exception] = []

    def fetch() -> None:
        try:
            fetcher.fetch(BLOB.chunks)
        except FetchError as error:
            errors.append(error)

    thread = Thread(target=fetch)
    thread.start()
    stop.append(True)
    fetcher.wake()
    thread.join(HANGS_S)
    assert [str(error) for error in errors] == ["the device is stopping"]


def test_blob_that_is_too_large_is_not_fetched(tmp_path: Path) -> None:
    broker = FakeBroker()
    with pytest.raises(FetchError, match="50000 bytes; at most 1000"):
        make_fetcher(broker, tmp_path).fetch_blob(BLOB, 1000, "it")
    assert broker.most == 0


def test_damaged_file_is_pulled_again_the_next_time(tmp_path: Path) -> None:
    fetcher = make_fetcher(FakeBroker(), tmp_path)
    fetcher.fetch(BLOB.chunks)
    (pack,) = tmp_path.iterdir()
    pack.write_bytes(pack.read_bytes()[:-1] + b"?")
    with pytest.raises(FetchError, match="damaged"):
        fetcher.fetch_blob(BLOB, 2**20, "it")
    assert fetcher.fetch_blob(BLOB, 2**20, "it") == DATA


def test_error_of_the_work_is_not_swallowed(tmp_path: Path) -> None:
    def work(_: ChunkCache) -> None:
        raise MessageError("no")

    with pytest.raises(FetchError, match="no"):
        make_fetcher(FakeBroker(), tmp_path).read(BLOB.chunks, work)


# -- the logic alone -----------------------------------------------------------------------------

HASHES = [bytes([number]) * 16 for number in range(30)]


@settings(max_examples=100)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 2**32))
def test_pull_gets_everything_over_a_lossy_link(number: int, window: int, seed: int) -> None:
    random, now, subscribed = Random(seed), 0.0, set[bytes]()
    pull = Pull(HASHES[:number], now, window=window)
    got: list[bytes] = []
    for _ in range(10_000):
        if not pull.left:
            break
        ask = pull.ask(now)
        subscribed -= set(ask.drop)
        subscribed |= set(ask.subscribe)
        assert len(subscribed) <= window
        arrivals = [(h, False) for h in ask.subscribe] + [(h, True) for h in ask.want]
        random.shuffle(arrivals)
        for hash, direct in arrivals:
            if random.random() < 0.4 and pull.arrived(hash, now, direct=direct):
                got.append(hash)
        now = max(now, pull.due_s)
    assert sorted(got) == HASHES[:number]
    subscribed -= set(pull.give_up().drop)
    assert subscribed == set()


def test_pull_waits_before_it_asks_again() -> None:
    pull = Pull(HASHES[:3], 0.0)
    assert pull.ask(0.0).subscribe == HASHES[:3]
    again = pull.ask(RETRY_S / 2)
    assert (again.subscribe, again.want, again.drop) == ([], [], [])
    assert pull.due_s == RETRY_S
    late = pull.ask(RETRY_S)
    assert (late.subscribe, late.want) == (HASHES[:3], HASHES[:3])


def test_pull_does_not_ask_again_while_bytes_come() -> None:
    pull = Pull([b"a" * 16, b"b" * 16], 0.0)
    assert len(pull.ask(0.0).subscribe) == 2
    # A slow link is in the middle of a chunk.
    assert pull.ask(RETRY_S, 0.5) == Ask()
    assert pull.due_s == RETRY_S + RETRY_S - 0.5
    assert pull.ask(2 * RETRY_S, 0.1) == Ask()
    again = pull.ask(3 * RETRY_S, RETRY_S)
    assert again.subscribe == again.want == [b"a" * 16, b"b" * 16]


def test_fetch_is_not_given_up_while_bytes_come(tmp_path: Path) -> None:
    broker = FakeBroker(retains=False, loses=lambda _: True)
    broker.silence, clock = 0.0, Leaping()
    fetcher = make_fetcher(broker, tmp_path, clock=clock)
    thread, said = fetching(fetcher)
    while clock() < 10 * IDLE_S:
        thread.join(0.001)
        assert thread.is_alive()
    broker.silence = RETRY_S
    fetcher.wake()
    thread.join(HANGS_S)
    assert "did not come" in said[0]


def test_pull_asks_where_the_last_chunk_came_from() -> None:
    pull = Pull(HASHES[:4], 0.0, window=1)
    pull.ask(0.0)
    pull.ask(RETRY_S)
    assert pull.arrived(HASHES[0], 5.0, direct=True)
    ask = pull.ask(5.0)
    assert (ask.drop, ask.subscribe, ask.want) == (HASHES[:1], [], HASHES[1:2])
    assert pull.arrived(HASHES[1], 6.0, direct=False)
    assert pull.ask(6.0).subscribe == HASHES[2:3]


def test_pull_takes_every_chunk_once() -> None:
    pull = Pull([HASHES[0], HASHES[0]], 0.0)
    assert pull.left == 1
    pull.ask(0.0)
    assert pull.arrived(HASHES[0], 0.0, direct=False)
    assert not pull.arrived(HASHES[0], 0.0, direct=False)
    assert not pull.arrived(HASHES[1], 0.0, direct=False)


def test_empty_blob_needs_nothing(tmp_path: Path) -> None:
    assert make_fetcher(FakeBroker(), tmp_path).fetch_blob(Blob(0, ()), 10, "it") == b""


def fetching(fetcher: Fetcher, **options: Any) -> tuple[Thread, list[str]]:
    """A fetch in a thread of its own, and what it raised."""
    said: list[str] = []

    def fetch() -> None:
        try:
            fetcher.fetch(BLOB.chunks, **options)
        except FetchError as error:
            said.append(str(error))

    thread = Thread(target=fetch)
    thread.start()
    return thread, said


def test_fetch_ends_when_something_newer_comes(tmp_path: Path) -> None:
    broker, newer = FakeBroker(retains=False), Event()
    fetcher = make_fetcher(broker, tmp_path)
    thread, said = fetching(fetcher, overtaken=newer.is_set)
    newer.set()
    fetcher.wake()
    thread.join(HANGS_S)
    assert said == ["something newer came during the fetch"]
    assert broker.subscribed == set()


def test_fetch_ends_when_a_chunk_it_waits_for_is_cleared(tmp_path: Path) -> None:
    broker = FakeBroker(retains=False)
    fetcher = make_fetcher(broker, tmp_path)
    thread, said = fetching(fetcher)
    while not broker.subscribed:
        thread.join(0.001)
    fetcher.arrived(b"x" * 16, b"", direct=False)  # not one of ours
    fetcher.arrived(next(iter(broker.subscribed)), b"", direct=False)
    thread.join(HANGS_S)
    assert said == ["its version was replaced during the fetch"]


def test_weights_are_read_again_even_if_the_disk_lost_or_damaged_them(tmp_path: Path) -> None:
    """A training subtracts what it began with: nothing else may come in its place."""
    plan = ModelPlan(
        axes=(Axis("a", (64,) * 4),), tensors=(Tensor("w", "float32", (Dim(256, 0), Dim(300))),)
    )
    flat = np.random.default_rng(0).standard_normal(plan.parameters, dtype=np.float32)
    encoded = encode_model(plan, flat, Encoding(), np.random.default_rng(0))
    index, chunks = pack_model(plan, encoded, {}, 2**16)
    blob, of_index = split_blob(encode_index(plan, index), 2**16)
    broker = FakeBroker()
    broker.chunks = chunks | of_index
    source = PulledModel(plan, make_fetcher(broker, tmp_path))
    assignment = Assignment(device="pi", round=1, groups={"a": (0, 2, 3)})
    opened = make_opening(1, plan_hash=plan.hash, model=blob)
    first, _ = source.fetch(assignment, opened)
    expected = first.values.copy()
    files = [path for path in tmp_path.iterdir() if path.stat().st_size == 2**16]
    assert len(files) > 2
    files[0].unlink()
    files[1].write_bytes(bytes(2**16))
    room = first.room
    assert room is not None
    room[:] = 255
    again = source.fetch_again(assignment, opened, room)
    assert np.shares_memory(again.values, room)
    assert again.values.tobytes() == expected.tobytes()
    assert source.fetch_again(assignment, opened, None).values.tobytes() == expected.tobytes()
