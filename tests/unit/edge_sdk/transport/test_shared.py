"""One link for several users: who hears what, and when it opens, reconnects and closes."""

from __future__ import annotations

import pytest

from edge_sdk.transport.counted import CountedLink
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent, Received, Refused, Will
from edge_sdk.transport.settings import LinkError
from edge_sdk.transport.shared import LinkPort, SharedLink
from tests.memory_broker import BrokeredLink, MemoryBroker


class Peers:
    def __init__(self) -> None:
        self.broker = MemoryBroker(max_payload=100)
        self.opened: list[BrokeredLink] = []
        """Links that were opened, the last one the newest."""
        self.shared = SharedLink(self._open)
        self.events: dict[str, list[LinkEvent]] = {}

    def _open(self, **options: object) -> BrokeredLink:
        self.opened.append(self.broker.open_link(**options))  # type: ignore[arg-type]
        return self.opened[-1]

    def open(self, task: str, will: Will | None = None) -> LinkPort:
        events = self.events.setdefault(task, [])
        return self.shared.open_link(name="pi", deliver=events.append, will=will)

    def is_closed(self) -> bool:
        return self.opened[-1].closed

    def topics(self, task: str) -> list[str]:
        return [each.topic for each in self.events[task] if isinstance(each, Received)]


@pytest.fixture
def peers() -> Peers:
    return Peers()


def test_messages_go_to_the_port_that_subscribed(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    a.subscribe("t/a/#")
    b.subscribe("t/b/+", bulk=True)
    b.subscribe("t/a/public")
    peers.broker.run()
    a.publish("t/b/one", b"1", bulk=True)
    b.publish("t/a/two", b"2")
    b.publish("t/a/public", b"3")
    peers.broker.run()
    assert len(peers.opened) == 1
    assert set(peers.topics("a")) == {"t/a/two", "t/a/public"}
    assert set(peers.topics("b")) == {"t/b/one", "t/a/public"}


def test_filter_of_two_ports_stays_until_both_leave_it(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    for port in (a, b, b):
        port.subscribe("t/+")
    a.unsubscribe("t/+")
    a.unsubscribe("t/+")
    peers.broker.run()
    a.publish("t/x", b"1")
    peers.broker.run()
    assert (peers.topics("a"), peers.topics("b")) == ([], ["t/x"])
    b.unsubscribe("t/+")
    peers.broker.run()
    assert peers.opened[0].wanted == {}


def test_port_that_opens_later_is_told_that_the_link_works(peers: Peers) -> None:
    peers.open("a")
    peers.broker.run()
    peers.open("b")
    assert peers.events["a"] == peers.events["b"] == [Connected(first=True)]
    peers.broker.cut(peers.opened[0])
    peers.broker.restore(peers.opened[0])
    peers.broker.run()
    for task in ("a", "b"):
        assert isinstance(peers.events[task][1], Disconnected)
        assert peers.events[task][2:] == [Connected(first=False)]


def test_link_closes_with_its_last_port_and_opens_again(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    a.subscribe("t/a")
    peers.broker.run()
    a.close()
    a.close()
    assert not a.publish("t/b", b"after the end")
    assert not peers.is_closed()
    peers.broker.run()
    assert peers.opened[0].wanted == {}
    b.close()
    assert peers.is_closed()
    peers.open("c")
    peers.broker.run()
    assert len(peers.opened) == 2
    assert peers.events["c"] == [Connected(first=True)]


def test_goodbye_of_one_port_reaches_the_broker_while_others_go_on(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    b.subscribe("t/presence")
    peers.broker.run()
    a.publish("t/presence", b"gone", retain=True)
    a.close()
    peers.broker.run()
    assert peers.topics("b") == ["t/presence"]


def test_will_is_that_of_the_first_port(peers: Peers) -> None:
    a = peers.open("a", Will("t/a", b"a vanished"))
    b = peers.open("b", Will("t/b", b"b vanished"))
    peers.broker.run()
    b.reconnect(Will("t/b", b"b vanished again"))
    peers.broker.run()
    a.reconnect(Will("t/a", b"a vanished again"))
    peers.broker.run()
    peers.broker.cut(peers.opened[0])
    peers.broker.run()
    assert dict(peers.broker.retained) == {"t/a": b"a vanished again"}


def test_refusal_is_told_to_the_port_whose_message_it_was(peers: Peers) -> None:
    a, b = peers.open("a"), peers.open("b")
    peers.broker.run()
    b.publish("t/b", bytes(101))
    peers.broker.run()
    assert [type(each) for each in peers.events["b"][1:]] == [Refused]
    assert peers.events["a"][1:] == []
    a.close()


def test_deliver_that_fails_keeps_nothing_from_others(
    peers: Peers, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: LinkEvent) -> None:
        raise ValueError("broken")

    peers.shared.open_link(name="pi", deliver=fail)
    peers.open("b")
    peers.broker.run()
    assert peers.events["b"] == [Connected(first=True)]
    assert "deliver failed" in caplog.text


def test_link_that_cannot_open_leaves_no_port_behind() -> None:
    def refuse(**_: object) -> BrokeredLink:
        raise LinkError("ca: there is no such file")

    shared = SharedLink(refuse)
    for _ in range(2):
        with pytest.raises(LinkError):
            shared.open_link(name="pi", deliver=lambda _: None)


def test_counted_link_counts_what_it_was_given(peers: Peers) -> None:
    sizes: list[int] = []
    link = CountedLink(peers.open("a"), sizes.append)
    link.subscribe("t/a")
    peers.broker.run()
    assert link.publish("t/a", b"12345")
    peers.broker.run()
    assert (sizes, peers.topics("a")) == ([8], ["t/a"])
    link.close()
    assert not link.publish("t/a", b"1")
    assert sizes == [8]
