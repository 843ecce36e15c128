"""Events in virtual time: a heap of messages by time of arrival."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")


class Happening(NamedTuple, Generic[M]):
    """A message that reaches an endpoint at a given time."""

    time_s: float
    to: str
    message: M


class Timeline(Generic[M]):
    """Future events, earliest first, and in order of insertion at equal times.

    Time advances only through `take`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening[M]]] = []
        self._numbers = count()

    def add(self, time_s: float, to: str, message: M) -> None:
        """Schedule a message for an endpoint."""
        heappush(self._heap, (time_s, next(self._numbers), Happening(time_s, to, message)))

    @property
    def next_s(self) -> float | None:
        """Time of the next event; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def take(self, *, alone: str, until_s: float = inf) -> list[Happening[M]]:
        """Take the earliest events that may be processed together, none of them after `until_s`.

        They all go to different endpoints; an event for `alone` is returned by itself.
        """
        taken: dict[str, Happening[M]] = {}
        while self._heap and self._heap[0][0] <= until_s:
            to = self._heap[0][2].to
            if to in taken or (to == alone and taken):
                break
            taken[to] = heappop(self._heap)[2]
            if to == alone:
                break
        return list(taken.values())
