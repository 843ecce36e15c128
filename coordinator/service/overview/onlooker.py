"""An onlooker of a run: it is told what happens, and changes nothing.

The loop of the service and the courses tell it, in their thread. This one looks away: it is for
runs that nobody watches, such as simulations. `Overview` is the one that remembers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from coordinator.rounds.fleet import FleetRecord
from edge_sdk.protocol.messages.condition import Condition
from edge_sdk.protocol.messages.round import Bid, Receipt

BlockEntries = NDArray[np.int64]


class Onlooker:
    """Is told what happens in a run. Every method returns at once, and none raises."""

    watches: bool = False
    """True if somebody wants to know; else whatever costs time need not be told."""

    def began(self) -> None:
        """The coordinator is in charge."""

    def linked(self, connected: bool) -> None:
        """The broker came back, or is lost."""

    def at(self, phase: str, round: int, deadline_s: float | None) -> None:
        """The run is in this phase of this round; seconds until its deadline."""

    def waits(self, words: str | None) -> None:
        """The run waits for something, or for nothing."""

    def joined(self, device: str) -> None:
        """A device is there."""

    def left(self, device: str, reason: str = "", exit_code: int | None = None) -> None:
        """A device is gone."""

    def condition(self, condition: Condition) -> None:
        """A device told how it is."""

    def barred(self, device: str, reason: str | None) -> None:
        """A device may not take part, for this reason; None: it may."""

    def asked(self, devices: Iterable[str], round: int) -> None:
        """Devices are asked to take part in a round."""

    def bid(self, bid: Bid) -> None:
        """A device answered a round, or withdrew its answer."""

    def assigned(self, device: str, round: int) -> None:
        """A device was told what to train."""

    def kept(self, arrival: Arrival, round: int) -> None:
        """The movement of a device is stored."""

    def verdict(self, receipt: Receipt) -> None:
        """A movement that was not kept for a round, or that was, got its receipt."""

    def line(self, entry: Mapping[str, Any]) -> None:
        """A line was added to the run's history: of a closed round, or other news."""

    def model(
        self,
        fleet: FleetRecord,
        round: int,
        *,
        entries: BlockEntries | None = None,
        squares: NDArray[np.float64] | None = None,
    ) -> None:
        """The fleet's record after a round.

        `entries` is the number of movements that memory holds of each block; None: there is no
        memory. `squares` are the squared norms of each block's step; None: not measured.
        """

    def paused(self, by: str, time: float) -> None:
        """An account paused the run at this time (seconds since 1970)."""

    def resumed(self) -> None:
        """The run goes on."""

    def stopping(self, when: str | None) -> None:
        """The run was told to stop: after the `round`, or `now`; None: no longer."""

    def delivery(self, found: Mapping[str, Any]) -> None:
        """The trial of a model for inference by some devices: see docs/operate.md."""
