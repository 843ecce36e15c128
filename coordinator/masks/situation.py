"""The information a mask policy may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, eq=False)
class Situation:
    """The fleet and the model at the time a round is assigned."""

    plan: ModelPlan
    round: int
    """Counts from 1."""
    offers: Sequence[Bid]
    """Offers in device-name order; the level of each is a number."""
    last_covered: Indices
    """For every block, the round that last covered it; 0 = never."""
    times_covered: Indices
    """For every block, the number of movements that ever held it."""
    norms: NDArray[np.float64] | None
    """For every block, the squared norm of its weights; None unless the policy `uses_norms`."""
    stream: np.random.Generator
    importance: NDArray[np.float64] | None = None
    """For every block, the mean over devices of its squared movement in the last round that
    measured it; None: none did, or the policy does not measure."""

    @property
    def levels(self) -> dict[str, float]:
        """Levels that devices offered, in device-name order. Raises `ValueError` for a skip."""
        levels = {}
        for bid in self.offers:
            if bid.level is None:
                raise ValueError(f"the bid of {bid.device!r} is a skip; only offers are assigned")
            levels[bid.device] = bid.level
        return levels
