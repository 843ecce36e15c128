"""One block of two parameters, and rounds about it that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Memory, MemoryConfig, RamMemory
from coordinator.aggregate.rules import Closing, Rule
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.plan.specs import Dim, Tensor

PLAN = ModelPlan((), (Tensor("w", "float32", (Dim(2),)),))


def say(
    device: str,
    value: float,
    *,
    made: int,
    rate: float = 0.1,
    samples: int = 1,
    keeps_copy: bool = False,
) -> Contribution:
    """A movement of both parameters by `value` and twice that."""
    blocks = Blocks(np.array([0]), np.array([value, 2 * value], dtype=np.float32))
    return Contribution(device, made, blocks, rate, 1.0, samples, keeps_copy)


def memory_for(rule: Rule, *, max_staleness: int = 50) -> RamMemory:
    """An empty memory as a run with this rule opens it."""
    config = MemoryConfig(
        memory_type="fp32",
        damping=rule.damping,
        max_staleness=max_staleness,
        weighting=rule.weighting,
        sums=rule.sums,
    )
    return RamMemory(PLAN, config)


def move(
    rule: Rule,
    round: int,
    fresh: Mapping[str, float],
    *,
    memory: Memory | None = None,
    replayed: tuple[Contribution, ...] = (),
    silent: tuple[str, ...] = (),
    registered: float = 0.0,
    rate: float = 0.1,
    theta: float = 0.0,
    samples: Mapping[str, int] | None = None,
) -> float:
    """What the first parameter moves by in a round with these fresh movements."""
    sizes = {} if samples is None else samples
    closing = Closing(
        plan=PLAN,
        round=round,
        theta=np.array([theta, 2 * theta], dtype=np.float32),
        learning_rate=rate,
        fresh=[
            say(name, fresh[name], made=round, rate=rate, samples=sizes.get(name, 1))
            for name in sorted(fresh)
        ],
        replayed=replayed,
        silent=silent,
        registered=registered,
        asked=len(fresh) + len(replayed) + len(silent),
        memory=memory,
    )
    first, second = rule.move(closing).tolist()
    assert abs(second - 2 * first) <= 1e-6 * (1 + abs(first))
    return float(first)
