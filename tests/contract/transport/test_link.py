"""What every link promises, on every transport."""

from __future__ import annotations

import pytest

from edge_sdk.transport.link import Connected, Received, Will
from edge_sdk.transport.outbox import BULK_BYTES
from edge_sdk.transport.probe import probe_links
from edge_sdk.transport.settings import LinkError
from tests.contract.transport.harness import Bench, Peer

CHUNK = 262_144


def chunk(number: int) -> bytes:
    return number.to_bytes(4, "little") * (CHUNK // 4)


def send_all(bench: Bench, peer: Peer, topic: str, payloads: list[bytes], *, bulk: bool) -> None:
    """Publish everything, waiting for room where there is none."""
    for payload in payloads:
        while not peer.link.publish(topic, payload, bulk=bulk):
            rooms = len(peer.rooms)
            bench.until(lambda: len(peer.rooms) > rooms)  # noqa: B023


def test_link_first_connection_says_so(bench: Bench) -> None:
    assert bench.open().events == [Connected(first=True)]


@pytest.mark.parametrize("bulk", [False, True])
def test_message_reaches_subscriber_and_nobody_else(bench: Bench, bulk: bool) -> None:
    sender, subscriber, other = bench.open(), bench.open(), bench.open()
    bench.listen(subscriber, bench.topic("a/b"), bulk=bulk)
    bench.listen(other, bench.topic("a/c"), bulk=bulk)
    payload = bytes(range(256))
    assert sender.link.publish(bench.topic("a/b"), payload, bulk=bulk)
    bench.until(lambda: bool(subscriber.received))
    bench.settle(other)
    assert subscriber.received == [Received(bench.topic("a/b"), payload, False)]
    assert other.received == []


@pytest.mark.parametrize(
    ("topic_filter", "expected"),
    [
        ("+/control", {"x/control", "y/control"}),
        ("x/#", {"x/control", "x/chunk/1", "x"}),
        ("+/chunk/+", {"x/chunk/1"}),
    ],
)
def test_wildcard_receives_what_it_fits(
    bench: Bench, topic_filter: str, expected: set[str]
) -> None:
    peer = bench.open()
    bench.listen(peer, bench.topic(topic_filter))
    for topic in ("x/control", "y/control", "x/chunk/1", "x", "z/y/control"):
        peer.link.publish(bench.topic(topic), b"1")
    bench.settle(peer)
    assert {event.topic for event in peer.received} == {bench.topic(t) for t in expected}


def test_unsubscribed_link_receives_no_more(bench: Bench) -> None:
    peer = bench.open()
    bench.listen(peer, bench.topic("t"))
    peer.link.unsubscribe(bench.topic("t"))
    peer.link.publish(bench.topic("t"), b"1")
    bench.settle(peer)
    assert peer.received == []


@pytest.mark.parametrize("topic_filter", ["kept/one", "kept/+", "#"])
def test_retained_message_waits_for_late_subscriber(bench: Bench, topic_filter: str) -> None:
    writer = bench.open()
    for payload in (b"old", b"new"):
        writer.link.publish(bench.topic("kept/one"), payload, retain=True)
    bench.settle(writer)
    late = bench.open()
    late.link.subscribe(bench.topic(topic_filter))
    bench.until(lambda: bool(late.received))
    assert late.received == [Received(bench.topic("kept/one"), b"new", True)]


def test_retained_message_comes_again_when_subscribed_again(bench: Bench) -> None:
    peer = bench.open()
    topic = bench.topic("chunk")
    peer.link.publish(topic, b"bytes", retain=True, bulk=True)
    bench.settle(peer, bulk=True)
    for times in (1, 2, 3):
        peer.link.subscribe(topic, bulk=True)
        bench.until(lambda: len(peer.received) == times)  # noqa: B023
        peer.link.unsubscribe(topic, bulk=True)
    assert peer.payloads(topic) == [b"bytes"] * 3


def test_empty_retained_message_clears_the_topic(bench: Bench) -> None:
    writer, late = bench.open(), bench.open()
    topic = bench.topic("kept")
    writer.link.publish(topic, b"value", retain=True)
    writer.link.publish(topic, b"", retain=True)
    bench.settle(writer)
    bench.listen(late, topic)
    assert late.received == []


def test_will_is_sent_when_a_link_is_killed(bench: Bench) -> None:
    watcher = bench.open()
    topic = bench.topic("presence/x")
    bench.listen(watcher, topic)
    victim = bench.open(will=Will(topic, b"gone"))
    victim.link.kill()
    bench.until(lambda: bool(watcher.received))
    assert watcher.received == [Received(topic, b"gone", False)]
    late = bench.open()
    late.link.subscribe(topic)
    bench.until(lambda: bool(late.received))
    assert late.received == [Received(topic, b"gone", True)]


def test_will_is_not_sent_when_a_link_is_closed(bench: Bench) -> None:
    watcher = bench.open()
    bench.listen(watcher, bench.topic("#"))
    leaving = bench.open(will=Will(bench.topic("will"), b"gone"))
    leaving.link.close()
    crashing = bench.open(will=Will(bench.topic("other"), b"gone"))
    crashing.link.kill()
    bench.until(lambda: bool(watcher.received))
    assert {event.topic for event in watcher.received} == {bench.topic("other")}


def test_close_sends_what_was_queued_and_ends_the_events(bench: Bench) -> None:
    watcher, leaving = bench.open(), bench.open()
    bench.listen(watcher, bench.topic("last"))
    bench.listen(leaving, bench.topic("last"))
    for number in range(100):
        leaving.link.publish(bench.topic("last"), bytes([number]))
    leaving.link.close()
    told = len(leaving.events)
    bench.until(lambda: len(watcher.received) == 100)
    assert watcher.payloads(bench.topic("last")) == [bytes([number]) for number in range(100)]
    assert len(leaving.events) == told
    assert not leaving.link.publish(bench.topic("last"), b"too late")


def test_messages_of_one_topic_keep_their_order(bench: Bench) -> None:
    sender, receiver = bench.open(), bench.open()
    topic = bench.topic("stream")
    bench.listen(receiver, topic)
    payloads = [number.to_bytes(2, "big") for number in range(500)]
    send_all(bench, sender, topic, payloads, bulk=False)
    bench.until(lambda: len(receiver.received) >= 500)
    assert receiver.payloads(topic) == payloads


def test_chunks_arrive_whole_and_in_order(bench: Bench) -> None:
    sender, receiver = bench.open(), bench.open()
    topic = bench.topic("chunk")
    bench.listen(receiver, topic, bulk=True)
    payloads = [chunk(number) for number in range(24)]
    send_all(bench, sender, topic, payloads, bulk=True)
    bench.until(lambda: len(receiver.received) >= 24)
    assert receiver.payloads(topic) == payloads


def test_bulk_is_bounded_and_says_when_there_is_room(bench: Bench) -> None:
    sender = bench.open()
    topic = bench.topic("chunk")
    accepted = 0
    while sender.link.publish(topic, chunk(0), bulk=True):
        accepted += 1
        # A fast broker may take them as they come; what waits is bounded all the same.
        if accepted == 2_000:
            return
    assert accepted >= (BULK_BYTES // CHUNK) - 1
    bench.until(lambda: bool(sender.rooms))
    assert sender.rooms[0].bulk
    assert sender.link.publish(topic, chunk(0), bulk=True)


def test_control_is_not_lost_or_reordered_beside_bulk(bench: Bench) -> None:
    sender, receiver = bench.open(), bench.open()
    bench.listen(receiver, bench.topic("control"))
    bench.listen(receiver, bench.topic("chunk"), bulk=True)
    chunks = [chunk(number) for number in range(32)]
    controls = [bytes([number]) for number in range(32)]
    for one, small in zip(chunks, controls, strict=True):
        send_all(bench, sender, bench.topic("chunk"), [one], bulk=True)
        sender.link.publish(bench.topic("control"), small)
    bench.until(lambda: len(receiver.received) >= 64)
    assert receiver.payloads(bench.topic("control")) == controls
    assert receiver.payloads(bench.topic("chunk")) == chunks


@pytest.mark.parametrize("view", [bytearray, memoryview])
def test_payload_is_taken_as_it_is_when_published(bench: Bench, view: type) -> None:
    peer = bench.open()
    bench.listen(peer, bench.topic("t"))
    store = bytearray(b"before")
    peer.link.publish(bench.topic("t"), view(store))
    store[:] = b"after!"
    bench.until(lambda: bool(peer.received))
    assert peer.payloads(bench.topic("t")) == [b"before"]


def test_malformed_topics_are_refused_at_once(bench: Bench) -> None:
    link = bench.open().link
    for topic in ("", "a/+", "a/#", "a\0b"):
        with pytest.raises(LinkError):
            link.publish(topic, b"")
    for topic_filter in ("", "a/#/b", "a+/b", "a#"):
        with pytest.raises(LinkError):
            link.subscribe(topic_filter)


def test_probe_finds_everything_in_order(bench: Bench) -> None:
    facts = probe_links(
        bench.server.open_link,
        lambda holds, most_s: bench.server.wait(holds) if most_s >= 1 else holds(),
        name="probe",
        chunk_bytes=CHUNK,
    )
    assert [finding.name for finding in facts.findings() if finding.verdict != "good"] == []
    assert facts.chunk_bytes == CHUNK
    assert facts.refusal is None
