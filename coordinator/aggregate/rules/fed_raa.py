"""`fed-raa`: each arrival moves its fragment at once, less the older it is; also `fedasync`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from coordinator.aggregate.rules.asynchronous import AsyncRule
from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.blocks import Float32


@dataclass(frozen=True, kw_only=True)
class FedRaa(AsyncRule):
    """Each movement is mixed into its fragment on arrival, less the staler it is (Fed-RAA).

    `θ_j ← (1 − α_t) θ_j + α_t (θ_j(τ) + D)`, `α_t = alpha · s(t − τ)`; `t` and `τ` count updates.
    A block that several fragments hold is mixed at every arrival for any of them.
    """

    alpha: float = 0.6

    def __post_init__(self) -> None:
        AsyncRule.__post_init__(self)
        if not (math.isfinite(self.alpha) and 0 < self.alpha <= 1):
            raise ConfigError(f"alpha is in (0, 1], not {self.alpha!r}")

    def mixing(self, age: int) -> float:
        """Compute `α_t` for a movement made `age` updates ago."""
        return self.alpha * self.trust(age)

    def mix(self, now: Float32, start: Float32, movement: Float32, age: int) -> Float32:
        """Compute the fragment after an arrival; `start` is the one the device trained from."""
        alpha = np.float32(self.mixing(age))
        mixed: Float32 = (1 - alpha) * now + alpha * (start + movement)
        return mixed


@dataclass(frozen=True, kw_only=True)
class FedAsync(FedRaa):
    """fed-raa with the whole model as its one fragment (FedAsync)."""

    @property
    def whole_models(self) -> bool:
        """Always True."""
        return True
