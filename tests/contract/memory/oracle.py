"""The naive memory: a dictionary of (device, block), everything summed anew when asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Made, MemoryConfig, MemoryType
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor

PLAN = ModelPlan(
    axes=(Axis("a", (2, 1, 3)), Axis("b", (1, 4))),
    tensors=(
        Tensor("w", "float32", (Dim(6, 0), Dim(5, 1))),
        Tensor("v", "float32", (Dim(5, 1),)),
        Tensor("u", "float32", (Dim(3),)),
    ),
)
"""Nine blocks of 1 to 12 parameters."""


@dataclass(frozen=True)
class Entry:
    """One block of one device."""

    made: Made
    values: NDArray[np.float32]


def bound(dtype: MemoryType, values: NDArray[np.float32]) -> NDArray[np.float64]:
    """How far what is held of a block may be from what was given, as `values.py` states it."""
    given = np.abs(values.astype(np.float64))
    most = given.max(initial=0.0)
    if dtype == "fp32":
        return np.zeros(len(values))
    if dtype == "fp16":
        short: NDArray[np.float64] = np.maximum(2.0**-11 * given, 2.0**-31 * most) + 2.0**-150
        return short
    return np.full(len(values), most / 254 * (1 + 2.0**-14) + 2.0**-150)


class Oracle:
    """What a memory should hold, and what its sums should be."""

    def __init__(self, plan: ModelPlan, config: MemoryConfig) -> None:
        self.plan = plan
        self.config = config
        self.now = 0
        self.held: dict[tuple[str, int], Entry] = {}

    def advance(self, now: int) -> None:
        self.now = now
        self.held = {
            where: entry
            for where, entry in self.held.items()
            if now - entry.made.round <= self.config.max_staleness
        }

    def write(self, contributions: list[Contribution]) -> NDArray[np.float64]:
        """Take movements one by one; returns the change of `total` by what was given."""
        change = np.zeros(self.plan.parameters)
        for one in sorted(contributions, key=lambda c: (c.device, c.made)):
            kinds = {"uniform": 1.0, "samples": float(one.samples), "level": one.level}
            weight = kinds[self.config.weighting]
            made = Made(one.made, one.learning_rate, one.level, weight)
            start = 0
            for block in one.blocks.ids.tolist():
                size = int(self.plan.block_sizes[block])
                values = one.blocks.values[start : start + size].copy()
                start += size
                old = self.held.get((one.device, block))
                if self.now - one.made > self.config.max_staleness:
                    continue
                if old is not None and old.made.round >= one.made:
                    continue
                low = int(self.plan.block_offsets[block])
                change[low : low + size] += self._term(made, values)
                if old is not None:
                    change[low : low + size] -= self._term(old.made, old.values)
                self.held[one.device, block] = Entry(made, values)
        return change

    def rounds(self, device: str) -> list[int]:
        return [
            self.held[device, block].made.round if (device, block) in self.held else 0
            for block in range(self.plan.block_count)
        ]

    def oldest(self) -> int | None:
        return min((entry.made.round for entry in self.held.values()), default=None)

    def entries(self) -> list[int]:
        return [
            sum(where[1] == block for where in self.held) for block in range(self.plan.block_count)
        ]

    def weight(self) -> list[float]:
        return [
            sum(entry.made.weight for where, entry in self.held.items() if where[1] == block)
            for block in range(self.plan.block_count)
        ]

    def total(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The sum over the entries as given, and how far that of the held ones may be off."""
        total, slack = np.zeros(self.plan.parameters), np.zeros(self.plan.parameters)
        for (_, block), entry in self.held.items():
            low = int(self.plan.block_offsets[block])
            part = slice(low, low + len(entry.values))
            total[part] += self._term(entry.made, entry.values)
            factor = self._term(entry.made, np.ones(1, dtype=np.float32))[0]
            slack[part] += factor * bound(self.config.memory_type, entry.values)
        return total, slack

    def _term(self, made: Made, values: NDArray[np.float32]) -> NDArray[np.float64]:
        term: NDArray[np.float64] = values.astype(np.float64)
        for _ in range(self.now - made.round):
            term = term * self.config.damping
        return term * made.weight / made.learning_rate


def movement(
    device: str,
    made: int,
    ids: list[int],
    seed: int,
    *,
    magnitude: float = 1.0,
    learning_rate: float = 0.1,
    samples: int = 1,
    plan: ModelPlan = PLAN,
) -> Contribution:
    """Random values of some blocks; about one in eight is zero."""
    stream = np.random.default_rng(seed)
    chosen = np.array(sorted(set(ids)), dtype=np.int64)
    size = int(plan.block_sizes[chosen].sum())
    values = stream.standard_normal(size) * (stream.random(size) > 1 / 8) * magnitude
    blocks = Blocks(chosen, values.astype(np.float32))
    level = (0.25, 0.5, 1.0)[seed % 3]
    return Contribution(device, made, blocks, learning_rate, level, samples)
