"""The report of a round: each device's part, and the terms of the papers' theorems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.arrivals import Arrival
from coordinator.aggregate.robust import THIN
from coordinator.rounds.fleet import FleetRecord
from coordinator.task.levels import LevelScores
from edge_sdk.protocol.messages.round import Bid
from edge_sdk.protocol.plan.plan import ModelPlan

SILENT = "silent"
"""Code of a device that offered, and sent no movement in time."""


@dataclass(frozen=True, slots=True)
class DeviceRound:
    """One device's part in a round. `level` None is a skip; bytes are of encoded blocks.

    Equal seeds give equal values of everything but `train_s` and `energy_j`.
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
    staleness: int | None = None
    """Changes of the model since the version it trained from; None in a synchronous run."""
    code: str | None = None
    """Cause of a skip in one word, for programs: as the device named it, `silent` if it offered
    and sent nothing in time, `rejected` if its movement was refused; None: it trained, or named
    none."""
    energy_j: float | None = None
    """Joules that training took, as the device accounts for them; None: it does not know."""


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
    own_accuracy: float | None = None
    """Mean over devices of each one's accuracy on test data of its own; None if not known."""
    own_deviation: float | None = None
    """Standard deviation of these accuracies between the devices; None if not known."""


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
    trained_regions: int = 0
    """`S*` counted in regions: the groups of all axes that some device trained."""
    outdated: int = 0
    """Devices that skipped and did not count, because their last movement was older than the
    rule's `horizon`."""
    quarantined: tuple[str, ...] = ()
    """Devices whose bids are declined from now on."""
    memory_trust: float | None = None
    """λ: the share of memory that counted in blocks that were trained; None if not measured."""
    memory_trust_alone: float | None = None
    """μ: the share of memory that moved blocks nobody trained; None if not measured."""
    memory_ratio: float | None = None
    """`‖ū‖ / ‖D̄‖`: the remembered mean movement relative to the fresh one, over trained blocks that
    memory has; None if not measured, or if there is none."""
    staleness_mean: float | None = None
    """Mean `staleness` of the movements; None in a synchronous run, or if there are none."""
    staleness_max: int | None = None
    """Largest `staleness` of them, the bound of Fed-RAA's theorem; None likewise."""

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the whole model; None if it is not known."""
        return next((each.accuracy for each in self.levels if each.level == 1), None)

    @property
    def deviation(self) -> float | None:
        """Standard deviation between devices of their accuracies on test data of their own.

        That of the whole model; None if it is not known.
        """
        return next((each.own_deviation for each in self.levels if each.level == 1), None)

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
    trained_regions: int


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
        _trained_regions(plan, counted.values()),
    )


def _trained_regions(plan: ModelPlan, counted: Iterable[Mapping[str, tuple[int, ...]]]) -> int:
    """Count the groups that some device trained; of alternatives, every level has its own."""
    trained: dict[str, set[int]] = {axis.name: set() for axis in plan.axes if not axis.alternatives}
    for groups in counted:
        for axis, known in trained.items():
            known.update(groups[axis])
    return sum(map(len, trained.values()))


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The theorems' terms over all rounds of a run so far; None: there was nothing to measure."""

    coverage: int | None = None
    """`Γ*`: the smallest coverage of any trained block in any round."""
    blocks: int | None = None
    """`S*`: the smallest number of trained blocks in any round."""
    regions: int | None = None
    """`S*` in regions: the smallest number of trained groups in any round."""
    staleness: int | None = None
    """`τ`: the age in rounds of the oldest movement that memory ever held at the end of a round."""

    def after(self, report: RoundReport) -> RunTerms:
        """Return the terms with one more round."""
        return self.after_line(
            {
                "trained_coverage_min": report.trained_coverage_min,
                "trained_blocks": report.trained_blocks,
                "trained_regions": report.trained_regions,
                "oldest_memory": report.oldest_memory,
            }
        )

    def after_line(self, line: Mapping[str, Any]) -> RunTerms:
        """Return the terms with one more round, as a line of the history has it."""
        # A round in which nobody trained has no Γ, but S = 0.
        return RunTerms(
            _least(self.coverage, line["trained_coverage_min"] or None),
            _least(self.blocks, line["trained_blocks"]),
            _least(self.regions, line.get("trained_regions")),  # older lines have none
            max(
                (each for each in (self.staleness, line["oldest_memory"]) if each is not None),
                default=None,
            ),
        )

    def __str__(self) -> str:
        """Return the terms in words, each with the papers' letter."""
        blocks = f"{self.blocks} blocks"
        least = blocks if self.regions is None else f"{self.regions} regions, {blocks}"
        known = [
            None
            if self.coverage is None
            else f"least coverage of a trained block {self.coverage} (Γ*)",
            None if self.blocks is None else f"least trained in a round {least} (S*)",
            None if self.staleness is None else f"oldest memory {self.staleness} rounds (τ)",
        ]
        return ", ".join(each for each in known if each is not None)


def accuracy_of(line: Mapping[str, Any]) -> float | None:
    """Return the accuracy of a level in a line of history: the one to deploy, else the whole model.

    None: it is not known.
    """
    for level in line.get("levels", ()):
        if level["level"] == line.get("deploy") and level["accuracy"] is not None:
            return float(level["accuracy"])
    found = line.get("accuracy")
    return None if found is None else float(found)


def run_terms(lines: Iterable[Mapping[str, Any]]) -> RunTerms:
    """Return the terms of a run from the lines of its history; rounds that were undone are out."""
    rounds: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if (back := line.get("rolled_back")) is not None:
            rounds = {number: each for number, each in rounds.items() if number <= back["to"]}
        elif "trained_coverage_min" in line:
            rounds[line["round"]] = line
    terms = RunTerms()
    for line in rounds.values():
        terms = terms.after_line(line)
    return terms


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


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
                each.own_accuracy,
                each.own_deviation,
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
        if bid.level is None:
            return DeviceRound(bid.device, None, bid.reason, code=bid.code)
        return DeviceRound(bid.device, None, late, code=SILENT)
    if bid.level is None:
        size = arrival.size_bytes
        return DeviceRound(
            bid.device, None, bid.reason, bytes_up=size, replayed=True, code=bid.code
        )
    noise = 0.0 if norms is None else reduction_noise(plan, arrival.groups, norms)
    return DeviceRound(
        device=bid.device,
        level=bid.level,
        reason=bid.reason,
        loss=arrival.movement.loss,
        parameters=plan.held(plan.choose(arrival.groups)).parameters,
        bytes_down=bytes_down,
        bytes_up=arrival.size_bytes,
        train_s=arrival.movement.train_s,
        reduction_noise=noise,
        energy_j=arrival.movement.energy_j,
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
