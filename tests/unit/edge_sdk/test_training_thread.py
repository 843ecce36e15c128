"""The inbox of the training thread: in order, but only the newest round."""

from __future__ import annotations

import pytest

from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.messages import Assignment, Outcome, Receipt, RoundOpen
from edge_sdk.training_thread import Inbox, Reconnected

RECEIPT = Receipt(device="pi", round=1, outcome=Outcome.COUNTED)


def opened(round: int) -> RoundOpen:
    return RoundOpen(
        round=round,
        plan_hash="a" * 64,
        rule=LocalRule(learning_rate=0.1),
        steps=1,
        batch_size=1,
        bid_s=1,
        train_s=1,
    )


def drain(inbox: Inbox) -> list[object]:
    orders: list[object] = []
    while (order := inbox.get(0)) is not None:
        orders.append(order)
    return orders


def test_device_that_was_busy_answers_the_newest_round_only() -> None:
    inbox, assignment = Inbox(), Assignment(device="pi", round=1, groups={})
    for order in (opened(1), assignment, opened(2), RECEIPT, opened(3), Reconnected()):
        inbox.put(order)
    assert drain(inbox) == [assignment, RECEIPT, opened(3), Reconnected()]


def test_closed_inbox_has_only_receipts_left() -> None:
    inbox = Inbox()
    for order in (opened(1), RECEIPT, Reconnected()):
        inbox.put(order)
    inbox.close()
    assert inbox.get(None) == RECEIPT
    with pytest.raises(EOFError):
        inbox.get(None)


def test_empty_inbox_answers_after_the_timeout() -> None:
    assert Inbox().get(0.01) is None
