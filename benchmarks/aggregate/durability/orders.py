"""Orders of an operator in the middle of a run, given at the same moments whatever is interrupted.

The operator gives an order once its moment has come. If the coordinator ends before it answers, the
operator looks into the audit whether the order was taken, and else gives it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.errors import CoordinatorError
from coordinator.rounds.synchronous import RoundPhase, RoundsState
from coordinator.run.steering.audit import read_audit
from coordinator.service.service import Service

ANNA = "anna"


@dataclass(frozen=True, slots=True)
class TimedOrder:
    """An order, and the moment for it."""

    what: str
    """Name of its line in the audit."""
    is_time: Callable[[Service], bool]
    give: Callable[[Service], object]
    waits: bool = False
    """True: the moment comes when nobody has anything to do."""


@dataclass(slots=True)
class ScriptedOperator:
    """Gives orders one after the other."""

    script: tuple[TimedOrder, ...]
    taken: int = 0
    """Orders that were answered, or are in the audit."""
    refusals: list[str] = field(default_factory=list)

    def look(self, folder: Path) -> None:
        """See after a crash which orders were taken."""
        given = [line["what"] for line in read_audit(folder)]
        assert given == [order.what for order in self.script[: len(given)]], given  # noqa: S101
        self.taken = len(given)

    def act(self, service: Service, *, idle: bool) -> bool:
        """Give the next order if it is time; True if one was given."""
        if self.taken == len(self.script):
            return False
        order = self.script[self.taken]
        if (order.waits and not idle) or not order.is_time(service):
            return False
        try:
            order.give(service)
        except CoordinatorError as error:
            self.refusals.append(f"{order.what}: {error}")
            raise
        self.taken += 1
        return True


def training(committed: int, *kept: str) -> Callable[[Service], bool]:
    """A moment of the round after so many commits: these devices' movements are kept."""

    def is_time(service: Service) -> bool:
        state = service.course.state
        assert isinstance(state, RoundsState)  # noqa: S101  of a synchronous run
        now = state.round - state.void == committed + 1
        return now and state.phase is RoundPhase.TRAINING and all(n in state.kept for n in kept)

    return is_time


def paused(service: Service) -> bool:
    """A paused run does nothing."""
    return service.helm.paused is not None and service.course.idle


def script() -> Iterator[TimedOrder]:
    """Give the orders of a run of three rounds, which make it one of four.

    Settings change twice; a device is quarantined whose movement is kept, and is released; the run
    is paused, and is stopped while it is paused, and goes on.
    """
    first, second = training(0, "a"), training(1, "a")
    yield TimedOrder("set", first, lambda s: s.helm.change("learning_rate", 0.025, ANNA))
    yield TimedOrder("set", first, lambda s: s.helm.change("train_deadline_s", 50.0, ANNA))
    yield TimedOrder("pause", first, lambda s: s.helm.pause(ANNA))
    yield TimedOrder("rounds", paused, lambda s: s.helm.lengthen(1, ANNA), waits=True)
    yield TimedOrder("resume", paused, lambda s: s.helm.resume(ANNA), waits=True)
    yield TimedOrder("quarantine", second, lambda s: s.helm.quarantine("a", "wrong", ANNA))
    yield TimedOrder("set", second, lambda s: s.helm.change("learning_rate", 0.05, ANNA))
    yield TimedOrder("pause", second, lambda s: s.helm.pause(ANNA))
    yield TimedOrder("stop", second, lambda s: s.helm.stop("round", ANNA))
    yield TimedOrder("allow", paused, lambda s: s.helm.allow("a", ANNA), waits=True)
    yield TimedOrder("resume", paused, lambda s: s.helm.resume(ANNA), waits=True)
