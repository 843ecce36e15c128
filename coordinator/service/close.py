"""Closing a round: applies the rule, updates the model and writes the memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.contribution import Contribution, PackedBlocks
from coordinator.aggregate.memory import (
    NO_LIMIT,
    DiskMemory,
    Memory,
    MemoryConfig,
    MemoryType,
    RamMemory,
)
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import ServerMoments
from coordinator.aggregate.robust import THIN
from coordinator.aggregate.robust.agreement import agreements
from coordinator.aggregate.robust.clipping import clipped
from coordinator.aggregate.robust.root import root_yardstick, trusted
from coordinator.aggregate.robust.scratch import spool
from coordinator.aggregate.rules import Closing, Scaffold
from coordinator.aggregate.rules.trust import MemoryTrust
from coordinator.rounds.synchronous import Commit, RoundsConfig, RoundsState
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.encoding.codec import decode_blocks
from edge_sdk.protocol.errors import NonFiniteError
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job

log = logging.getLogger(__name__)

ROOT = "root"
"""Name in the root's random streams, whose purposes differ from those of a device of that name."""

Arrivals = Mapping[tuple[str, int], Arrival]
"""Kept movements, by device and the round they were kept for."""


class RootTrainer:
    """Trains the whole model as a device of the run would, from the same weights."""

    def __init__(self, make_backend: Callable[[], Backend], data: ArrayData) -> None:
        """`make_backend` is called when the first round closes."""
        self._make_backend = make_backend
        self._backend: Backend | None = None
        self._data = data

    def __call__(self, config: RoundsConfig, model: GlobalModel, round: int) -> Blocks | None:
        """Return the movement of a round, from the model before it; None if training diverged.

        The same seed, round and model give the same movement.
        """
        if self._backend is None:
            self._backend = self._make_backend()
        plan, rule = config.plan, config.local_rule
        groups = plan.full_groups()
        _, blocks = decode_blocks(plan, model.serve().cut(groups))
        own = () if rule.classes == "all" else tuple(np.unique(self._data.targets).tolist())
        job = Job(
            groups=groups,
            weights=plan.assemble(blocks, groups),
            buffers=plan.cut_buffers(model.buffers, groups),
            rule=rule,
            mask_stream=stream(config.seed, ROOT, round, "root dropout"),
            widths=config.narrower(round).within(groups),
            width_stream=stream(config.seed, ROOT, round, "root widths"),
            classes=own,
        )
        batches = self._data.batches(
            config.steps, config.batch_size, stream(config.seed, ROOT, round, "root batches")
        )
        try:
            trained = self._backend.train(job, batches)
        except NonFiniteError as error:
            log.error("round %d: the root's training failed, so devices are only clipped", round)
            log.error("%s", error)
            return None
        return plan.scatter(trained.movement, groups)


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
        damping=rule.fading,
        max_staleness=NO_LIMIT if rule.ageless else config.max_staleness,
        weighting=rule.weighting,
        sums=rule.sums,
        threads=threads,
    )
    if folder is None:
        return RamMemory(config.plan, settings)
    return DiskMemory(folder, config.plan, settings, devices=devices)


@dataclass(frozen=True, slots=True)
class RoundFindings:
    """Findings about a round's movements."""

    agreements: Mapping[str, float]
    """Agreement of each device with the others; empty unless the settings ask for it."""
    trust: MemoryTrust | None
    """None if the rule measures none."""


@dataclass(frozen=True, slots=True)
class RoundWeights:
    """Numbers of the fleet that count when a round closes. Any thread may read them."""

    devices: int
    """Devices that ever joined."""
    registered: float
    """Weight of all of them."""
    asked: float
    """Weight of those that were selected."""


