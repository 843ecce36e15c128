"""The shape of an asynchronous rule: what the age of a movement does to its weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from coordinator.errors import ConfigError
from edge_sdk.program.settings import check_fields

Staleness = Literal["constant", "hinge", "polynomial"]


@dataclass(frozen=True, kw_only=True)
class AsyncRule:
    """An asynchronous rule: every arrival counts by itself, less the staler it is.

    The age `x` of a movement is the number of changes of the model since the version it was made
    from. `s(x)` is 1 ("constant"), `1 if x ≤ b else 1 / (a (x − b) + 1)` ("hinge") or
    `(x + 1)^−a` ("polynomial").
    """

    staleness: Staleness = "polynomial"
    a: float = 0.5
    b: float = 4.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("a", "b"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} must not be negative: {getattr(self, name)!r}")

    @property
    def whole_models(self) -> bool:
        """True if devices train the whole model, False if they train fragments."""
        return False

    def trust(self, age: int) -> float:
        """Compute `s(age)`."""
        match self.staleness:
            case "constant":
                return 1.0
            case "hinge":
                return 1 / (self.a * max(0.0, age - self.b) + 1)
            case "polynomial":
                return math.pow(age + 1, -self.a)
