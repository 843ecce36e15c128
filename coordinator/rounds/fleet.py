"""The coordinator's knowledge of its devices and blocks from past rounds."""

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
    """A value; arrays in it are never changed. Made by `new_fleet`."""

    last_covered: Indices
    """Per block, the round that last covered it; 0 = never."""
    times_covered: Indices
    """Per block, how many movements ever held it."""
    trained: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """The last round in which a device's own fresh movement counted."""
    samples: PersistentMap[str, int] = field(default_factory=PersistentMap)
    """Training samples, as each device last said."""
    total_samples: int = 0
    """Of all devices together."""
    usual: Usual = field(default_factory=Usual)
    """Usual size of movements at each level."""
    norms: NDArray[np.float64] | None = None
    """Per block, the squared norm of the global weights; None where no policy asks."""

    def heard(self, bids: Iterable[Bid]) -> FleetRecord:
        """With what devices said of themselves in a round's bids."""
        known = self.samples
        said = {
            bid.device: bid.samples
            for bid in bids
            if bid.samples and bid.samples != known.get(bid.device)
        }
        more = sum(number - known.get(name, 0) for name, number in said.items())
        return replace(self, samples=known.merging(said), total_samples=self.total_samples + more)

    def covered(self, plan: ModelPlan, round: int, counted: Mapping[str, Groups]) -> FleetRecord:
        """After a round in which these devices trained these groups."""
        coverage = plan.coverage(counted.values())
        return replace(
            self,
            last_covered=np.where(coverage > 0, round, self.last_covered),
            times_covered=self.times_covered + coverage,
            trained=self.trained.merging(dict.fromkeys(counted, round)),
        )


def new_fleet(plan: ModelPlan, norms: NDArray[np.float64] | None = None) -> FleetRecord:
    """A fleet of which nothing is known."""
    zeros = np.zeros(plan.block_count, dtype=np.int64)
    return FleetRecord(zeros, zeros, norms=norms)
