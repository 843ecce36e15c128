"""Which coordinator of a task is in charge: the one with the largest epoch.

An epoch is a counter and a random instance, compared in this order. A coordinator that starts
takes a counter above all it knows of, claims the task with it (retained on `pub/epoch`), and stamps
it on every message. A coordinator that hears a larger epoch than its own stops; a device obeys the
largest one.

    Claim    a coordinator is in charge from now on; its epoch is the stamp of the message
    Echo     a coordinator hears its own message again, so the broker answers
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.transfer import check_run

MAX_COUNTER = 2**52
"""Largest counter of an epoch; far above any number of starts."""

_INSTANCE = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, order=True)
class Epoch:
    """The time in which one coordinator process is in charge of a task."""

    counter: int
    """From 1, above those of all coordinators before."""
    instance: str
    """16 random hex digits of the process, which decide between equal counters."""

    def __post_init__(self) -> None:
        if not 1 <= self.counter <= MAX_COUNTER:
            raise MessageError(f"an epoch's counter is 1 to 2⁵², not {self.counter}")
        if not _INSTANCE.fullmatch(self.instance):
            raise MessageError(f"an epoch's instance is 16 hex digits, not {self.instance[:80]!r}")

    def __str__(self) -> str:
        return f"{self.counter}-{self.instance[:8]}"


LONGEST = Epoch(MAX_COUNTER, 16 * "f")
"""An epoch that takes as many bytes as any."""


def next_epoch(instance: str, *known: Epoch | None) -> Epoch:
    """Return the smallest epoch of an instance whose counter is above those of known epochs."""
    return Epoch(1 + max((each.counter for each in known if each is not None), default=0), instance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The coordinator whose epoch this message carries is in charge of the task, with this run."""

    run: str

    def __post_init__(self) -> None:
        check_run(self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A message of a coordinator to itself; `number` counts up within an instance."""

    number: int
