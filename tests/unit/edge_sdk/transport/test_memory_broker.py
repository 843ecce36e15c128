"""The broker in memory: faults on demand, and the same history every time."""

from __future__ import annotations

import pytest

from edge_sdk.protocol.errors import StateError
from edge_sdk.transport.link import (
    Connected,
    Disconnected,
    LinkEvent,
    Received,
    Refused,
    Will,
    Writable,
)
from edge_sdk.transport.probe import BrokerFacts, probe_links
from tests.memory_broker import MemoryBroker


class Peer:
    def __init__(self, broker: MemoryBroker, name: str, will: Will | None = None) -> None:
        self.events: list[LinkEvent] = []
        self.link = broker.open_link(name=name, deliver=self.events.append, will=will)

    @property
    def payloads(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, Received)]


def pair(broker: MemoryBroker) -> tuple[Peer, Peer]:
    sender, receiver = Peer(broker, "sender"), Peer(broker, "receiver")
    receiver.link.subscribe("t")
    broker.run()
    return sender, receiver


def test_nothing_happens_without_a_step() -> None:
    broker = MemoryBroker()
    peer = Peer(broker, "x")
    assert peer.events == []
    assert broker.step()
    assert peer.events == [Connected(first=True)]


def test_tamper_loses_duplicates_and_delays() -> None:
    broker = MemoryBroker()
    sender, receiver = pair(broker)
    fate = {b"lost": [], b"twice": [0, 0], b"late": [50]}
    asked: list[str] = []

    def tamper(name: str, event: Received) -> list[int]:
        asked.append(name)
        return fate.get(event.payload, [0])

    broker.tamper = tamper
    for payload in (b"late", b"lost", b"twice", b"plain"):
        sender.link.publish("t", payload)
    broker.run()
    assert receiver.payloads == [b"twice", b"twice", b"plain", b"late"]
    assert asked == ["receiver"] * 4


def test_cut_link_loses_what_was_under_way_and_keeps_what_it_had_to_send() -> None:
    broker = MemoryBroker()
    sender, receiver = pair(broker)
    sender.link.publish("t", b"missed")
    assert broker.step()
    broker.cut(receiver.link, "out of range")
    receiver.link.publish("t", b"own")
    broker.run()
    assert receiver.events[-1] == Disconnected("out of range")
    broker.restore(receiver.link)
    broker.run()
    assert receiver.events[2:] == [Connected(first=False), Received("t", b"own", False)]


def test_cut_link_leaves_its_will_and_finds_what_is_retained_on_return() -> None:
    broker = MemoryBroker()
    watcher = Peer(broker, "watcher")
    watcher.link.subscribe("presence/+")
    victim = Peer(broker, "victim", Will("presence/victim", b"gone"))
    victim.link.subscribe("round")
    broker.run()
    broker.cut(victim.link)
    watcher.link.publish("round", b"7", retain=True)
    broker.run()
    assert watcher.payloads == [b"gone"]
    assert dict(broker.retained) == {"presence/victim": b"gone", "round": b"7"}
    broker.restore(victim.link)
    broker.run()
    assert victim.events[-1] == Received("round", b"7", True)


@pytest.mark.parametrize("keep", [True, False])
def test_restart_keeps_or_loses_what_was_retained_and_sends_no_wills(keep: bool) -> None:
    broker = MemoryBroker()
    peer = Peer(broker, "x", Will("will", b"gone"))
    peer.link.publish("kept", b"1", retain=True)
    broker.run()
    broker.stop()
    broker.run()
    assert "will" not in broker.retained
    broker.start(keep_retained=keep)
    broker.run()
    assert dict(broker.retained) == ({"kept": b"1"} if keep else {})
    assert [type(event) for event in peer.events] == [Connected, Disconnected, Connected]


def test_link_opened_while_the_broker_is_down_says_so() -> None:
    broker = MemoryBroker()
    broker.stop()
    peer = Peer(broker, "x")
    broker.run()
    assert peer.events == [Disconnected("the broker is not running")]
    broker.start()
    broker.run()
    assert peer.events[-1] == Connected(first=True)


def test_second_link_of_a_name_ends_the_first() -> None:
    broker = MemoryBroker()
    first = Peer(broker, "same", Will("will", b"gone"))
    broker.run()
    second = Peer(broker, "same")
    broker.run()
    assert isinstance(first.events[-1], Disconnected)
    assert second.events == [Connected(first=True)]
    assert broker.retained["will"] == b"gone"


def test_message_over_the_limit_is_refused_to_its_sender_alone() -> None:
    broker = MemoryBroker(max_payload=10)
    sender, receiver = pair(broker)
    sender.link.publish("t", bytes(11))
    sender.link.publish("t", bytes(10))
    broker.run()
    assert receiver.payloads == [bytes(10)]
    assert [event.topic for event in sender.events if isinstance(event, Refused)] == ["t"]


