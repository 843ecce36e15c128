"""The in-memory link delivers in order, to the right endpoint, only when asked."""

from __future__ import annotations

from typing import Any

import pytest

from edge_sdk.protocol.errors import StateError
from edge_sdk.transport.queue import MemoryLink


def drain(link: MemoryLink[Any]) -> None:
    while not link.empty:
        for deliver in link.take(alone="coordinator"):
            deliver()


def test_messages_arrive_in_the_order_sent_and_only_on_delivery() -> None:
    link: MemoryLink[str] = MemoryLink()
    got: list[tuple[str, str]] = []
    for name in ("a", "b", "c"):
        link.attach(name, lambda message, name=name: got.append((name, message)))  # type: ignore[misc]
    link.send("b", "one")
    link.broadcast("a", "two")
    link.send("nobody", "lost")
    assert got == []
    drain(link)
    assert got == [("b", "one"), ("b", "two"), ("c", "two")]


def test_answers_are_delivered_after_what_was_queued_before() -> None:
    link: MemoryLink[int] = MemoryLink()
    got: list[int] = []

    def receive(message: int) -> None:
        got.append(message)
        if message == 1:
            link.send("a", 3)

    link.attach("a", receive)
    link.send("a", 1)
    link.send("a", 2)
    drain(link)
    assert got == [1, 2, 3]


def test_second_endpoint_of_one_name_is_refused() -> None:
    link: MemoryLink[int] = MemoryLink()
    link.attach("a", lambda _: None)
    with pytest.raises(StateError, match="'a'"):
        link.attach("a", lambda _: None)


def test_deliveries_that_may_happen_together_are_for_different_endpoints() -> None:
    link: MemoryLink[int] = MemoryLink()
    got: list[tuple[str, int]] = []
    for name in ("a", "b", "coordinator"):
        link.attach(name, lambda message, name=name: got.append((name, message)))  # type: ignore[misc]
    for to, message in [("a", 1), ("b", 2), ("a", 3), ("coordinator", 4), ("b", 5)]:
        link.send(to, message)
    sizes = []
    while not link.empty:
        together = link.take(alone="coordinator")
        sizes.append(len(together))
        for deliver in reversed(together):
            deliver()
    assert sizes == [2, 1, 1, 1]
    assert got == [("b", 2), ("a", 1), ("a", 3), ("coordinator", 4), ("b", 5)]
