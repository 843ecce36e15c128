"""`fedbuff`: the server collects some movements, then moves the model by their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from coordinator.aggregate.rules.asynchronous import AsyncRule
from coordinator.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FedBuff(AsyncRule):
    """The mean of every `size` arrivals moves the model, each less the staler it is (FedBuff).

    `θ_i += server_rate · (1/Γ_i) Σ s(t − τ_n) D_n,i` over the `Γ_i` of the collected movements that
    hold block `i`, as soon as there are `size`; of whole models, `Γ_i = size`. `t` and `τ` count
    changes of the model, so a movement does not age while it waits. After the last of a run's
    `updates`, those left move the model however few they are; a run that ends early, by its
    accuracy, keeps the model that was measured.
    """

    size: int = 10
    server_rate: float = 1.0
    fragments: bool = False

    def __post_init__(self) -> None:
        AsyncRule.__post_init__(self)
        if type(self.size) is not int or self.size < 1:
            raise ConfigError(f"size is a number of movements, at least 1, not {self.size!r}")
        if not (math.isfinite(self.server_rate) and self.server_rate > 0):
            raise ConfigError(f"server_rate must be above 0, not {self.server_rate!r}")

    @property
    def whole_models(self) -> bool:
        """True unless devices train `fragments`."""
        return not self.fragments