def test_bulk_waits_for_steps_and_room_is_told() -> None:
    broker = MemoryBroker()
    sender, receiver = Peer(broker, "sender"), Peer(broker, "receiver")
    receiver.link.subscribe("t", bulk=True)
    broker.run()
    accepted = 0
    while sender.link.publish("t", bytes(262_144), bulk=True):
        accepted += 1
    broker.run()
    assert accepted == 15
    assert len(receiver.payloads) == accepted
    assert sender.events[-1] == Writable(bulk=True)


def test_closed_link_is_told_nothing_and_takes_nothing() -> None:
    broker = MemoryBroker()
    sender, receiver = pair(broker)
    sender.link.publish("t", b"1")
    sender.link.close()
    receiver.link.close()
    broker.run()
    assert receiver.payloads == []
    assert not receiver.link.publish("t", b"2")
    with pytest.raises(StateError):
        broker.cut(receiver.link)


def test_endless_conversation_is_an_error() -> None:
    broker = MemoryBroker()

    def echo(event: LinkEvent) -> None:
        if isinstance(event, Received):
            link.publish("t", event.payload)

    link = broker.open_link(name="echo", deliver=echo)
    link.subscribe("t")
    link.publish("t", b"again")
    with pytest.raises(StateError, match="still busy after 500 steps"):
        broker.run(500)


def history(seed: int) -> list[LinkEvent]:
    """A conversation with faults; every choice comes from the seed."""
    broker = MemoryBroker()
    state = seed

    def chance(sides: int) -> int:
        nonlocal state
        state = (state * 1_103_515_245 + 12_345) % 2**31
        return (state >> 16) % sides

    broker.tamper = lambda name, event: [chance(5)] * chance(3)
    peers = [Peer(broker, f"peer-{number}") for number in range(3)]
    for peer in peers:
        peer.link.subscribe("#")
    for number in range(60):
        peers[chance(3)].link.publish(f"t/{chance(4)}", bytes([number]), retain=chance(2) == 1)
        for _ in range(chance(6)):
            broker.step()
        if chance(10) == 0:
            victim = peers[chance(3)]
            broker.cut(victim.link)
            broker.restore(victim.link)
    broker.run()
    return [event for peer in peers for event in peer.events]


def test_history_depends_on_the_calls_alone() -> None:
    assert history(1) == history(1)
    assert history(1) != history(2)


def probe(broker: MemoryBroker) -> BrokerFacts:
    def wait(holds: object, most_s: float) -> bool:
        broker.run()
        assert callable(holds)
        return bool(holds())

    return probe_links(broker.open_link, wait, name="probe", chunk_bytes=262_144)


def verdicts(facts: BrokerFacts) -> dict[str, str]:
    return {f.name: f.verdict for f in facts.findings() if f.verdict != "good"}


def test_probe_leaves_nothing_behind() -> None:
    broker = MemoryBroker()
    assert verdicts(probe(broker)) == {}
    assert dict(broker.retained) == {}


def test_probe_finds_the_largest_chunk_that_comes_through() -> None:
    facts = probe(MemoryBroker(max_payload=131_072))
    assert facts.chunk_bytes == 98_304
    assert verdicts(facts) == {"chunk size": "advice"}
    assert facts.retained_chunks
    assert facts.refusal is None


def test_probe_advises_where_chunks_are_not_kept() -> None:
    facts = probe(MemoryBroker(max_retained=65_536))
    assert verdicts(facts) == {"retained chunks": "advice"}
    assert not facts.retained_chunks
    assert facts.refusal is None


def test_probe_advises_where_wildcards_get_nothing() -> None:
    facts = probe(MemoryBroker(wildcard_retained=False))
    assert verdicts(facts) == {"retained messages by wildcard": "advice"}


def test_probe_refuses_a_broker_that_keeps_nothing() -> None:
    facts = probe(MemoryBroker(max_retained=0))
    assert facts.refusal is not None
    assert "no retained messages" in facts.refusal


def test_probe_refuses_a_broker_that_delivers_nothing() -> None:
    broker = MemoryBroker()
    broker.tamper = lambda name, event: []
    facts = probe(broker)
    assert facts.chunk_bytes == 0
    assert facts.refusal is not None
    assert "tessera/v1/#" in facts.refusal


def test_probe_notices_duplicates() -> None:
    broker = MemoryBroker()
    broker.tamper = lambda name, event: [0, 0]
    assert verdicts(probe(broker)) == {"single delivery": "advice"}
