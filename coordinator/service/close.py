"""Closing a round: applies the rule, updates the model and writes the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.contribution import Contribution, PackedBlocks
from coordinator.aggregate.memory import DiskMemory, Memory, MemoryConfig, MemoryType, RamMemory
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import ServerMoments
from coordinator.aggregate.robust.clipping import clipped
from coordinator.aggregate.robust.scratch import spool
from coordinator.aggregate.rules import Closing
from coordinator.rounds.synchronous import Commit, RoundsConfig, RoundsState
from edge_sdk.protocol.plan.blocks import Blocks

Arrivals = Mapping[tuple[str, int], Arrival]
"""Kept movements, by device and the round they were kept for."""


def open_memory(
    config: RoundsConfig,
    folder: Path | None,
    *,
    memory_type: MemoryType = "fp32",
    threads: int = 1,
    devices: int = 0,
) -> Memory | None:
    """Open the memory that a run's rule needs, in RAM or in a folder; None if it needs none.

    `devices` is the number expected. Raises `ConfigError` if the disk has no room for them, and
    `MemoryStoreError` if the folder cannot be used.
    """
    rule = config.rule
    if rule.remembers == "nothing":
        return None
    settings = MemoryConfig(
        memory_type=memory_type,
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
    moments: ServerMoments | None = None,
    threads: int = 1,
    scratch: Path | None = None,
) -> None:
    """Apply the rule to a round's arrivals. The result does not depend on their order.

    `state` is the machine's state when it asked for the commit. The caller commits the memory after
    making the model durable. `moments` are those of the server's optimiser; None: there is none.
    `scratch` is a folder with room for the decoded values of compressed
    movements; None means the folder for temporary files.
    """
    rule, round = config.rule, commit.round
    fresh = [arrivals[device, round] for device in commit.fresh]
    parts = [arrival.contribution for arrival in fresh]
    parts += [arrivals[device, round].contribution for device in commit.replayed]
    if memory is not None:
        late = [part for key in commit.late if rule.takes(part := arrivals[key].contribution)]
        parts += sorted(late, key=lambda part: (part.device, part.made))
    parts = _unpacked(parts, scratch)
    first_late = len(fresh) + len(commit.replayed)
    if config.robust.active:
        parts = clipped(
            config.plan,
            config.robust,
            parts[:first_late],
            parts[first_late:],
            threads=threads,
            scratch=scratch,
        )
    closing = Closing(
        plan=config.plan,
        round=round,
        theta=model.theta,
        learning_rate=config.local_rule.learning_rate,
        fresh=parts[: len(fresh)],
        replayed=parts[len(fresh) : first_late],
        silent=commit.silent,
        registered=rule.total_weight(len(state.devices), state.fleet.total_samples),
        memory=memory,
        robust=config.robust,
        threads=threads,
        scratch=scratch,
    )
    movement = rule.move(closing)
    if moments is not None:
        config.server_optimizer.step(
            config.plan, movement, rule.moved(closing), moments, round=round, threads=threads
        )
    if memory is not None and parts[first_late:]:
        memory.write(parts[first_late:])
    model.commit(movement, fresh)


def _unpacked(parts: Sequence[Contribution], scratch: Path | None) -> list[Contribution]:
    """Decode packed movements, one at a time: zstd and top-k cannot be read from the middle."""
    packed = [part.blocks for part in parts if isinstance(part.blocks, PackedBlocks)]
    if not packed:
        return list(parts)
    decoded = iter(spool((blocks.values for blocks in packed), scratch))
    return [
        replace(part, blocks=Blocks(part.blocks.ids, next(decoded)))
        if isinstance(part.blocks, PackedBlocks)
        else part
        for part in parts
    ]
