"""Events in virtual time: a heap of what happens when, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Happening(Generic[M]):
    """A message that reaches an endpoint at a time."""

    time_s: float
    to: str
    message: M


class Timeline(Generic[M]):
    """Future events, earliest first, and in order of insertion at equal times.

    Nothing happens but through `take`.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Happening[M]]] = []
        self._numbers = count()

    def add(self, time_s: float, to: str, message: M) -> None:
        """Let a message reach an endpoint at a time."""
        heappush(self._heap, (time_s, next(self._numbers), Happening(time_s, to, message)))

    @property
    def next_s(self) -> float | None:
        """When something happens next; None: nothing will."""
        return self._heap[0][0] if self._heap else None

    def take(self, *, alone: str, until_s: float = inf) -> list[Happening[M]]:
        """The earliest happenings that may be dealt with together, none of them after `until_s`.

        They are for endpoints that all differ; one for `alone` comes by itself.
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
