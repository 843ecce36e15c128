"""Settings of every run, synchronous or asynchronous."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from coordinator.aggregate.pairings import check_pairing
from coordinator.aggregate.rules import FedRaa, Rule
from coordinator.masks import MaskPolicy
from edge_sdk.program.settings import Count, Seconds, Within, check_fields
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of a run. Raises `ConfigError` for invalid values or combinations."""

    plan: ModelPlan
    rule: Rule | FedRaa
    masks: MaskPolicy
    local_rule: LocalRule
    steps: Count
    batch_size: Count
    min_devices: Count
    seed: int
    up: Encoding = field(default_factory=Encoding)
    """Encoding of movements: fp32, fp16, int8 or top-k:0.1, each alone or with +zstd behind it."""
    rms_limit: Annotated[float | None, Within(above=1)] = 100.0
    """A movement with a block this many times larger than usual is rejected; `None` means never."""
    bid_s: Seconds = 10.0
    """Seconds to wait for bids."""
    train_deadline_s: Seconds = 600.0
    """Seconds to wait for movements."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_pairing(self.rule, self.masks, self.up)

    def opening(
        self,
        round: int,
        *,
        whole: bool = False,
        warmup: bool = False,
        replay_within: int = 0,
        rounds_left: int | None = None,
    ) -> RoundOpen:
        """Make the message that opens a round."""
        return RoundOpen(
            round=round,
            plan_hash=self.plan.hash,
            local_rule=self.local_rule,
            steps=self.steps,
            batch_size=self.batch_size,
            bid_s=self.bid_s,
            train_deadline_s=self.train_deadline_s,
            whole=whole,
            replay_within=replay_within,
            up=self.up,
            rounds_left=rounds_left,
            warmup=warmup,
        )
