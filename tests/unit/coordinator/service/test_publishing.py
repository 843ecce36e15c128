"""Publishing: what is equal goes out once, what is old is cleared, a full link is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregate.model import GlobalModel
from coordinator.run.chunk_store import ChunkStore
from coordinator.run.folder import About, Run, create_run
from coordinator.service.courses.parts import make_model
from coordinator.service.outgoing.outlet import BrokerOutlet
from coordinator.service.outgoing.publishing import MAX_ASKED, Published, Publisher
from coordinator.service.outgoing.sending import ChunkSending
from edge_sdk.protocol.chunks import chunk_hash
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.round import RoundClosed
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Want
from edge_sdk.protocol.packs.index import unpack_model
from edge_sdk.protocol.packs.packs import find_packs
from edge_sdk.transport.link import Will
from tests.unit.coordinator.service.service_world import (
    PLAN,
    fragments_config,
    saved_model,
    task_files,
)

TOPICS = Topics("tiny")


class FullLink:
    """A link that takes so many messages; `sent` in the order they went."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[tuple[str, bytes, bool]] = []

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        if not self.room:
            return False
        self.room -= 1
        self.sent.append((topic, payload, retain))
        return True

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None: ...
    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None: ...
    def silence_s(self, *, bulk: bool = False) -> float:
        return float("inf")

    def reconnect(self, will: Will | None = None) -> None: ...
    def acknowledged(self, *, bulk: bool = False) -> bool:
        return True

    def close(self, *, flush: bool = True) -> None: ...
    def kill(self) -> None: ...

    @property
    def retained(self) -> dict[str, bytes]:
        """What a broker would hold."""
        held = {topic: payload for topic, payload, retain in self.sent if retain}
        return {topic: payload for topic, payload in held.items() if payload}


Make = Callable[..., tuple[Publisher, ChunkSending, ChunkStore]]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Make]:
    """Makes publishers on a link; the stores are closed afterwards."""
    with ExitStack() as stack:

        def make(link: FullLink, name: str = ".") -> tuple[Publisher, ChunkSending, ChunkStore]:
            folder = tmp_path / name
            store = ChunkStore(folder / "chunks")
            stack.callback(store.close)
            sending = ChunkSending(link, store.get)
            made = Publisher(sending, TOPICS, store, folder / "published", chunk_bytes=1024)
            return made, sending, store

        yield make


def publish(made: Publisher, version: int, shift: float) -> Published:
    model = saved_model()
    shifted = {n: np.asarray(a + shift, dtype=np.float32) for n, a in model.weights.items()}
    moved = GlobalModel(PLAN, shifted, model.buffers)
    return made.publish_model(PLAN, version, moved.serve(), moved.buffers)


def test_full_link_is_waited_for_in_order(publisher: Make) -> None:
    link = FullLink(room=3)
    made, sending, _ = publisher(link)
    publish(made, 0, 0.0)
    made.say_round(RoundClosed(round=1))
    assert (made.drained, len(link.sent)) == (False, 3)
    link.room = 1000
    sending.pump()
    assert (made.drained, link.room < 1000) == (True, True)
    topics = [topic for topic, _, _ in link.sent]
    assert topics[3] == TOPICS.round  # control goes first
    assert len(topics) == len(set(topics))
    assert all(
        topic.endswith(chunk_hash(payload).hex())
        for topic, payload, _ in link.sent
        if "/chunk/" in topic
    )


