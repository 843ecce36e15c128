"""The queue of a connection: bounded, in order, and rid of what a broker will never take."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.transport.outbox import OVERHEAD_BYTES, TRIES, WINDOW, Outbox, Publication


def message(number: int, size: int = 100) -> Publication:
    return Publication(f"t/{number}", bytes(size), False)


class Wire:
    """A broker as the outbox sees it: ids in the order they were sent."""

    def __init__(self, outbox: Outbox) -> None:
        self.outbox = outbox
        self.ids = 0
        self.under_way: deque[tuple[int, Publication]] = deque()

    def send(self) -> list[Publication]:
        sent = []
        while (one := self.outbox.next()) is not None:
            self.ids += 1
            self.outbox.sent(self.ids)
            self.under_way.append((self.ids, one))
            sent.append(one)
        return sent

    def acknowledge(self) -> Publication:
        id, one = self.under_way.popleft()
        self.outbox.acknowledged(id)
        return one

    def lose(self, *, closed: bool) -> Publication | None:
        self.under_way.clear()
        return self.outbox.lost(closed=closed)


def test_outbox_sends_a_window_and_no_more() -> None:
    outbox = Outbox(1 << 20)
    wire = Wire(outbox)
    for number in range(WINDOW + 5):
        assert outbox.offer(message(number))
    assert [one.topic for one in wire.send()] == [f"t/{number}" for number in range(WINDOW)]
    wire.acknowledge()
    assert [one.topic for one in wire.send()] == [f"t/{WINDOW}"]


def test_outbox_counts_empty_messages() -> None:
    outbox = Outbox(10 * OVERHEAD_BYTES)
    assert [outbox.offer(message(n, size=0)) for n in range(11)] == [True] * 10 + [False]


def test_outbox_takes_one_message_of_any_size() -> None:
    outbox = Outbox(1_000)
    assert outbox.offer(message(0, size=5_000))
    assert not outbox.offer(message(1, size=0))


def test_room_is_told_once_and_only_to_who_was_turned_away() -> None:
    outbox = Outbox(4 * (100 + OVERHEAD_BYTES))
    wire = Wire(outbox)
    for number in range(4):
        outbox.offer(message(number))
    wire.send()
    wire.acknowledge()
    assert not outbox.take_room()
    assert outbox.offer(message(4))
    assert not outbox.offer(message(5))
    wire.acknowledge()
    assert not outbox.take_room()
    wire.acknowledge()
    assert outbox.take_room()
    assert not outbox.take_room()


@given(st.lists(st.sampled_from(["offer", "send", "ack", "network", "closed"]), max_size=200))
def test_outbox_loses_nothing_while_the_broker_takes_everything(events: list[str]) -> None:
    """Any history in which an acknowledgement comes before a second loss."""
    limit = 30 * (100 + OVERHEAD_BYTES)
    outbox = Outbox(limit)
    wire = Wire(outbox)
    offered: list[Publication] = []
    arrived: list[Publication] = []
    for event in events:
        if event == "offer":
            one = message(len(offered))
            if outbox.offer(one):
                offered.append(one)
        elif event == "send":
            wire.send()
        elif event == "ack" and wire.under_way:
            arrived.append(wire.acknowledge())
        elif event == "network":
            assert wire.lose(closed=False) is None
        elif event == "closed" and wire.under_way:
            arrived.append(wire.acknowledge())
            assert wire.lose(closed=True) is None
        assert len(offered) - len(arrived) <= 30
        assert outbox.empty == (len(offered) == len(arrived))
    while wire.send() or wire.under_way:
        arrived.append(wire.acknowledge())
    assert arrived == offered


def test_message_that_ends_every_connection_is_given_up_alone() -> None:
    """A broker that closes at one message, and whose acknowledgements are lost with the close."""
    outbox = Outbox(1 << 20)
    wire = Wire(outbox)
    poison = message(7)
    for number in range(12):
        outbox.offer(message(number))
    arrived: list[Publication] = []
    given_up: list[Publication] = []
    for _ in range(40):
        sent = wire.send()
        if poison in sent:
            if len(sent) == 1 and wire.under_way[0][1] != poison:
                arrived.append(wire.acknowledge())
            lost = wire.lose(closed=True)
            if lost is not None:
                given_up.append(lost)
        elif wire.under_way:
            arrived.append(wire.acknowledge())
    assert given_up == [poison]
    assert {one.topic for one in arrived} == {f"t/{n}" for n in range(12) if n != 7}
    assert outbox.empty


def test_silent_network_never_costs_a_message() -> None:
    outbox = Outbox(1 << 20)
    wire = Wire(outbox)
    outbox.offer(message(0))
    for _ in range(3 * TRIES):
        assert len(wire.send()) == 1
        assert wire.lose(closed=False) is None
