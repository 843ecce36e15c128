"""Closing a round: the rule runs, the model moves, memory takes what is new, all in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.memory import DiskMemory, Dtype, Memory, MemoryConfig, RamMemory
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import Closing
from coordinator.rounds.synchronous import Commit, RoundsConfig, RoundsState

Arrivals = Mapping[tuple[str, int], Arrival]
"""Kept uploads, by device and the round they were kept for."""


def open_memory(
    config: RoundsConfig,
    folder: Path | None,
    *,
    dtype: Dtype = "fp32",
    threads: int = 1,
    devices: int = 0,
) -> Memory | None:
    """The memory that a run's rule needs, in RAM or in a folder; None if it needs none.

    `devices`: how many are expected. Raises `MemoryStoreError` if the disk has no room for them.
    """
    rule = config.rule
    if rule.remembers == "nothing":
        return None
    settings = MemoryConfig(
        dtype=dtype,
        damping=rule.damping,
        max_staleness=config.max_staleness,
        weighting=rule.weighting,
        sums=rule.sums,
        threads=threads,
    )
    if folder is None:
        return RamMemory(config.plan, settings)
    return DiskMemory(folder, config.plan, settings, devices=devices)


def close_round(
    config: RoundsConfig,
    state: RoundsState,
    commit: Commit,
    model: GlobalModel,
    memory: Memory | None,
    arrivals: Arrivals,
    *,
    threads: int = 1,
    commit_memory: bool = True,
) -> None:
    """Apply the rule to a round's arrivals. The result does not depend on the order they came in.

    `state` is that of the machine as it asked for the commit. `commit_memory`: False if the caller
    commits the memory, when it has made the model durable.
    """
    rule, round = config.rule, commit.round
    fresh = [arrivals[device, round] for device in commit.fresh]
    closing = Closing(
        plan=config.plan,
        round=round,
        theta=model.theta,
        learning_rate=config.local_rule.learning_rate,
        fresh=[arrival.contribution for arrival in fresh],
        replayed=[arrivals[device, round].contribution for device in commit.replayed],
        silent=commit.silent,
        registered=rule.total_weight(len(state.devices), state.fleet.total_samples),
        memory=memory,
        threads=threads,
    )
    movement = rule.move(closing)
    if memory is not None:
        late = [part for key in commit.late if rule.takes(part := arrivals[key].contribution)]
        if late:
            memory.write(sorted(late, key=lambda part: (part.device, part.made)))
    model.commit(movement, fresh)
    if memory is not None and commit_memory:
        memory.commit()