def test_equal_chunks_go_out_once_and_old_ones_are_cleared(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, _, store = publisher(link)
    publish(made, 0, 0.0)
    first = len(link.sent)
    again = publish(made, 1, 0.0)
    assert len(link.sent) == first
    publish(made, 2, 0.5)
    made.clear(made.keep_models([1, 2]))
    assert set(link.retained) == {TOPICS.chunk(hash) for hash in store}
    blocks, _ = unpack_model(PLAN, again.index, PLAN.all_groups(), store)
    assert np.array_equal(blocks.values, PLAN.flatten(saved_model().weights))
    made.clear(made.keep_models([2]))
    assert set(link.retained) == {TOPICS.chunk(hash) for hash in store}
    with pytest.raises(MessageError, match="missing"):
        unpack_model(PLAN, again.index, PLAN.all_groups(), store)


def test_what_an_earlier_process_left_on_the_broker_is_cleared(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, _, store = publisher(link)
    publish(made, 0, 0.0)
    publish(made, 1, 0.5)
    store.close()  # a crash: nothing was cleared
    again, _, store = publisher(link)
    publish(again, 1, 0.5)
    again.clear(again.keep_models([1]))
    assert set(link.retained) == {TOPICS.chunk(hash) for hash in store}


def test_all_is_said_again(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, _, _ = publisher(link)
    made.publish_task(task_files(), "tiny", "0" * 16)
    publish(made, 0, 0.0)
    made.say_round(RoundClosed(round=1))
    before = dict(link.retained)
    link.sent.clear()
    made.say_again()
    assert link.retained == before


def test_device_that_wants_chunks_does_not_hold_up_a_round(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, sending, store = publisher(link)
    publish(made, 0, 0.0)
    link.room = 0
    made.answer(Want(device="a", chunks=tuple(store)[:3]))
    assert sending.waiting == 3
    assert made.drained


def test_wants_of_one_device_wait_only_so_many_at_a_time(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, sending, store = publisher(link)
    for version in range(MAX_ASKED):
        publish(made, version, float(version))
    link.room, hashes = 0, tuple(store)
    assert len(hashes) > MAX_ASKED
    for start in range(len(hashes)):
        made.answer(Want(device="evil", chunks=hashes[start : start + 64]))
    assert sending.waiting_for("evil") == MAX_ASKED
    link.room = 10_000
    sending.pump()
    assert sending.waiting_for("evil") == 0


def test_want_of_what_is_gone_is_not_answered(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, _, store = publisher(link)
    publish(made, 0, 0.0)
    some = next(iter(store))
    link.sent.clear()
    made.answer(Want(device="a", chunks=(some, b"0" * 16)))
    assert link.sent == [(TOPICS.down_chunk("a", some), store[some], False)]


def test_version_that_is_published_twice_leaves_nothing_behind(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, _, store = publisher(link)
    for shift in (0.0, 0.0, 0.5):
        publish(made, 1, shift)
    made.clear(made.keep_models([]))
    assert len(store) == 0
    assert not link.retained


def test_chunk_store_deletes_files_that_nothing_needs(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "chunks")
    one, two, three = ({bytes([n]) * 16: bytes([n]) * 10} for n in (1, 2, 3))
    assert store.add("a", [*one.items(), *two.items()]) == [*one, *two]
    assert store.add("b", three.items(), two) == [*three]
    assert store.add("c", two.items()) == []
    assert store.drop("c") == []
    assert store.drop("a") == [*one]
    assert store[next(iter(two))] == b"\2" * 10
    assert len(list((tmp_path / "chunks").iterdir())) == 2
    assert sorted(store.drop("b")) == sorted([*two, *three])
    assert list((tmp_path / "chunks").iterdir()) == []
    assert len(store) == 0
    assert store.get(next(iter(two))) is None


@pytest.mark.parametrize("text", ["fp32", "fp16", "top-k:0.5", "fp32+zstd"])
def test_version_made_of_what_changed_is_the_version_made_anew(publisher: Make, text: str) -> None:
    random = np.random.default_rng(4)
    model = saved_model()
    made, _, store = publisher(FullLink(room=10_000), "one")
    anew, _, other = publisher(FullLink(room=10_000), "two")
    now = GlobalModel(PLAN, model.weights, model.buffers, encoding=Encoding.parse(text))
    last = made.publish_model(PLAN, 0, now.serve(), now.buffers)
    for version in range(1, 6):
        groups = {"hidden": tuple(sorted(random.choice(4, version % 3 + 1, replace=False)))}
        ids = PLAN.block_ids(PLAN.choose(groups))
        movement = np.zeros(PLAN.parameters, dtype=np.float32)
        for block in ids:
            start, end = PLAN.block_offsets[block], PLAN.block_offsets[block + 1]
            movement[start:end] = random.normal(size=end - start)
        now.commit(movement, [])
        changed = find_packs(PLAN).of_submodel(PLAN, PLAN.choose(groups))
        assert 0 < len(changed) < len(find_packs(PLAN))
        last, new = made.pack_model(
            PLAN, version, now.serve(), now.buffers, since=last, changed=changed
        )
        made.send(new)
        made.clear(made.keep_models([version]))
        whole = anew.publish_model(PLAN, version, now.serve(), now.buffers)
        anew.clear(anew.keep_models([version]))
        assert last == whole
        assert {name: store[name] for name in store} == {name: other[name] for name in other}


def test_reserved_fragment_is_of_the_version_that_was_published(
    publisher: Make, tmp_path: Path
) -> None:
    about = About(task="tiny", run="0" * 16, source="t.py:f", batch_size=4)
    create_run(tmp_path / "run", about, saved_model())
    made, _, store = publisher(FullLink(room=10_000))
    with Run(tmp_path / "run") as run:
        model = make_model(PLAN, run.latest(), Encoding(), 0)
        outlet = BrokerOutlet(model, made, store, run=about.run, clock=lambda: 0.0)
        outlet.publish()
        told = outlet.opening(fragments_config().opening(5), "a")
        start, groups = model.theta, {"hidden": (1, 3)}
        model.commit(np.ones_like(start), [])
        outlet.publish()
        assert outlet.opening(fragments_config().opening(6), "b").model != told.model
        outlet.reserve("a", 5, groups)
        message, buffers = model.reserved("a", 5) or (b"", {})
        assert outlet.applied("a", groups) == 1
    _, blocks = decode_blocks(PLAN, message)
    assert np.array_equal(blocks.values, PLAN.select(start, groups).values)
    assert buffers["mean"].shape == (3,)


def test_statistics_replace_the_last_ones_and_outlive_versions(publisher: Make) -> None:
    link = FullLink(room=10_000)
    made, _, _ = publisher(link)
    publish(made, 0, 0.0)
    model = set(link.retained)
    old = made.publish_statistics(b"old" * 1000)
    assert len(old.chunks) == 3
    assert set(link.retained) - model == {TOPICS.chunk(hash) for hash in old.chunks}
    new = made.publish_statistics(b"new" * 1000)
    publish(made, 1, 1.0)
    made.clear(made.keep_models([1]))
    assert {TOPICS.chunk(hash) for hash in new.chunks} < set(link.retained)
    assert not {TOPICS.chunk(hash) for hash in old.chunks} & set(link.retained)
    assert made.publish_statistics(b"new" * 1000) == new  # the same once more
    assert {TOPICS.chunk(hash) for hash in new.chunks} < set(link.retained)
