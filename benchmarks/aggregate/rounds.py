"""Plans, devices and rounds for measurements: made by hand, without torch or training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Memory
from coordinator.aggregate.rules import Closing, Rule
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from edge_sdk.protocol.encoding.codec import encode_blocks
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import Movement
from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.plan import Groups, ModelPlan
from edge_sdk.protocol.plan.specs import Axis, Dim, Tensor, split_atoms

GROUPS = 8
LEARNING_RATE = 0.1
MOVEMENT = 1e-3
"""Standard deviation of the values of movements."""


def perceptron_plan(inputs: int, widths: Sequence[int], outputs: int) -> ModelPlan:
    """Make the plan of a perceptron with these hidden layers, each an axis of `GROUPS` groups."""
    axes = tuple(Axis(f"layer-{n}", split_atoms(width, GROUPS)) for n, width in enumerate(widths))
    dims = [Dim(inputs), *(Dim(width, axis) for axis, width in enumerate(widths)), Dim(outputs)]
    tensors: list[Tensor] = []
    for number, (before, after) in enumerate(pairwise(dims)):
        tensors.append(Tensor(f"{number}.weight", "float32", (after, before)))
        tensors.append(Tensor(f"{number}.bias", "float32", (after,)))
    return ModelPlan(axes, tuple(tensors))


@dataclass(frozen=True, kw_only=True)
class RoundSizes:
    """Sizes of a model of 25 M parameters, and of a round of it."""

    inputs: int = 1024
    widths: tuple[int, ...] = (2048,) * 6
    outputs: int = 1000
    devices: int = 32
    level: float = 0.5
    threads: int = 2

    @cached_property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return perceptron_plan(self.inputs, self.widths, self.outputs)

    @property
    def plan_name(self) -> str:
        """Millions of parameters, as part of a figure's name."""
        return f"{self.plan.parameters / 1e6:.0f}m"


def device_name(number: int) -> str:
    """Return a name; names sort like the numbers."""
    return f"device-{number:06}"


def random_groups(plan: ModelPlan, level: float, stream: np.random.Generator) -> Groups:
    """Choose random groups on every axis, as many as the level allows."""
    return {
        axis.name: stream.permutation(len(axis.groups))[: axis.wanted(level)].tolist()
        for axis in plan.axes
    }


def random_values(size: int, stream: np.random.Generator) -> Float32:
    """Draw normally distributed values of a movement."""
    values = stream.standard_normal(size, dtype=np.float32)
    values *= np.float32(MOVEMENT)
    return values


def closing_of(
    plan: ModelPlan,
    round: int,
    movements: Sequence[tuple[str, Float32]],
    level: float,
    stream: np.random.Generator,
    *,
    registered: int,
    memory: Memory | None = None,
    threads: int = 1,
) -> Closing:
    """Make a round in which these devices (names, sorted, and values) trained random groups.

    Uses as many of a device's values as its blocks hold, without copying.
    """
    fresh = []
    for device, values in movements:
        ids = plan.block_ids(plan.choose(random_groups(plan, level, stream)))
        size = int(plan.block_sizes[ids].sum())
        blocks = Blocks(ids, values[:size])
        fresh.append(Contribution(device, round, blocks, LEARNING_RATE, level, 1))
    return Closing(
        plan=plan,
        round=round,
        theta=np.zeros(plan.parameters, dtype=np.float32),
        learning_rate=LEARNING_RATE,
        fresh=fresh,
        registered=registered,
        memory=memory,
        threads=threads,
    )


def rounds_config(plan: ModelPlan, rule: Rule, rounds: int, **more: Any) -> RoundsConfig:
    """Make the settings of a run with random masks; `more` are further ones."""
    return RoundsConfig(
        plan=plan,
        rule=rule,
        masks=make_masks("random"),
        local_rule=LocalRule(learning_rate=LEARNING_RATE),
        rounds=rounds,
        steps=1,
        batch_size=1,
        seed=0,
        **more,
    )


def movement_of(
    plan: ModelPlan,
    groups: Groups,
    values: Float32,
    stream: np.random.Generator,
    *,
    device: str,
    round: int,
    level: float = 1.0,
    encoding: Encoding | None = None,
) -> Movement:
    """Make a device's movement of these groups, from as many values as their blocks hold."""
    ids = plan.block_ids(plan.choose(groups))
    blocks = Blocks(ids, values[: int(plan.block_sizes[ids].sum())])
    return Movement(
        device=device,
        round=round,
        plan_hash=plan.hash,
        payload=encode_blocks(plan, groups, blocks, encoding or Encoding(), stream),
        statistics={},
        learning_rate=LEARNING_RATE,
        level=level,
        samples=1,
        loss=1.0,
        train_s=1.0,
    )


def fill(memory: Memory, devices: range, values: Float32) -> None:
    """Remember devices in full, as of round 1, in one commit."""
    plan = memory.plan
    ids = np.arange(plan.block_count, dtype=np.int64)
    blocks = Blocks(ids, values[: plan.parameters])
    memory.advance(1)
    memory.write([Contribution(device_name(n), 1, blocks, LEARNING_RATE, 1.0, 1) for n in devices])
    memory.commit()
