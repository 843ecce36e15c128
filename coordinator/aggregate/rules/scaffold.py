"""`scaffold`: control variates against the drift of devices whose data differ.

Every device n keeps a variate `c_n`, its own mean gradient of the last round it trained in, and the
coordinator keeps their sum over all `N` devices. A step's gradient is corrected by `c − c_n`, with
`c = Σ c_n / N`. By option II of the paper (Karimireddy et al., ICML 2020, arXiv:1910.06378), a
device that took K steps at learning rate γ and moved by `D_n` changes its variate by

    Δc_n = −c − D_n / (K γ)

so the coordinator knows the change from what it has: nothing is sent up but the movement. Over the
`Γ_i` devices that hold block `i`, the sum changes by `−Γ_i (c_i + mean of D_n,i / (K γ))`.

Devices make the change when they are told that their movement counted (`Variates` in the SDK), and
both sides use the movement as it came over the wire. `c` travels beside the model, in the same
encoding, and both sides use it as decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from coordinator.aggregate.optimizer import KeptVectors, ServerMoments
from coordinator.aggregate.robust.sums import PIECE, block_sums, over_shards, spread
from coordinator.aggregate.rules.ra_fed import RaFed
from coordinator.aggregate.rules.rule import Closing
from edge_sdk.protocol.plan.blocks import Float32


class VariateSum(NamedTuple):
    """The sum of all devices' variates, as `KeptVectors`."""

    name: str = "scaffold"
    starts: tuple[float, ...] = (0.0,)


@dataclass(frozen=True, kw_only=True)
class Scaffold(RaFed):
    """ra-fed for devices that correct their gradients by control variates (SCAFFOLD)."""

    vectors: ClassVar[KeptVectors | None] = VariateSum()

    def settle(
        self,
        closing: Closing,
        movement: Float32,
        sums: ServerMoments,
        control: Float32,
        steps: int,
    ) -> None:
        """Add the changes of the variates to their sum, given the movement that `move` returned.

        `control` is c as the devices of the round had it.
        """
        plan, threads = closing.plan, closing.threads
        coverage = block_sums(plan, [(part.blocks, 1.0) for part in closing.fresh])
        per_step = np.float32(1 / (self.server_rate * steps * closing.learning_rate))
        with sums.updated(closing.round) as ((old,), put):

            def work(start: int, end: int) -> None:
                for low in range(start, end, PIECE):
                    high = min(low + PIECE, end)
                    change = movement[low:high] * per_step + control[low:high]
                    change *= spread(plan, coverage, low, high).astype(np.float32)
                    put(0, low, old[low:high] - change)

            over_shards(plan.parameters, threads, work)
