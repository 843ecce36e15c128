"""`ra-fed`, and the rules that equal it under another name or with whole models only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.robust import Weighed
from coordinator.aggregate.robust.sums import Term, block_sums, divide, sum_terms
from coordinator.aggregate.rules.rule import Closing, Rule
from edge_sdk.protocol.plan.blocks import Float32


@dataclass(frozen=True, kw_only=True)
class RaFed(Rule):
    """Each block moves by the mean over the devices that trained it; others stay (RA-Fed)."""

    def move(self, closing: Closing) -> Float32:
        """Move each block by `η · mean of D_n,i over N_i`; `Γ_i = 0` keeps it."""
        return self._mean(closing, closing.fresh)

    def _mean(self, closing: Closing, contributions: Sequence[Contribution]) -> Float32:
        weighed = [(part.blocks, self.weight(part)) for part in contributions]
        if closing.robust.combines:
            mean, _ = closing.judge([Weighed(*pair) for pair in weighed])
            mean *= np.float32(self.server_rate)
            return mean
        terms = [Term(blocks, weight) for blocks, weight in weighed]
        total = sum_terms(closing.plan, terms, threads=closing.threads)
        coverage = block_sums(closing.plan, weighed) / self.server_rate
        return divide(closing.plan, total, coverage)


@dataclass(frozen=True, kw_only=True)
class FedAvg(RaFed):
    """The mean over devices that trained the whole model; lower levels are skips (FedAvg)."""

    whole_models: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Strategy1(RaFed):
    """CCFL's first baseline: a device that skips is left out of the mean."""


@dataclass(frozen=True, kw_only=True)
class SubDisMo(RaFed):
    """ra-fed with server rate η_g, for devices that train with SAM (SubDisMO)."""
