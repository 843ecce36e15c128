"""`ram-fed`: the newest movement of every device counts, corrected by fresh ones; `fedvarp`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Memory
from coordinator.aggregate.robust import Weighed
from coordinator.aggregate.robust.scratch import spool
from coordinator.aggregate.robust.sums import (
    PIECE,
    Float64,
    Term,
    add_scaled,
    block_sums,
    divide,
    over_shards,
    spread,
    sum_terms,
)
from coordinator.aggregate.rules.rule import Closing, Rule
from coordinator.aggregate.rules.trust import measure_trust
from coordinator.errors import ConfigError
from edge_sdk.program.settings.types import Spelling
from edge_sdk.protocol.plan.blocks import Blocks, Float32, block_runs, select_blocks

Correction = Literal["coverage", "population"]
Population = Literal["holders", "all"]

ADAPTIVE = "adaptive"


def _read_damping(value: Any, _: Path) -> float | str:
    if value == ADAPTIVE:
        return ADAPTIVE
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


Damping = Annotated[
    float | Literal["adaptive"], Spelling(_read_damping, "adaptive, or a number in (0, 1]")
]


@dataclass(frozen=True, kw_only=True)
class RamFed(Rule):
    """The mean of all devices' newest movements, corrected by the fresh ones (RAM-Fed).

    `damping`: "adaptive" measures in every round how far memory can be trusted (`trust.py`); a
    number ρ fades memory with every round of age, and 1 is the paper's. `population`: memory is
    averaged over the devices that have an entry ("holders"), or over all, absent ones as 0 ("all",
    the paper). `correction`: fresh movements are averaged over the devices that trained a block
    ("coverage", the paper), or divided by all devices ("population", MIFA). In the first
    `warmup_rounds` every device trains everything.
    """

    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "movements"
    sums: ClassVar[bool] = True

    damping: Damping = "adaptive"
    correction: Correction = "coverage"
    population: Population = "holders"
    warmup_rounds: int = 0

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        if not (self.adapts or (math.isfinite(self.fading) and 0 < self.fading <= 1)):
            raise ConfigError(f"damping is in (0, 1], or adaptive, not {self.damping!r}")
        for name, known in (("correction", Correction), ("population", Population)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"{name} is one of {get_args(known)}, not {getattr(self, name)!r}"
                )
        if self.warmup_rounds < 0:
            raise ConfigError(f"warmup_rounds must not be negative: {self.warmup_rounds}")
        if self.adapts and self.correction == "population":
            raise ConfigError(
                'correction = "population" divides fresh movements by all devices, so they cannot '
                "be weighed against memory: give damping as a number (1 as published), or leave "
                'correction at "coverage"'
            )

    @property
    def adapts(self) -> bool:
        """True if the trust in memory is measured."""
        return self.damping == ADAPTIVE

    @property
    def fading(self) -> float:
        """See `Rule`. What is measured anew in every round need not fade."""
        return 1.0 if isinstance(self.damping, str) else self.damping

    def move(self, closing: Closing) -> Float32:
        """Compute `v_i = λ ū_i + Σ_{n∈N_i} (D_n,i − λ u_n,i) / Γ_i`, an absent `u` being `ū_i`.

        With `population = "all"` an absent `u` is 0. `v_i = μ ū_i` where nobody trained the block.
        λ and μ are the trust in memory, 1 unless it is measured.

        The sum is the change that the fresh movements make to the memory's running sum. It is
        used a stretch at a time as memory makes it, so the change of the whole model is never
        held. Each old movement is read where it is replaced, and before that if trust is measured.
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
        scale = self.server_rate * closing.learning_rate
        result, own, trusted = self._trust(closing, memory, closing.learning_rate * mean)
        # v = (1 − λ)·D̄ + λ·(ū + (γ·change − absent·ū)·share), or μ·ū. The old mean is read before
        # memory changes.
        of_old, of_change = scale * trusted * mean * (1 - absent * share), scale * own * share
        of_fresh = np.float32(self.server_rate * (1 - own))

        def add_old(start: int, end: int) -> None:
            if self.adapts:
                result[start:end] *= of_fresh
            add_scaled(plan, result, start, memory.total[start:end], of_old)

        def add_change(start: int, change: Float64) -> None:
            if uneven is not None:
                change = change + uneven[start : start + len(change)]
            add_scaled(plan, result, start, change, of_change)

        over_shards(plan.parameters, closing.threads, add_old)
        memory.write(closing.fresh, add_change)
        return result

    def _trust(
        self, closing: Closing, memory: Memory, remembered: Float64
    ) -> tuple[Float32, float, Float64]:
        """Measure and note the trust in memory: the fresh mean, λ, and λ or μ for every block.

        A trust that is not measured is 1, and the fresh mean, which then has no part, is 0.
        """
        plan, parts = closing.plan, closing.fresh
        if not self.adapts:
            return np.zeros(plan.parameters, dtype=np.float32), 1.0, np.ones(plan.block_count)
        weights = [self.weight(part) for part in parts]
        pairs = [(part.blocks, weight) for part, weight in zip(parts, weights, strict=True)]
        weight = block_sums(plan, pairs)
        total = sum_terms(plan, [Term(*pair) for pair in pairs], threads=closing.threads)
        mean = divide(plan, total, weight, threads=closing.threads)
        trust = measure_trust(
            memory,
            parts,
            weights,
            learning_rate=closing.learning_rate,
            mean=mean,
            remembered=np.where(weight > 0, remembered, 0.0),
            threads=closing.threads,
        )
        closing.trusts.append(trust)
        trained = block_sums(plan, [(part.blocks, 1.0) for part in parts]) > 0
        return mean, trust.own, np.where(trained, trust.own, trust.alone)

    def _robust_move(self, closing: Closing, memory: Memory) -> Float32:
        """Compute `v_i = λ ū_i + the robust mean of D_n,i − λ u_n,i`; see `move`.

        The differences are made one device at a time, in a file.
        """
        plan, rate = closing.plan, closing.learning_rate
        everybody = np.full(plan.block_count, closing.registered, dtype=np.float64)
        holders = memory.weight if self.population == "holders" else everybody
        mean = np.divide(rate, holders, out=np.zeros_like(everybody), where=holders > 0)
        _, own, trusted = self._trust(closing, memory, mean)
        weights = [self.weight(part) for part in closing.fresh]
        differences = spool(
            (self._difference(closing, memory, part, mean, own) for part in closing.fresh),
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
        of_old = self.server_rate * trusted * mean

        def add_old(start: int, end: int) -> None:
            for low in range(start, end, PIECE):
                high = min(low + PIECE, end)
                result[low:high] *= spread(plan, share, low, high)
            add_scaled(plan, result, start, memory.total[start:end], of_old)

        over_shards(plan.parameters, closing.threads, add_old)
        memory.write(entering)
        return result

    def _difference(
        self, closing: Closing, memory: Memory, part: Contribution, mean: Float64, own: float
    ) -> Float32:
        """Return `D − λ u` of a device's fresh movement; `mean` turns the running sum into `ū`."""
        plan, ids = closing.plan, part.blocks.ids
        whole = np.zeros(plan.parameters)
        for place, within in block_runs(ids, plan.block_offsets):
            whole[place] = part.blocks.values[within]
        for piece in memory.recall(part.device, ids):
            faded = self.fading ** (closing.round - piece.made.round)
            factor = own * faded * closing.learning_rate / piece.made.learning_rate
            for place, within in block_runs(piece.blocks.ids, plan.block_offsets):
                whole[place] -= factor * piece.blocks.values[within].astype(np.float64)
        if self.population == "holders":
            lacks = ids[memory.rounds(part.device)[ids] == 0]
            for place, _ in block_runs(lacks, plan.block_offsets):
                factors = own * spread(plan, mean, place.start, place.stop)
                whole[place] -= factors * memory.total[place]
        return select_blocks(whole.astype(np.float32), ids, plan.block_offsets).values

    def moved(self, closing: Closing) -> NDArray[np.bool_]:
        """See `Rule`; memory has the fresh movements too by now, and a say if it is trusted."""
        if any(trust.alone == 0 for trust in closing.trusts):
            return Rule.moved(self, closing)
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
                faded = self.fading ** (closing.round - piece.made.round)
                factor = more * faded / piece.made.learning_rate
                for whole, within in block_runs(piece.blocks.ids, closing.plan.block_offsets):
                    lack[whole] -= factor * piece.blocks.values[within].astype(np.float64)
        return lack


@dataclass(frozen=True, kw_only=True)
class FedVarp(RamFed):
    """ram-fed with whole models, undamped and over all devices as published (FedVARP)."""

    whole_models: ClassVar[bool] = True

    damping: Damping = 1.0
    population: Population = "all"
