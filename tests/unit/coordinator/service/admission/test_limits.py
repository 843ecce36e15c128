"""How often and how much: token buckets, and the queue in front of the coordinator's loop."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.service.admission.callers import Callers
from coordinator.service.admission.inbox import (
    MAX_MESSAGE_BYTES,
    MAX_WAITING,
    OVERHEAD_BYTES,
    Inbox,
    Letter,
)
from coordinator.service.admission.limits import CONTROL, OFFER, PRESENCE, STRANGERS, Buckets, Rate
from edge_sdk.protocol.chunks import MAX_CHUNK_BYTES
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.topics import Topics, parse_topic
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent, Received
from tests.unit.coordinator.service.service_world import Clock
from tests.waiting import HANGS_S

TOPICS = Topics("task")


# -- buckets -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    steps=st.lists(st.floats(0, 5), max_size=60),
    per_s=st.sampled_from([0.5, 1.0, 3.0]),
    burst=st.sampled_from([1.0, 4.0, 10.0]),
)
def test_bucket_grants_at_most_burst_and_rate_in_every_window(
    steps: list[float], per_s: float, burst: float
) -> None:
    buckets, now, granted = Buckets(Rate(per_s, burst), 5), 0.0, []
    for step in steps:
        now += step
        if buckets.take("a", now):
            granted.append(now)
    for first, start in enumerate(granted):
        for number, end in enumerate(granted[first:], 1):
            assert number <= burst + per_s * (end - start) + 1e-9


def test_bucket_is_each_devices_own_and_fills_again() -> None:
    buckets = Buckets(Rate(1.0, 2.0), 5)
    assert [buckets.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert buckets.take("b", 0.0)
    assert not buckets.take("a", 0.5)
    assert buckets.take("a", 1.0)
    assert not buckets.take("a", 0.0)  # a clock that goes back gives nothing


def test_buckets_of_made_up_names_take_no_room() -> None:
    buckets = Buckets(Rate(1.0, 1.0), 3)
    for number in range(1000):
        assert buckets.take(f"name{number}", 0.0)
    assert len(buckets) == 3
    assert not buckets.take("name999", 0.0)


# -- the queue -----------------------------------------------------------------------------------


def make(device_bytes: int = 10_000, **limits: int) -> tuple[Inbox, Clock]:
    clock = Clock()
    inbox = Inbox(clock=clock, max_devices=100, device_bytes=device_bytes, **limits)
    inbox.known |= {"a", "b", "good", "evil", *(f"name{number}" for number in range(1000))}
    return inbox, clock


BID, PRESENT = b"\xa4type\xa3bid", b"\xa4type\xa8presence"
"""Parts of messages: what the queue looks at."""


def control(device: str, size: int = 10) -> Received:
    return Received(TOPICS.up_control(device), BID.ljust(size, b"\0"), False)


def chunk(device: str, size: int = 1000) -> Received:
    return Received(TOPICS.up_chunk(device), bytes(size), False)


def letter(received: Received) -> Letter:
    return Letter(parse_topic(received.topic), received.payload)


def drain(inbox: Inbox) -> list[LinkEvent | Letter]:
    events = []
    while (event := inbox.get()) is not None:
        events.append(event)
    return events


def test_senders_take_turns_and_each_ones_messages_keep_their_order() -> None:
    inbox, _ = make()
    for event in (control("a", 11), chunk("a"), control("a", 12), control("b", 13), chunk("b")):
        inbox.put(event)
    inbox.put(Disconnected("gone"))
    inbox.put(Connected(first=False))
    assert drain(inbox) == [
        Disconnected("gone"),
        Connected(first=False),
        letter(control("a", 11)),
        letter(control("b", 13)),
        letter(chunk("a")),
        letter(chunk("b")),
        letter(control("a", 12)),
    ]
    assert inbox.get(0.001) is None
    assert inbox.take_dropped() == {}


def test_strangers_share_one_turn_and_keep_their_order_when_they_are_admitted() -> None:
    inbox, _ = make()
    inbox.put(control("new", 11))
    for number in range(50):
        inbox.put(control(f"stranger{number}"))
    inbox.known.add("new")
    inbox.put(control("new", 12))
    inbox.put(control("a", 13))
    inbox.put(control("a", 14))
    came = drain(inbox)
    assert came.index(letter(control("a", 14))) == 3  # two strangers' came before it
    assert came.index(letter(control("new", 11))) < came.index(letter(control("new", 12)))


def test_garbage_under_a_devices_name_costs_the_device_nothing() -> None:
    inbox, _ = make()
    inbox.expects = lambda device, payload: payload.startswith(b"asked")
    asked = Received(TOPICS.up_chunk("good"), b"asked for", False)
    for number in range(10_000):
        noise = number.to_bytes(4, "big") * 20
        inbox.put(Received(TOPICS.up_control("good"), noise, False))
        inbox.put(Received(TOPICS.presence("good"), noise, False))
        inbox.put(Received(TOPICS.up_chunk("good"), noise, False))
    inbox.put(control("good"))
    inbox.put(Received(TOPICS.presence("good"), PRESENT, False))
    inbox.put(asked)
    assert [each.payload for each in drain(inbox) if isinstance(each, Letter)] == [
        control("good").payload,
        PRESENT,
        asked.payload,
    ]
    assert "access rules" in inbox.take_dropped()["good"]


def test_garbage_of_strangers_does_not_use_up_what_strangers_may_send() -> None:
    inbox, _ = make()
    for number in range(10_000):
        inbox.put(Received(TOPICS.up_control(f"stranger{number}"), bytes(50), False))
    inbox.put(control("newcomer"))
    assert drain(inbox) == [letter(control("newcomer"))]


def test_flood_of_one_device_leaves_room_for_the_others() -> None:
    inbox, clock = make()
    for _ in range(10_000):
        inbox.put(control("evil"))
        inbox.put(chunk("evil"))
    inbox.put(control("good"))
    inbox.put(chunk("good"))
    came = drain(inbox)
    assert came.count(letter(control("evil"))) == MAX_WAITING
    assert came.count(letter(chunk("evil"))) == 10_000 // (1000 + OVERHEAD_BYTES)
    assert came.index(letter(chunk("good"))) == 3  # it waited for as many as came before its own
    assert inbox.take_dropped().keys() == {"evil"}
    assert inbox.take_dropped() == {}
    # However fast the loop is, only so many come through: the burst, then the rate.
    number = MAX_WAITING
    for _ in range(10_000):
        inbox.put(control("evil"))
        number += len(drain(inbox))
    assert number == CONTROL.burst
    clock.now += 4
    for _ in range(10_000):
        inbox.put(control("evil"))
        number += len(drain(inbox))
    assert number == CONTROL.burst + 4 * CONTROL.per_s


def test_presence_that_flaps_is_heard_now_and_then() -> None:
    inbox, clock = make()
    number = 0
    for _ in range(1000):
        inbox.put(Received(TOPICS.presence("a"), PRESENT, False))
        number += len(drain(inbox))
    assert number == PRESENCE.burst
    clock.now += 20
    inbox.put(Received(TOPICS.presence("a"), PRESENT, False))
    assert len(drain(inbox)) == 1


def test_message_that_is_too_large_is_not_queued() -> None:
    inbox, _ = make(device_bytes=2**24)
    inbox.put(control("a", MAX_MESSAGE_BYTES + 1))
    inbox.put(chunk("b", MAX_CHUNK_BYTES + 21))
    inbox.put(Received(f"{TOPICS.up_control('a')[:-9]}X/control", b"x", False))
    inbox.put(Received("something/else", b"x", False))
    assert drain(inbox) == []
    assert set(inbox.take_dropped()) == {"a", "b"}
    inbox.put(control("a", MAX_MESSAGE_BYTES))
    inbox.put(chunk("b", MAX_CHUNK_BYTES + 20))
    assert len(drain(inbox)) == 2


def test_single_chunk_always_fits() -> None:
    inbox, _ = make(device_bytes=100)
    inbox.put(chunk("a"))
    inbox.put(chunk("a"))
    assert len(drain(inbox)) == 1


def test_all_devices_together_are_limited() -> None:
    inbox, _ = make(chunks_bytes=50_000, controls_bytes=50_000)
    for number in range(1000):
        inbox.put(chunk(f"name{number}"))
        inbox.put(control(f"name{number}"))
    inbox.put(Disconnected("still heard"))
    came = drain(inbox)
    assert came[0] == Disconnected("still heard")
    assert sum(isinstance(each, Letter) and len(each.payload) == 1000 for each in came) <= 33
    assert len(came) <= 33 + 96 + 1
    inbox.put(chunk("good"))  # all that was counted is gone again
    assert drain(inbox) == [letter(chunk("good"))]


def test_strangers_share_what_there_is_for_them() -> None:
    inbox, clock = make()
    number = 0
    for each in range(10_000):
        inbox.put(control(f"stranger{each}"))
        inbox.put(chunk(f"stranger{each}"))
        number += len(drain(inbox))
    assert number == STRANGERS.burst + 200
    inbox.put(control("good"))
    assert drain(inbox) == [letter(control("good"))]
    clock.now += 1
    inbox.put(control("stranger"))
    assert drain(inbox) == [letter(control("stranger"))]
    inbox.full = True
    inbox.put(control("stranger"))
    inbox.put(control("good"))
    assert drain(inbox) == [letter(control("good"))]
    assert inbox.take_dropped() == {}


def test_chunks_of_a_muted_device_are_dropped_for_a_while() -> None:
    inbox, clock = make()
    inbox.mute("a", 10.0)
    inbox.put(chunk("a"))
    inbox.put(control("a"))
    inbox.put(chunk("b"))
    assert drain(inbox) == [letter(control("a")), letter(chunk("b"))]
    clock.now += 10
    inbox.put(chunk("a"))
    assert drain(inbox) == [letter(chunk("a"))]


def test_put_wakes_who_waits() -> None:
    inbox, _ = make()
    got: list[LinkEvent | Letter | None] = []
    thread = threading.Thread(target=lambda: got.append(inbox.get(HANGS_S)))
    thread.start()
    inbox.put(control("a"))
    thread.join(HANGS_S)
    assert got == [letter(control("a"))]


# -- offers --------------------------------------------------------------------------------------


def test_offers_for_new_rounds_are_welcome_however_short_rounds_are() -> None:
    inbox, clock = make()
    callers = Callers(inbox, clock=clock, max_devices=100)
    for round in range(10 * int(OFFER.burst)):  # all at one moment
        callers.check_offer("good", round)


def test_further_offers_for_a_round_are_limited() -> None:
    inbox, clock = make()
    callers = Callers(inbox, clock=clock, max_devices=100)
    callers.check_offer("evil", 9)
    for number in range(int(OFFER.burst)):
        callers.check_offer("evil", number % 10)
    with pytest.raises(MessageError, match="too many offers"):
        callers.check_offer("evil", 9)
    callers.check_offer("good", 9)
