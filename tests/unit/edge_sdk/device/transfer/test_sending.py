"""Uploads are offered until their receipt, and wait for room on the link."""

from __future__ import annotations

import logging

import pytest

from edge_sdk.device.transfer.sending import Sending
from edge_sdk.protocol.messages.round import Outcome, Receipt
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Credit, Offer
from edge_sdk.protocol.messages.wire import decode_message
from edge_sdk.transport.link import Will
from edge_sdk.transport.uploads import RETRY_S, Outgoing, parse_chunk

RUN = "0123456789abcdef"
TOPICS = Topics("toy")


class Wire:
    """A link that remembers, and has room for so many chunks."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.arrived = False
        self.offers: list[Offer] = []
        self.chunks: list[int] = []

    def publish(
        self, topic: str, payload: bytes, *, retain: bool = False, bulk: bool = False
    ) -> bool:
        if not bulk:
            assert topic == TOPICS.up_control("pi")
            offer = decode_message(payload)
            assert isinstance(offer, Offer)
            self.offers.append(offer)
            return True
        assert topic == TOPICS.up_chunk("pi")
        if not self.room:
            return False
        self.room -= 1
        self.chunks.append(parse_chunk(payload)[1])
        return True

    def subscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        raise AssertionError

    def unsubscribe(self, topic_filter: str, *, bulk: bool = False) -> None:
        raise AssertionError

    def acknowledged(self, *, bulk: bool = False) -> bool:
        return self.arrived

    def silence_s(self, *, bulk: bool = False) -> float:
        return float("inf")

    def reconnect(self, will: Will | None = None) -> None:
        raise AssertionError

    def close(self, *, flush: bool = True) -> None:
        raise AssertionError

    def kill(self) -> None:
        raise AssertionError


def upload(round: int = 1, answers: int | None = None, size: int = 5000) -> Outgoing:
    return Outgoing(
        bytes(size), device="pi", run=RUN, round=round, answers=answers, chunk_bytes=1024
    )


def credit(of: Outgoing, first: int, behind: int, window: int = 8) -> Credit:
    return Credit(device="pi", upload=of.offer.upload, missing=((first, behind),), window=window)


def receipt(round: int, run: str = RUN) -> Receipt:
    return Receipt(device="pi", round=round, outcome=Outcome.COUNTED, run=run)


def test_upload_is_offered_until_its_receipt() -> None:
    wire = Wire()
    sending, mine = Sending(wire, TOPICS, "pi"), upload()
    sending.add(mine, 0.0)
    assert sending.due_s == RETRY_S
    sending.offer_due(RETRY_S - 1)
    assert wire.offers == [mine.offer]
    sending.offer_due(RETRY_S)
    assert wire.offers == [mine.offer] * 2
    sending.receipted(receipt(2))
    sending.receipted(receipt(1, run="f" * 16))
    assert sending.movements == 1
    sending.receipted(receipt(1))
    assert sending.movements == 0
    sending.offer_all(1000.0)
    assert len(wire.offers) == 2


def test_chunks_wait_for_room_on_the_link() -> None:
    wire = Wire(room=2)
    sending, mine = Sending(wire, TOPICS, "pi"), upload()
    sending.add(mine, 0.0)
    assert sending.credited(credit(mine, 0, 5), 0.0) is None
    assert wire.chunks == [0, 1]
    wire.room = 10
    sending.flush()
    assert wire.chunks == [0, 1, 2, 3, 4]


def test_reconnect_sends_what_is_missing_and_not_what_was_waiting() -> None:
    wire = Wire(room=2)
    sending, mine = Sending(wire, TOPICS, "pi"), upload()
    sending.add(mine, 0.0)
    sending.credited(credit(mine, 0, 5), 0.0)
    wire.room = 10
    sending.offer_all(1.0)
    sending.flush()
    assert wire.chunks == [0, 1]
    sending.credited(credit(mine, 1, 5), 1.0)
    assert wire.chunks == [0, 1, 1, 2, 3, 4]


def test_replay_ends_with_the_receipt_of_the_round_it_answers_or_the_next_round() -> None:
    wire = Wire()
    sending = Sending(wire, TOPICS, "pi")
    sending.add(upload(2, answers=4), 0.0)
    assert sending.movements == 0
    sending.receipted(receipt(2))
    sending.drop_replays(4)
    sending.offer_all(1.0)
    assert len(wire.offers) == 2
    sending.receipted(receipt(4))
    sending.offer_all(2.0)
    assert len(wire.offers) == 2
    sending.add(upload(2, answers=5), 3.0)
    sending.drop_replays(6)
    sending.offer_all(4.0)
    assert len(wire.offers) == 3


def test_refused_movement_is_as_good_as_receipted() -> None:
    sending, mine = Sending(Wire(), TOPICS, "pi"), upload()
    sending.add(mine, 0.0)
    no = Credit(
        device="pi", upload=mine.offer.upload, missing=(), window=0, refused=True, reason="too big"
    )
    assert sending.credited(no, 0.0) == Receipt(
        device="pi", round=1, outcome=Outcome.REJECTED, reason="too big", run=RUN
    )
    assert sending.movements == 0
    assert sending.credited(no, 0.0) is None


def test_upload_for_the_same_purpose_takes_the_place_of_the_old_one() -> None:
    sending = Sending(Wire(), TOPICS, "pi")
    sending.add(upload(1), 0.0)
    sending.add(upload(1, size=6000), 0.0)
    sending.add(upload(2), 0.0)
    assert sending.movements == 2
    sending.clear()
    assert sending.movements == 0


def test_chunks_that_reached_the_broker_and_nobody_else_are_sent_again() -> None:
    wire = Wire()
    sending, first = Sending(wire, TOPICS, "pi"), upload()
    sending.add(first, 0.0)
    sending.credited(credit(first, 0, 5), 1.0)
    assert wire.chunks == [0, 1, 2, 3, 4]
    # They may still be on a slow way to the broker.
    sending.offer_due(1.0 + RETRY_S)
    sending.credited(credit(first, 1, 5), 2.0 + RETRY_S)
    assert wire.chunks == [0, 1, 2, 3, 4]
    wire.arrived = True
    sending.offer_due(2.0 + 2 * RETRY_S)
    sending.credited(credit(first, 1, 5), 3.0 + 2 * RETRY_S)
    assert wire.chunks == [0, 1, 2, 3, 4, 1, 2, 3, 4]


def test_upload_that_is_added_again_goes_on_where_it_is() -> None:
    wire = Wire()
    sending, first = Sending(wire, TOPICS, "pi"), upload()
    sending.add(first, 0.0)
    sending.credited(credit(first, 0, 5), 1.0)
    sending.add(upload(), 2.0)
    sending.credited(credit(first, 0, 5), 3.0)
    assert (len(wire.offers), wire.chunks) == (1, [0, 1, 2, 3, 4])


def test_resumed_upload_says_what_had_arrived(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sending, first = Sending(Wire(), TOPICS, "pi"), upload()
    sending.add(first, 0.0)
    sending.credited(credit(first, 2, 5), 1.0)
    assert "2 of 5 chunks of the upload had arrived" in caplog.text
