"""Control variates: a device's own mean gradient, kept from round to round (SCAFFOLD).

    correction = variates.correction(round, control)     c − c_n, added to every step's gradient
    …
    variates.keep(round, control, sent, steps, rate)     sent: the movement as it is decoded
    …
    variates.settle(round, used=True)                    the verdict says that it was counted

Option II of the paper, for K steps at learning rate γ that moved the weights by D:

    c_n ← c_n − c − D / (K γ)

The change follows from c, D, K and γ, which the coordinator has as well, so nothing but D is sent.
It is made when the verdict says that D was counted, and by what D became on the wire: then the
devices and the coordinator, which adds the same to its sum of all c_n, agree to float32's rounding.
"""

from __future__ import annotations

import numpy as np

from edge_sdk.device.stores.residuals import ArrayStore, Residuals
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan

VERDICT_ROUNDS = 1000
"""Rounds after which a movement's verdict is no longer awaited."""


class Variates:
    """The control variate of one device and run, in a store; 0 at first, block by block."""

    def __init__(self, plan: ModelPlan, store: ArrayStore) -> None:
        # Sums of changes that verdicts make are kept as the residuals of top-k are.
        self._sums = Residuals(plan, store, forget_after=VERDICT_ROUNDS, fades=False)

    def correction(self, round: int, control: Blocks) -> Blocks:
        """Return `c − c_n` for the blocks of `control`, which is c. Changes nothing."""
        negative = self._sums.corrected(round, Blocks(control.ids, -control.values))
        return Blocks(control.ids, np.negative(negative.values, out=negative.values))

    def keep(
        self, round: int, control: Blocks, sent: Blocks, *, steps: int, learning_rate: float
    ) -> None:
        """Remember, until its verdict, the change that a movement makes. Raises `OSError`.

        `sent` is the movement as the coordinator decodes it; `control` has the same blocks.
        """
        gradient = sent.values / np.float32(steps * learning_rate)
        self._sums.keep(round, Blocks(sent.ids, -control.values), Blocks(sent.ids, gradient))

    def settle(self, round: int, *, used: bool) -> None:
        """Process the verdict on this round's movement; it may come more than once."""
        self._sums.settle(round, used=used)
