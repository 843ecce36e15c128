"""Settings of every run, synchronous or asynchronous."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Expected, GroupsByAxis
from coordinator.aggregate.bound import reach_of, wire_factor
from coordinator.aggregate.pairings import check_pairing
from coordinator.aggregate.rules import AsyncRule, Rule, Scaffold
from coordinator.errors import ConfigError
from coordinator.masks import MaskPolicy, Narrower, OrderedMasks, check_masks, level_choices
from coordinator.task.levels import LevelScore, LevelScores
from edge_sdk.program.settings import (
    Count,
    Example,
    Natural,
    Seconds,
    Share,
    Within,
    check_fields,
)
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import MAX_LEVELS, Bid, RoundOpen
from edge_sdk.protocol.messages.survey import MAX_SURVEY_SAMPLES, MAX_SURVEYED
from edge_sdk.protocol.plan import LEVELS
from edge_sdk.protocol.plan.plan import ModelPlan

SettingValue = int | float | None
"""Value of a setting that an operator may change while a run is served."""
Best = tuple[float, int]
"""Best accuracy so far, and how many rounds, or updates, there were when it was measured."""
UNMEASURED: Best = (-math.inf, 0)


def best_of(best: Best, accuracy: float | None, committed: int) -> Best:
    """Return the best so far, given the newest accuracy; None if it was not measured."""
    return best if accuracy is None or accuracy <= best[0] else (accuracy, committed)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Settings of a run. Raises `ConfigError` for invalid values or combinations."""

    plan: ModelPlan
    rule: Rule | AsyncRule
    masks: MaskPolicy
    local_rule: LocalRule
    steps: Count
    batch_size: Count
    min_devices: Count
    """Devices that must be present for a round to open; below that, the run waits. An asynchronous
    run needs them only at its start."""
    seed: int
    levels: tuple[Share, ...] = LEVELS
    """Shares of the model that are to be models of their own, largest first, beginning with 1.
    Devices that train several widths train those within their own."""
    up: Encoding = field(default_factory=Encoding)
    """Encoding of movements: fp32, fp16, int8 or top-k:0.1, each alone or with +zstd behind it."""
    rms_limit: Annotated[float | None, Within(above=1)] = 100.0
    """A movement with a block this many times larger than usual is rejected; `None` means never."""
    samples_limit: Annotated[float, Within(least=1)] = 5.0
    """Most samples that a device counts with, in multiples of the median that the round's devices
    claim: nobody can check the number."""
    quarantine_after: Natural = 3
    """Rounds in a row in which a device's movement is rejected, after which its bids are declined
    until `tessera-coordinator allow`; 0 means never."""
    bid_s: Seconds = 10.0
    """Seconds to wait for bids."""
    train_deadline_s: Seconds = 600.0
    """Seconds to wait for movements."""
    target_accuracy: Annotated[Share | None, Example(0.95)] = None
    """Accuracy at which the run stops early; without it, accuracy never stops the run."""
    patience: Annotated[Count | None, Example(10)] = None
    """Rounds without a better model after which the run stops early, not counting void rounds and
    those in which the model grows; in an asynchronous run, reports. Without it, the run does not
    stop for this reason."""
    survey_every: Natural = 10
    """Rounds between surveys, in which devices run every level forward to compute its BatchNorm
    statistics and accuracy, where the coordinator has no data for that; 0 means after the last
    round alone, which always has one. Asynchronous runs have one at their end."""
    survey_devices: Annotated[int, Within(least=1, most=MAX_SURVEYED)] = 100
    """Most devices that are asked in a survey; of more, some are drawn."""
    survey_samples: Annotated[int, Within(least=1, most=MAX_SURVEY_SAMPLES)] = 256
    """Most samples that a device uses in a survey, but at least a batch."""
    survey_s: Seconds = 60.0
    """Seconds to wait for the answers to a survey."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_levels(self.levels)
        check_pairing(self.rule, self.masks, self.up, self.local_rule.widths, self.plan)
        check_masks(self.masks, self.plan)

    def stops_early(self, best: Best, done: int, each: int = 1) -> bool:
        """True if the accuracy says that the run is over after this many rounds or updates.

        `each` is the number of them that `patience` counts as one.
        """
        accuracy, since = best
        reached = self.target_accuracy is not None and accuracy >= self.target_accuracy
        waited = self.patience is not None and done - since >= self.patience * each
        return reached or (waited and math.isfinite(accuracy))

    def unscored(self) -> LevelScores:
        """Return the run's levels and the groups they mean, before anything is known of them."""
        choices = level_choices(self.masks, self.plan, self.levels)
        levels = tuple(LevelScore(level, groups) for level, groups in choices.items())
        return LevelScores(levels, self.local_rule.rescale)

    def limit(self, groups: GroupsByAxis, norms: NDArray[np.float64] | None) -> float | None:
        """Return the longest movement of these groups that honest training makes.

        `norms` are the squared norms, per block, of the model it starts from. None: there is no
        bound, because gradients are not clipped or the norms are not known.
        """
        reach = reach_of(self.local_rule, self.steps)
        if reach is None or norms is None:
            return None
        held = self.plan.block_ids(self.plan.choose(groups))
        factor = wire_factor(self.up, self.plan.block_sizes[held])
        return factor * reach.limit(math.sqrt(float(norms[held].sum())))

    def expected(
        self, groups: GroupsByAxis, bid: Bid, norms: NDArray[np.float64] | None
    ) -> Expected:
        """Return the task of a device that got these groups for its bid."""
        return Expected(groups, bid.level or 1.0, bid.samples, self.limit(groups, norms))

    def narrower(self, round: int) -> Narrower:
        """Return the submodels that a device may train beside its own in a round."""
        if self.local_rule.widths == "own" or not isinstance(self.masks, OrderedMasks):
            return Narrower(())
        masks, plan = self.masks, self.plan
        return Narrower([masks.groups_at(plan, level, round) for level in self.levels])

    def opening(
        self,
        round: int,
        *,
        whole: bool = False,
        warmup: bool = False,
        replay_within: int = 0,
        rounds_left: int | None = None,
        largest: float = 1.0,
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
            levels=() if self.local_rule.widths == "own" else self.levels,
            largest=largest,
            variates=isinstance(self.rule, Scaffold),
        )


def check_levels(levels: tuple[float, ...]) -> None:
    """Raise `ConfigError` unless these are the whole model and shares of it, largest first."""
    falling = list(levels) == sorted(set(levels), reverse=True)
    if not (falling and levels and levels[0] == 1 and levels[-1] > 0 and len(levels) <= MAX_LEVELS):
        raise ConfigError(
            f"levels = {list(levels)!r:.80}: must be up to {MAX_LEVELS} shares of the model, "
            "largest first, beginning with 1"
        )
