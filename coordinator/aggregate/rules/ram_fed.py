"""`ram-fed`: the newest movement of every device counts, corrected by fresh ones; `fedvarp`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Memory
from coordinator.aggregate.robust import Weighed
from coordinator.aggregate.robust.scratch import spool
from coordinator.aggregate.robust.sums import (
    PIECE,
    Float64,
    add_scaled,
    block_sums,
    over_shards,
    spread,
)
from coordinator.aggregate.rules.rule import Closing, Rule
from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs, select_blocks

Correction = Literal["coverage", "population"]
Population = Literal["holders", "all"]


@dataclass(frozen=True, kw_only=True)
class RamFed(Rule):
    """The mean of all devices' newest movements, corrected by the fresh ones (RAM-Fed).

    `damping` ρ fades memory with every round of age; 1 is the paper's. `population`: memory is
    averaged over the devices that have an entry ("holders"), or over all, absent ones as 0 ("all",
    the paper). `correction`: fresh movements are averaged over the devices that trained a block
    ("coverage", the paper), or divided by all devices ("population", MIFA). In the first
    `warmup_rounds` every device trains everything.
    """

    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "movements"
    sums: ClassVar[bool] = True

    damping: float = 0.8
    correction: Correction = "coverage"
    population: Population = "holders"
    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if not (math.isfinite(self.damping) and 0 < self.damping <= 1):
            raise ConfigError(f"damping is in (0, 1], not {self.damping!r}")
        for name, known in (("correction", Correction), ("population", Population)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"{name} is one of {get_args(known)}, not {getattr(self, name)!r}"
                )
        if self.warmup_rounds < 0:
            raise ConfigError(f"warmup_rounds must not be negative: {self.warmup_rounds}")

    def move(self, closing: Closing) -> Float32:
        """Compute `v_i = ū_i + Σ_{n∈N_i} (D_n,i − u_n,i) / Γ_i`, an absent `u` being `ū_i` (or 0).

        The sum is the change that the fresh movements make to the memory's running sum. It is
        used a stretch at a time as memory makes it, so each old movement is read once, where it
        is replaced, and the change of the whole model is never held.
        """
        memory, plan = closing.needed_memory, closing.plan
        memory.advance(closing.round)
        if closing.robust.combines:
            return self._robust_move(closing, memory)
        weights = [self.weight(part) for part in closing.fresh]
        pairs = [(part.blocks, w) for part, w in zip(closing.fresh, weights, strict=True)]
        fresh = block_sums(plan, pairs)
        absent = self._absent(closing, memory)
        uneven = self._uneven(closing, memory)
        everybody = np.full(plan.block_count, closing.registered, dtype=np.float64)
        holders = memory.weight if self.population == "holders" else everybody
        mean = np.divide(1.0, holders, out=np.zeros_like(everybody), where=holders > 0)
        by = fresh if self.correction == "coverage" else everybody
        share = np.divide(1.0, by, out=np.zeros_like(by), where=(by > 0) & (fresh > 0))
        # v = ū + (γ·change − absent·ū) · share. The old mean is read before memory changes.
        scale = self.server_rate * closing.learning_rate
        result = np.zeros(plan.parameters, dtype=np.float32)
        of_old, of_change = scale * mean * (1 - absent * share), scale * share

        def add_old(start: int, end: int) -> None:
            add_scaled(plan, result, start, memory.total[start:end], of_old)

        def add_change(start: int, change: Float64) -> None:
            if uneven is not None:
                change = change + uneven[start : start + len(change)]
            add_scaled(plan, result, start, change, of_change)

        over_shards(plan.parameters, closing.threads, add_old)
        memory.write(closing.fresh, add_change)
        return result

    def _robust_move(self, closing: Closing, memory: Memory) -> Float32:
        """Compute `v_i = ū_i + the robust mean of D_n,i − u_n,i`, an absent `u` being `ū_i` (or 0).

        The differences are made one device at a time, in a file; each old movement is read once.
        """
        plan, rate = closing.plan, closing.learning_rate
        everybody = np.full(plan.block_count, closing.registered, dtype=np.float64)
        holders = memory.weight if self.population == "holders" else everybody
        mean = np.divide(rate, holders, out=np.zeros_like(everybody), where=holders > 0)
        weights = [self.weight(part) for part in closing.fresh]
        differences = spool(
            (self._difference(closing, memory, part, mean) for part in closing.fresh),
            closing.scratch,
        )
        weighed = [
            Weighed(Blocks(part.blocks.ids, values), weight, judged=part.blocks)
            for part, values, weight in zip(closing.fresh, differences, weights, strict=True)
        ]
        result, entering = closing.judge(weighed)
        share = np.full(plan.block_count, self.server_rate)
        if self.correction == "population":
            fresh = block_sums(plan, [(each.blocks, each.weight) for each in weighed])
            share *= fresh / max(1.0, closing.registered)
        of_old = self.server_rate * mean

        def add_old(start: int, end: int) -> None:
            for low in range(start, end, PIECE):
                high = min(low + PIECE, end)
                result[low:high] *= spread(plan, share, low, high)
            add_scaled(plan, result, start, memory.total[start:end], of_old)

        over_shards(plan.parameters, closing.threads, add_old)
        memory.write(entering)
        return result

    def _difference(
        self, closing: Closing, memory: Memory, part: Contribution, mean: Float64
    ) -> Float32:
        """Return `D − u` of a device's fresh movement; `mean` turns the running sum into `ū`."""
        plan, ids = closing.plan, part.blocks.ids
        whole = np.zeros(plan.parameters)
        for place, within in block_runs(ids, plan.block_offsets):
            whole[place] = part.blocks.values[within]
        for piece in memory.recall(part.device, ids):
            faded = self.damping ** (closing.round - piece.made.round)
            factor = faded * closing.learning_rate / piece.made.learning_rate
            for place, within in block_runs(piece.blocks.ids, plan.block_offsets):
                whole[place] -= factor * piece.blocks.values[within].astype(np.float64)
        if self.population == "holders":
            lacks = ids[memory.rounds(part.device)[ids] == 0]
            for place, _ in block_runs(lacks, plan.block_offsets):
                factors = spread(plan, mean, place.start, place.stop)
                whole[place] -= factors * memory.total[place]
        return select_blocks(whole.astype(np.float32), ids, plan.block_offsets).values

    def moved(self, closing: Closing) -> NDArray[np.bool_]:
        """See `Rule`; memory has the fresh movements too by now."""
        held: NDArray[np.bool_] = closing.needed_memory.entries > 0
        return held

    def _absent(self, closing: Closing, memory: Memory) -> Float64:
        """Sum per block the weight of fresh movements whose device had no entry to replace."""
        absent = np.zeros(closing.plan.block_count)
        if self.population == "all":
            return absent
        for part in closing.fresh:
            ids = part.blocks.ids
            lacks = memory.rounds(part.device)[ids] == 0
            absent[ids[lacks]] += self.weight(part)
        return absent

    def _uneven(self, closing: Closing, memory: Memory) -> Float64 | None:
        """Correct the change where a device's weight differs from before: `−(w − w_old) · u`."""
        if self.weighting == "uniform" and closing.robust.name != "root":
            return None
        lack: Float64 | None = None
        for part in closing.fresh:
            for piece in memory.recall(part.device, part.blocks.ids):
                more = self.weight(part) - piece.made.weight
                if not more:
                    continue
                if lack is None:
                    lack = np.zeros(closing.plan.parameters)
                faded = self.damping ** (closing.round - piece.made.round)
                factor = more * faded / piece.made.learning_rate
                for whole, within in block_runs(piece.blocks.ids, closing.plan.block_offsets):
                    lack[whole] -= factor * piece.blocks.values[within].astype(np.float64)
        return lack


@dataclass(frozen=True, kw_only=True)
class FedVarp(RamFed):
    """ram-fed with whole models, undamped and over all devices as published (FedVARP)."""

    whole_models: ClassVar[bool] = True

    damping: float = 1.0
    population: Population = "all"
