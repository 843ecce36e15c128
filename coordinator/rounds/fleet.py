"""Facts about devices and blocks from past rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.screening import Usual
from coordinator.rounds.persistent import PersistentMap
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import Groups, ModelPlan


@dataclass(frozen=True, slots=True, eq=False)
class FleetRecord:
    """An immutable record; its arrays are never changed. Made by `new_fleet`."""

    last_covered: Indices
    """Per block, the round that last covered it; 0 means never."""
    times_covered: Indices
    """Per block, the number of movements that ever contained it."""
    trained: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """Per device, the last round in which its own fresh movement counted."""
    samples: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """Training samples, as each device last reported them."""
    total_samples: int = 0
    """Training samples of all devices together."""
    usual: Usual = field(default_factory=Usual)
    """Usual size of movements at each level."""
    norms: NDArray[np.float64] | None = None
    """Per block, the squared norm of the global weights; None if the policy does not use them."""

    def heard(self, bids: Iterable[Bid]) -> FleetRecord:
        """Return the record updated with the facts in a round's bids."""
        known = self.samples
        said = {
            bid.device: bid.samples
            for bid in bids
            if bid.samples and bid.samples != known.get(bid.device)
        }
        more = sum(number - known.get(name, 0) for name, number in said.items())
        return replace(self, samples=known.merging(said), total_samples=self.total_samples + more)

    def covered(self, plan: ModelPlan, round: int, counted: Mapping[str, Groups]) -> FleetRecord:
        """Return the record after a round in which these devices trained these groups."""
        coverage = plan.coverage(counted.values())
        return replace(
            self,
            last_covered=np.where(coverage > 0, round, self.last_covered),
            times_covered=self.times_covered + coverage,
            trained=self.trained.merging(dict.fromkeys(counted, round)),
        )


def new_fleet(plan: ModelPlan, norms: NDArray[np.float64] | None = None) -> FleetRecord:
    """Make the record of a fleet about which nothing is known."""
    zeros = np.zeros(plan.block_count, dtype=np.int64)
    return FleetRecord(zeros, zeros, norms=norms)
