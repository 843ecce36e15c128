"""The report of a round: each device's part, and the terms of the papers' theorems."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.robust import THIN
from coordinator.rounds.fleet import FleetRecord
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """One device's part in a round. `level` None is a skip; bytes are of encoded blocks.

    Equal seeds give equal values of everything but `train_s`.
    """

    device: str
    level: float | None
    reason: str
    loss: float | None = None
    parameters: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    train_s: float = 0.0
    reduction_noise: float | None = None
    """`δ²_n = ‖θ − θ⊙m_n‖² / ‖θ‖²`: the share of the model that the submodel left out."""
    replayed: bool = False
    """True if the device skipped and sent its last movement again."""


@dataclass(frozen=True, slots=True)
class LevelReport:
    """One level of the model: how good it is, and what has taught its least-covered block."""

    level: float
    parameters: int
    accuracy: float | None
    """Share of correct answers on the coordinator's data, or on that of devices where it has none;
    None if it is not known."""
    devices: int
    """Devices that ever trained the block."""
    data_share: float | None
    """Their share of the training samples of all devices; None if no device said its number."""
    statistics_devices: int | None = None
    """Devices from whose data the level's BatchNorm statistics were computed; None: from the
    coordinator's data, or not at all."""
    statistics_share: float | None = None
    """Their share of the training samples of all devices; None if it is not known."""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Report of a closed round (docs/algorithms.md explains the terms)."""

    round: int
    devices: tuple[DeviceRound, ...]
    coverage_min: int
    """Smallest coverage of any block; 0 if no device trained some block."""
    coverage_mean: float
    trained_coverage_min: int
    """The papers' `Γ*`: the smallest coverage of any trained block; 0 if none was trained."""
    trained_blocks: int
    """The papers' `S*`: the number of trained blocks."""
    thin_share: float
    """Share of the trained blocks that at most two devices trained: a robust choice only clips
    them."""
    oldest_uncovered: int
    """Rounds since the longest neglected block was trained, including this round."""
    gap_bound: int | None
    """Most rounds any block can stay uncovered under these offers; None if there is no bound."""
    oldest_memory: int | None
    """`τ`: the age in rounds of the oldest movement in memory; None without one."""
    compression_noise: float
    """`w₂² = ‖C(θ) − θ‖² / ‖θ‖²` of the model that devices were sent."""
    skip_share: float
    """CCFL's `r`: the share of selected devices that did not train."""
    longest_skip: int
    """CCFL's `W`: the most rounds since a selected device last trained, plus one."""
    seconds: float
    """Duration of the round by this machine's clock."""
    time_s: float | None = None
    """Time of closing in virtual seconds since the run began; None in a run in real time."""
    levels: tuple[LevelReport, ...] = ()
    """The run's levels, largest first."""
    deploy: float | None = None
    """The level to deploy: the most accurate one, the smallest of equals; None if not known."""
    outdated: int = 0
    """Devices that skipped and did not count, because their last movement was older than the
    rule's `horizon`."""
    quarantined: tuple[str, ...] = ()
    """Devices whose bids are declined from now on."""

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the whole model; None if it is not known."""
        return next((each.accuracy for each in self.levels if each.level == 1), None)

    @property
    def best(self) -> float | None:
        """Accuracy of the level to deploy; None if it is not known."""
        return next((each.accuracy for each in self.levels if each.level == self.deploy), None)


@dataclass(frozen=True, slots=True)
class Theorem:
    """The theorems' terms that depend on which device trained which blocks."""

    coverage_min: int
    coverage_mean: float
    trained_coverage_min: int
    trained_blocks: int
    thin_share: float
    oldest_uncovered: int


def theorem_terms(
    plan: ModelPlan,
    fleet: FleetRecord,
    round: int,
    counted: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> Theorem:
    """Compute the terms of a round that `fleet` already includes."""
    coverage = plan.coverage(counted.values())
    trained = coverage[coverage > 0]
    return Theorem(
        int(coverage.min()),
        float(coverage.mean()),
        int(trained.min()) if len(trained) else 0,
        len(trained),
        float((trained <= THIN).mean()) if len(trained) else 0.0,
        round - int(fleet.last_covered.min()),
    )


def level_reports(
    plan: ModelPlan, fleet: FleetRecord, scores: LevelScores
) -> tuple[LevelReport, ...]:
    """Report every level of the model that a record of the fleet already includes."""
    found, total = [], fleet.total_samples
    for each in scores.levels:
        held = plan.covers(plan.choose(each.groups))
        found.append(
            LevelReport(
                each.level,
                plan.submodel_parameters(each.groups),
                each.accuracy,
                int(fleet.teachers.devices[held].min()),
                int(fleet.teachers.samples[held].min()) / total if total else None,
                each.statistics_devices,
                each.statistics_share,
            )
        )
    return tuple(found)


def device_round(
    plan: ModelPlan,
    bid: Bid,
    arrival: Arrival | None,
    *,
    norms: NDArray[np.float64] | None,
    bytes_down: int,
) -> DeviceRound:
    """Report one device's part; `norms`, per block, belong to the model it was sent.

    Without them, `reduction_noise` is 0.
    """
    if arrival is None:
        late = f"skip: offered {bid.level or 0:.0%} but no movement came in time"
        return DeviceRound(bid.device, None, bid.reason if bid.level is None else late)
    if bid.level is None:
        size = arrival.size_bytes
        return DeviceRound(bid.device, None, bid.reason, bytes_up=size, replayed=True)
    noise = 0.0 if norms is None else reduction_noise(plan, arrival.groups, norms)
    return DeviceRound(
        device=bid.device,
        level=bid.level,
        reason=bid.reason,
        loss=arrival.movement.loss,
        parameters=int(plan.block_sizes[arrival.contribution.blocks.ids].sum()),
        bytes_down=bytes_down,
        bytes_up=arrival.size_bytes,
        train_s=arrival.movement.train_s,
        reduction_noise=noise,
    )


def reduction_noise(
    plan: ModelPlan, groups: Mapping[str, tuple[int, ...]], norms: NDArray[np.float64]
) -> float:
    """The share of a model's squared norm that lies outside these groups."""
    kept = plan.covers(plan.choose(groups))
    total = float(norms.sum())
    return float(norms[~kept].sum()) / total if total else 0.0


def longest_skip(fleet: FleetRecord, round: int, selected: Set[str]) -> int:
    """Rounds since the longest-idle selected device last trained, plus one.

    A device that never trained counts from the first round.
    """
    if len(selected) > len(fleet.trained):
        return round + 1  # some device never trained
    return max((round - fleet.trained.get(name, 0) + 1 for name in selected), default=1)
