"""The right to speak for a task, which one coordinator has at a time.

    AWAY ──connected──▶ ASKING ──its own echo──▶ IN_CHARGE
      ◀──────────────────── lost ────────────────────┘

- Until its echo has come back, a coordinator says nothing: the broker gives retained messages
  first, so it has heard the claim of whoever is in charge.
- A larger epoch than its own means that another coordinator was started later: it stops, for good.
- A smaller one, not retained, means that an earlier coordinator still speaks and may have
  overwritten retained messages: everything public is said again.

MQTT has no compare-and-set, so two coordinators may both speak until the earlier one hears the
claim of the later one. `docs/brokers.md` says what can happen in that window.
"""

from __future__ import annotations

from enum import Enum

from coordinator.errors import CoordinatorError
from edge_sdk.protocol.messages.epoch import Epoch


class FencedError(CoordinatorError):
    """Another coordinator is in charge of the task; the text says what to do."""


class FenceState(Enum):
    """A coordinator's relation to its task."""

    AWAY = "away"
    ASKING = "asking"
    IN_CHARGE = "in charge"


class Fence:
    """Tells a coordinator when it may speak, and when it has to stop."""

    def __init__(self, epoch: Epoch, task: str) -> None:
        self.epoch = epoch
        self.state = FenceState.AWAY
        self._task = task
        self._contradicted = False

    @property
    def in_charge(self) -> bool:
        """True if the coordinator may speak."""
        return self.state is FenceState.IN_CHARGE

    def connected(self) -> None:
        """Note a connection; an echo has to be sent."""
        self.state = FenceState.ASKING

    def lost(self) -> None:
        """Note that there is no connection."""
        self.state = FenceState.AWAY

    def answered(self) -> bool:
        """Note that the echo came back; True if the coordinator is in charge from now on.

        It then has to publish its claim, before anything else.
        """
        if self.state is not FenceState.ASKING:
            return False
        self.state = FenceState.IN_CHARGE
        return True

    def hear(self, epoch: Epoch, *, retained: bool) -> None:
        """Note the epoch of a public message. Raises `FencedError` if it is above our own."""
        if epoch > self.epoch:
            self.state = FenceState.AWAY
            raise FencedError(
                f"another coordinator of task {self._task!r} has taken over (epoch {epoch}; this "
                f"one has {self.epoch}), so this one stops. Its folder is whole; to continue from "
                "it, stop the other and start this one once with --take-over"
            )
        if epoch < self.epoch and not retained:
            self.contradict()

    def contradict(self) -> None:
        """Note that somebody else speaks for the task."""
        self._contradicted = self.in_charge

    def take_contradiction(self) -> bool:
        """True once after somebody else spoke: everything public has to be said again."""
        contradicted, self._contradicted = self._contradicted, False
        return contradicted and self.in_charge
