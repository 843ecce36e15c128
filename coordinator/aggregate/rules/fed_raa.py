"""`fed-raa`: each arrival moves its fragment at once, less the older it is; also `fedasync`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.blocks import Float32

Staleness = Literal["constant", "hinge", "polynomial"]


@dataclass(frozen=True, kw_only=True)
class FedRaa:
    """Each movement is mixed into its fragment on arrival, less the staler it is (Fed-RAA).

    `θ_j ← (1 − α_t) θ_j + α_t (θ_j(τ) + D)`, `α_t = alpha · s(t − τ)`; `t` and `τ` count updates.
    `s(x)` is 1 ("constant"), `1 if x ≤ b else 1 / (a (x − b) + 1)` ("hinge") or `(x + 1)^−a`
    ("polynomial").
    """

    fragments: ClassVar[bool] = True
    """A device trains one fragment; if False, the whole model is the only one."""

    alpha: float = 0.6
    staleness: Staleness = "polynomial"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and 0 < self.alpha <= 1):
            raise ConfigError(f"alpha is in (0, 1], not {self.alpha!r}")
        if self.staleness not in get_args(Staleness):
            raise ConfigError(f"staleness is one of {get_args(Staleness)}, not {self.staleness!r}")
        for name in ("a", "b"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)!r}")

    def mixing(self, age: int) -> float:
        """Compute `α_t` for a movement made `age` updates ago."""
        match self.staleness:
            case "constant":
                return self.alpha
            case "hinge":
                return self.alpha / (self.a * max(0.0, age - self.b) + 1)
            case "polynomial":
                return self.alpha * math.pow(age + 1, -self.a)

    def mix(self, now: Float32, start: Float32, movement: Float32, age: int) -> Float32:
        """Compute the fragment after an arrival; `start` is the one the device trained from."""
        alpha = np.float32(self.mixing(age))
        mixed: Float32 = (1 - alpha) * now + alpha * (start + movement)
        return mixed


@dataclass(frozen=True, kw_only=True)
class FedAsync(FedRaa):
    """fed-raa with the whole model as its one fragment (FedAsync)."""

    fragments: ClassVar[bool] = False
