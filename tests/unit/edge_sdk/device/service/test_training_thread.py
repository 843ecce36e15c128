"""The inbox of the training thread: in order, but only the newest round."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_sdk.device.service.training_thread import Order, Orders, Reconnected
from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.messages.round import Assignment, Outcome, Receipt, RoundClosed
from edge_sdk.protocol.messages.transfer import TaskNotice
from tests.messages import make_opening as opened

RUN, OTHER = "a" * 16, "b" * 16
RECEIPT = Receipt(device="pi", round=1, outcome=Outcome.COUNTED)


def drain(inbox: Orders) -> list[object]:
    orders: list[object] = []
    while (order := inbox.get(0)) is not None:
        orders.append(order)
    return orders


def test_device_that_was_busy_answers_the_newest_round_only() -> None:
    inbox, assignment = Orders(), Assignment(device="pi", round=1, groups={})
    for order in (
        opened(1),
        assignment,
        opened(2),
        RECEIPT,
        opened(3),
        Reconnected(),
    ):
        inbox.put(order)
    assert drain(inbox) == [assignment, RECEIPT, opened(3), Reconnected()]


def test_round_that_comes_again_does_not_hide_a_newer_one() -> None:
    inbox = Orders()
    for order in (opened(3), opened(4), opened(2)):
        inbox.put(order)
    assert drain(inbox) == [opened(4), opened(2)]
    inbox.put(opened(1))
    inbox.put(replace(opened(4), run=OTHER))
    assert drain(inbox) == [opened(1), replace(opened(4), run=OTHER)]


def test_closed_inbox_has_only_receipts_left() -> None:
    inbox = Orders()
    for order in (opened(1), RECEIPT, Reconnected()):
        inbox.put(order)
    inbox.close()
    assert inbox.get(None) == RECEIPT
    with pytest.raises(EOFError):
        inbox.get(None)


def test_empty_inbox_answers_after_the_timeout() -> None:
    assert Orders().get(0.01) is None


def notice(run: str) -> TaskNotice:
    nothing = Blob(size=0, chunks=())
    return TaskNotice(
        task="toy", run=run, plan=nothing, manifest=nothing, graphs={}, chunk_bytes=1024
    )


@pytest.mark.parametrize(
    ("order", "overtakes", "replaces"),
    [
        (replace(opened(4), run=RUN), True, False),
        (replace(opened(3), run=RUN), False, False),
        (replace(opened(4), run=OTHER), False, False),
        (RoundClosed(round=3, run=RUN), True, False),
        (RoundClosed(round=2, run=RUN), False, False),
        (notice(OTHER), True, True),
        (notice(RUN), False, False),
        (RECEIPT, False, False),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, bool) else str(value),
)
def test_what_waits_is_seen_while_a_device_is_busy(
    order: Order, overtakes: bool, replaces: bool
) -> None:
    inbox = Orders()
    assert not inbox.overtakes(RUN, 3)
    inbox.put(order)
    assert (inbox.overtakes(RUN, 3), inbox.replaces(RUN)) == (overtakes, replaces)
    assert inbox.get(0) == order
