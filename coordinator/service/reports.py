"""Reports made from the state machines: of a closed round, or of a window of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import GroupsByAxis
from coordinator.aggregate.memory import Memory
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState
from coordinator.rounds.report import (
    DeviceRound,
    RoundReport,
    device_round,
    level_reports,
    longest_skip,
    reduction_noise,
    theorem_terms,
)
from coordinator.rounds.reputation import quarantined
from coordinator.rounds.synchronous import Commit, RoundsConfig, RoundsState
from coordinator.service.close import Arrivals
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.round import Bid

Norms = NDArray[np.float64]


def report_round(
    config: RoundsConfig,
    state: RoundsState,
    commit: Commit,
    arrivals: Arrivals,
    memory: Memory | None,
    scores: LevelScores,
    *,
    norms: Norms,
    noise: float,
    fetched: Mapping[str, int],
    seconds: float,
) -> RoundReport:
    """Report a round. `norms`, `noise` and `fetched` (bytes) belong to the model it sent out,
    `scores` to the one it made.

    `state` is the machine's state when it asked for the commit.
    """
    plan, round = config.plan, commit.round
    fresh = {device: arrivals[device, round] for device in commit.fresh}
    terms = theorem_terms(
        plan, state.fleet, round, {device: arrival.groups for device, arrival in fresh.items()}
    )
    levels = [arrival.contribution.level for arrival in fresh.values()]
    # Of alternatives, other levels' groups are never trained.
    bounded = levels and not plan.has_alternatives
    oldest = None if memory is None else memory.oldest()
    heard = {*commit.fresh, *commit.replayed}
    lines = [
        device_round(
            plan,
            bid,
            arrivals.get((name, round)) if name in heard else None,
            norms=norms,
            bytes_down=fetched.get(name, 0),
        )
        for name, bid in sorted(state.bids.items())
    ]
    return RoundReport(
        round=round,
        devices=tuple(lines),
        coverage_min=terms.coverage_min,
        coverage_mean=terms.coverage_mean,
        trained_coverage_min=terms.trained_coverage_min,
        trained_blocks=terms.trained_blocks,
        thin_share=terms.thin_share,
        oldest_uncovered=terms.oldest_uncovered,
        gap_bound=config.masks.longest_gap(plan, levels) if bounded else None,
        oldest_memory=None if oldest is None else round - oldest,
        compression_noise=noise,
        skip_share=1 - len(commit.fresh) / max(1, len(state.selected)),
        longest_skip=longest_skip(state.fleet, round, state.selected),
        outdated=_outdated(config, commit, memory),
        seconds=seconds,
        levels=level_reports(plan, state.fleet, scores),
        deploy=scores.deploy,
        quarantined=tuple(quarantined(state.fleet.standings)),
    )


def _outdated(config: RoundsConfig, commit: Commit, memory: Memory | None) -> int:
    """Count the silent devices whose entries in memory are all too old for the rule."""
    within = config.rule.counts_within
    if within is None or memory is None:
        return 0
    newest = [int(memory.rounds(name).max(initial=0)) for name in commit.silent]
    return sum(0 < made < commit.round - within for made in newest)


def report_updates(
    config: FragmentsConfig,
    state: FragmentsState,
    updates: Sequence[tuple[DeviceRound, GroupsByAxis]],
    skips: Mapping[str, Bid],
    scores: LevelScores,
    *,
    norms: Norms,
    noise: float,
    seconds: float,
    every: int = 1,
) -> RoundReport:
    """Report some updates of an asynchronous run; `every` of them count as a round.

    An update is its line, which gets its `reduction_noise` here, and the groups it trained.
    """
    plan = config.plan
    counted = {f"{number}": groups for number, (_, groups) in enumerate(updates)}
    terms = theorem_terms(plan, state.fleet, state.version, counted)
    lines = [
        replace(line, reduction_noise=reduction_noise(plan, groups, norms))
        for line, groups in updates
    ]
    trained = {line.device for line in lines}
    lines += [
        device_round(plan, bid, None, norms=norms, bytes_down=0)
        for name, bid in skips.items()
        if name not in trained
    ]
    longest = longest_skip(state.fleet, state.version, state.devices)
    return RoundReport(
        round=-(-state.version // every),
        devices=tuple(sorted(lines, key=lambda line: line.device)),
        coverage_min=terms.coverage_min,
        coverage_mean=terms.coverage_mean,
        trained_coverage_min=terms.trained_coverage_min,
        trained_blocks=terms.trained_blocks,
        thin_share=terms.thin_share,
        oldest_uncovered=-(-terms.oldest_uncovered // every),
        gap_bound=None,  # a device may take any time to train its fragment
        oldest_memory=None,
        compression_noise=noise,
        skip_share=1 - len(trained) / max(1, len(state.devices)),
        longest_skip=-(-longest // every),
        seconds=seconds,
        levels=level_reports(plan, state.fleet, scores),
        deploy=scores.deploy,
        quarantined=tuple(quarantined(state.fleet.standings)),
    )
