"""What every run needs to be told, in rounds or by fragments."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.aggregate.pairings import check_pairing
from coordinator.aggregate.rules import FedRaa, Rule
from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What a run is. Raises `ConfigError` for values, or pairings of them, that make no sense."""

    plan: ModelPlan
    rule: Rule | FedRaa
    masks: MaskPolicy
    local_rule: LocalRule
    steps: int
    batch_size: int
    min_devices: int
    seed: int
    encoding: Encoding = field(default_factory=Encoding)
    """How movements travel."""
    rms_limit: float | None = 100.0
    """Movements with a block this many times larger than usual are rejected; None: never."""
    bid_s: float = 10.0
    """How long a bid is waited for, at the most; `train_s` likewise for movements."""
    train_s: float = 600.0

    def __post_init__(self) -> None:
        self._check_counts("steps", "batch_size", "min_devices")
        self._check_seconds("bid_s", "train_s")
        if self.rms_limit is not None and not self.rms_limit > 1:
            raise ConfigError(f"rms_limit must be above 1, or none, not {self.rms_limit!r}")
        check_pairing(self.rule, self.masks, self.encoding)

    def _check_counts(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)!r}")

    def _check_seconds(self, *names: str) -> None:
        for name in names:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")

    def opening(
        self,
        round: int,
        *,
        whole: bool = False,
        warmup: bool = False,
        replay_within: int = 0,
        rounds_left: int | None = None,
    ) -> RoundOpen:
        """What devices are told as a round begins."""
        return RoundOpen(
            round=round,
            plan_hash=self.plan.hash,
            rule=self.local_rule,
            steps=self.steps,
            batch_size=self.batch_size,
            bid_s=self.bid_s,
            train_s=self.train_s,
            whole=whole,
            replay_within=replay_within,
            encoding=self.encoding,
            rounds_left=rounds_left,
            warmup=warmup,
        )
