"""Brokers that go away and come back, and names that are used twice."""

from __future__ import annotations

from edge_sdk.transport.link import Connected, Will
from tests.contract.transport.harness import Bench


def test_link_returns_with_its_subscriptions_after_a_restart(own_bench: Bench) -> None:
    bench = own_bench
    peer, other = bench.open(), bench.open()
    bench.listen(peer, bench.topic("control/+"))
    bench.listen(peer, bench.topic("chunk"), bulk=True)
    bench.listen(peer, bench.topic("unwanted"))
    peer.link.unsubscribe(bench.topic("unwanted"))
    bench.server.stop()
    bench.until(lambda: bool(peer.disconnections and other.disconnections))
    assert peer.disconnections[0].reason
    bench.server.start()
    bench.until(lambda: len(peer.connections) == 2 and len(other.connections) == 2)
    assert peer.connections == [Connected(first=True), Connected(first=False)]
    other.link.publish(bench.topic("unwanted"), b"0")
    other.link.publish(bench.topic("control/a"), b"1")
    other.link.publish(bench.topic("chunk"), b"2", bulk=True)
    bench.until(lambda: len(peer.received) >= 2)
    bench.settle(peer)
    assert {(e.topic, e.payload) for e in peer.received} == {
        (bench.topic("control/a"), b"1"),
        (bench.topic("chunk"), b"2"),
    }


def test_messages_published_while_away_are_sent_on_return(own_bench: Bench) -> None:
    bench = own_bench
    peer = bench.open()
    bench.server.stop()
    bench.until(lambda: bool(peer.disconnections))
    # Subscribed and published with no broker at all: both wait for it.
    peer.link.subscribe(bench.topic("t"))
    payloads = [bytes([number]) for number in range(50)]
    for payload in payloads:
        assert peer.link.publish(bench.topic("t"), payload)
    bench.server.start()
    bench.until(lambda: len(peer.received) >= 50)
    assert peer.payloads(bench.topic("t")) == payloads


def test_queue_is_bounded_while_away(own_bench: Bench) -> None:
    bench = own_bench
    peer = bench.open()
    bench.server.stop()
    bench.until(lambda: bool(peer.disconnections))
    chunk = bytes(262_144)
    accepted = 0
    while peer.link.publish(bench.topic("t"), chunk, bulk=True):
        accepted += 1
        assert accepted < 100
    assert accepted == 15
    bench.server.start()
    bench.until(lambda: bool(peer.rooms))
    assert peer.link.publish(bench.topic("t"), chunk, bulk=True)


def test_newer_connection_takes_the_name_over(own_bench: Bench) -> None:
    bench = own_bench
    watcher = bench.open()
    bench.listen(watcher, bench.topic("presence"))
    older = bench.open("same-name", will=Will(bench.topic("presence"), b"older is gone"))
    bench.open("same-name")
    bench.until(lambda: bool(older.disconnections))
    assert "name" in older.disconnections[0].reason
    # The older one's will comes although its name is in use: presence counts sessions for this.
    bench.until(lambda: bool(watcher.received))
    older.link.kill()


def test_link_connects_anew_when_it_is_told_to(own_bench: Bench) -> None:
    bench = own_bench
    watcher = bench.open()
    bench.listen(watcher, bench.topic("presence"))
    peer = bench.open("renewed", will=Will(bench.topic("presence"), b"first"))
    bench.listen(peer, bench.topic("t"))
    peer.link.reconnect(Will(bench.topic("presence"), b"second"))
    bench.until(lambda: len(peer.connections) == 2)
    assert peer.connections[-1] == Connected(first=False)
    # It did not say goodbye.
    bench.until(lambda: watcher.payloads(bench.topic("presence")) == [b"first"])
    peer.link.publish(bench.topic("t"), b"still here")
    bench.until(lambda: peer.payloads(bench.topic("t")) == [b"still here"])
    bench.until(peer.link.acknowledged)
    peer.link.kill()
    bench.until(lambda: b"second" in watcher.payloads(bench.topic("presence")))