def weights_of(config: RoundsConfig, state: RoundsState, commit: Commit) -> RoundWeights:
    """Return the weights of a round; `state` is the machine's when it asked for the commit."""
    rule, fleet = config.rule, state.fleet
    names = [*commit.fresh, *commit.replayed, *commit.silent]
    weighs = rule.weighting == "samples"
    samples = sum(fleet.samples.get(name, 0) for name in names) if weighs else 0
    return RoundWeights(
        devices=len(state.devices),
        registered=rule.total_weight(len(state.devices), fleet.total_samples),
        asked=rule.total_weight(len(names), samples),
    )


def close_round(
    config: RoundsConfig,
    weights: RoundWeights,
    commit: Commit,
    model: GlobalModel,
    memory: Memory | None,
    arrivals: Arrivals,
    *,
    moments: ServerMoments | None = None,
    threads: int = 1,
    scratch: Path | None = None,
    root: Blocks | None = None,
) -> RoundFindings:
    """Apply the rule to a round's arrivals. The result does not depend on their order.

    The caller commits the memory after making the model durable. `moments` are those of the
    server's optimiser, or the rule's vectors; None: there are none. `scratch` is a folder with room
    for the decoded values of compressed movements and for shortened ones; None means the folder for
    temporary files. `root` is the root's movement, for `robust = "root"`; None: devices are only
    clipped.
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
        _note_thin(config, round, parts[: len(fresh)])
        parts = _defended(config, parts, first_late, root, threads=threads, scratch=scratch)
    compared: dict[str, float] = {}
    if config.judges_agreement:
        compared = agreements(config.plan, parts[: len(fresh)], threads=threads)
    closing = Closing(
        plan=config.plan,
        round=round,
        theta=model.theta,
        learning_rate=config.local_rule.learning_rate,
        fresh=parts[: len(fresh)],
        replayed=parts[len(fresh) : first_late],
        silent=commit.silent,
        registered=weights.registered,
        asked=weights.asked,
        memory=memory,
        robust=config.robust,
        threads=threads,
        scratch=scratch,
    )
    movement = rule.move(closing)
    control = model.serve_control()
    if isinstance(rule, Scaffold) and moments is not None and control is not None:
        rule.settle(closing, movement, moments, control.decoded, config.steps)
    elif moments is not None:
        config.server_optimizer.step(
            config.plan, movement, rule.moved(closing), moments, round=round, threads=threads
        )
    if memory is not None and parts[first_late:]:
        memory.write(parts[first_late:])
    model.commit(movement, fresh, median=config.robust.active, threads=threads)
    if control is not None and moments is not None:
        model.steer(moments.current[0], weights.devices)
    return RoundFindings(compared, closing.trusts[0] if closing.trusts else None)


def _note_thin(config: RoundsConfig, round: int, fresh: Sequence[Contribution]) -> None:
    """Log how many blocks have too few movements for a robust mean, or a round for any defence."""
    coverage = np.zeros(config.plan.block_count, dtype=np.int64)
    for part in fresh:
        coverage[part.blocks.ids] += 1
    trained, thin = coverage > 0, int(((coverage > 0) & (coverage <= THIN)).sum())
    if len(fresh) <= THIN and config.robust.name != "clip":
        log.info("round %d: %d movements are too few to compare", round, len(fresh))
    elif thin and config.robust.combines:
        log.info(
            "round %d: %d of %d trained blocks came from one or two devices, and are only clipped",
            *(round, thin, int(trained.sum())),
        )


def _defended(
    config: RoundsConfig,
    parts: Sequence[Contribution],
    cohort: int,
    root: Blocks | None,
    *,
    threads: int,
    scratch: Path | None,
) -> list[Contribution]:
    """Shorten movements that are too long, and weigh them by their agreement with the root's.

    The first `cohort` of them are compared with one another, the rest with those.
    """
    plan, limit = config.plan, None
    if root is not None:
        limit = root_yardstick(plan, root, config.local_rule.learning_rate)
        parts = trusted(plan, root, parts)
    compared, late = parts[:cohort], parts[cohort:]
    return clipped(
        plan, config.robust, compared, late, root=limit, threads=threads, scratch=scratch
    )


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
