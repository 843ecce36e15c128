"""Federations in this process, with the settings that tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import AsyncRule, make_rule
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.federation import Federation, Member
from coordinator.task.task import Task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.train.backend import Backend


def random_data(random: np.random.Generator, samples: int) -> ArrayData:
    """Six numbers and one of three classes each."""
    inputs = random.normal(size=(samples, 6)).astype(np.float32)
    return ArrayData((inputs,), random.integers(0, 3, size=samples))


def make_federation(
    task: Task,
    members: Sequence[Member],
    make_backend: Callable[[], Backend],
    *,
    rule: str = "ra-fed",
    length: int = 3,
    mask: str = "random",
    down: str = "fp32",
    run: dict[str, Any] | None = None,
    **config: Any,
) -> Federation:
    """A run of so many rounds, or updates; `run` is for the federation, the rest its settings."""
    made = make_rule(rule)
    common: dict[str, Any] = {"plan": task.plan, "masks": make_masks(mask), **config}
    machine = (
        FragmentsConfig(rule=made, updates=length, **common)
        if isinstance(made, AsyncRule)
        else RoundsConfig(min_participants=0, rule=made, rounds=length, **common)
    )
    model = GlobalModel(task.plan, task.weights, task.buffers, encoding=Encoding.parse(down))
    return Federation(machine, model, make_backend, members, **(run or {}))
