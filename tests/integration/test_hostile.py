"""One bad device among nine, through the coordinator's own code: it hurts nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import AsyncRule, make_rule
from coordinator.masks import make_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.reputation import quarantined
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.federation import Federation, Member, RoundReport
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import CLIP_NORM, LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.task.data_spec import DataSpec
from edge_sdk.train.backend import Job, Trained
from edge_sdk.train.torch import TorchBackend

FEATURES, CLASSES, HONEST, ROUNDS = 6, 3, 8, 8
CENTRES = np.random.default_rng(7).normal(size=(CLASSES, FEATURES)) * 2
MARK = 1e6
"""A value of inputs that no honest device has; it tells the backend whom it trains for."""
CLIPPED = LocalRule(learning_rate=0.1, momentum=0.5, clip_norm=CLIP_NORM)
UNCLIPPED = replace(CLIPPED, clip_norm=None)

Lie = Callable[[Job, dict[str, Array]], dict[str, Array]]
"""Makes the movement that a bad device sends from the one it trained."""


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return make_task(model, torch.randn(4, FEATURES), groups=4)


def samples(random: np.random.Generator, number: int) -> ArrayData:
    targets = random.integers(0, CLASSES, size=number)
    inputs = CENTRES[targets] + random.normal(size=(number, FEATURES))
    return ArrayData((inputs.astype(np.float32),), targets)


@dataclass(frozen=True, slots=True, eq=False)
class Claimed(ArrayData):
    """Data of a bad device, which may claim to be more than it is."""

    claimed: int = 0

    def __len__(self) -> int:
        return self.claimed or len(self.targets)


class Lying:
    """A backend that sends something else for a device whose data is marked."""

    def __init__(self, task: Task, lie: Lie) -> None:
        self._backend = TorchBackend(task)
        self._lie = lie

    @property
    def plan(self) -> ModelPlan:
        return self._backend.plan

    @property
    def data(self) -> DataSpec | None:
        return None  # which would have checked the samples that a bad device claims

    def train(self, job: Job, batches: Iterable[Batch], **options: Any) -> Trained:
        first, *others = batches
        marked = bool((first.inputs[0] == MARK).any())
        if marked:
            first, *others = [unmarked(each) for each in (first, *others)]
        trained = self._backend.train(job, chain([first], others), **options)
        return replace(trained, movement=self._lie(job, trained.movement)) if marked else trained


def unmarked(batch: Batch) -> Batch:
    return batch._replace(inputs=tuple(np.where(x == MARK, 0, x) for x in batch.inputs))


def constant(value: float) -> Lie:
    return lambda _, movement: {name: np.full_like(each, value) for name, each in movement.items()}


def flipped(_: Job, movement: dict[str, Array]) -> dict[str, Array]:
    return {name: -each for name, each in movement.items()}


def play(
    task: Task,
    lie: Lie | None,
    *,
    rule: str = "ra-fed",
    local: LocalRule = CLIPPED,
    claimed: int = 0,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[float, list[RoundReport], Federation]:
    """Train with a bad device, or without if there is no lie; the accuracy, and what was said."""
    random = np.random.default_rng(3)
    members = [Member(f"good-{n}", Policy(), samples(random, 40)) for n in range(HONEST)]
    if lie is not None:
        data = samples(random, 40)
        data.inputs[0][:, 0] = MARK
        members.append(Member("bad", Policy(), Claimed(data.inputs, data.targets, claimed)))
    made = make_rule(rule, **(options or {}))
    common: dict[str, Any] = {
        "plan": task.plan,
        "local_rule": local,
        "steps": 5,
        "batch_size": 16,
        "min_devices": len(members),
        "seed": 0,
        **config,
    }
    machine: RoundsConfig | FragmentsConfig
    if isinstance(made, AsyncRule):
        masks = make_masks("gre-raa")
        machine = FragmentsConfig(rule=made, masks=masks, updates=ROUNDS * HONEST, **common)
    else:
        machine = RoundsConfig(rule=made, masks=make_masks("random"), rounds=ROUNDS, **common)
    model = GlobalModel(task.plan, task.weights, task.buffers)
    federation = Federation(machine, model, lambda: Lying(task, lie or constant(0)), members)
    reports = list(federation.run())
    test = samples(np.random.default_rng(9), 500)
    weights = federation.model.weights
    with np.errstate(all="ignore"):
        hidden = np.maximum(test.inputs[0] @ weights["0.weight"].T + weights["0.bias"], 0)
        scores = hidden @ weights["2.weight"].T + weights["2.bias"]
    return float((scores.argmax(1) == test.targets).mean()), reports, federation


def reasons(reports: list[RoundReport]) -> list[str]:
    """Why the bad device did not train, round by round."""
    lines = [line for report in reports for line in report.devices if line.device == "bad"]
    return [line.reason for line in lines if line.level is None]


@pytest.fixture(scope="module")
def honest(task: Task) -> float:
    accuracy, _, _ = play(task, None)
    assert accuracy > 0.9
    return accuracy


@pytest.mark.parametrize(
    ("rule", "value"), [("ra-fed", 9.9e8), ("ram-fed", -9.9e8), ("ccfl-2", 25.0)]
)
def test_huge_movement_is_refused_from_the_first_round(
    task: Task, honest: float, rule: str, value: float
) -> None:
    accuracy, reports, federation = play(task, constant(value), rule=rule)
    assert accuracy > honest - 0.03
    first, *_ = reasons(reports)
    assert "long, and training by this round's rule moves weights by at most" in first
    assert not any(line.device == "bad" and line.level for each in reports for line in each.devices)
    # Refused three times in a row, it is asked no more.
    assert list(quarantined(federation.state.fleet.standings)) == ["bad"]
    assert [each.quarantined for each in reports] == [()] * 2 + [("bad",)] * (ROUNDS - 2)


@pytest.mark.parametrize("value", [9.9e8, 0.5])
def test_constant_is_refused_beside_the_others_where_nothing_bounds_it(
    task: Task, honest: float, value: float
) -> None:
    accuracy, reports, _ = play(task, constant(value), local=UNCLIPPED)
    assert accuracy > honest - 0.03
    first, *_ = reasons(reports)
    assert "times the median RMS of this round's 9 movements" in first


def test_constant_within_the_bound_is_refused_beside_the_others(task: Task, honest: float) -> None:
    accuracy, reports, _ = play(task, constant(0.5))
    assert accuracy > honest - 0.03
    assert "times the median RMS of this round's 9 movements" in reasons(reports)[0]


def test_huge_movement_moves_no_fragment(task: Task) -> None:
    accuracy, reports, federation = play(task, constant(9.9e8), rule="fed-raa", quarantine_after=1)
    calm, _, _ = play(task, None, rule="fed-raa")
    assert accuracy > calm - 0.1
    assert "at most" in reasons(reports)[0]
    assert "bad" in quarantined(federation.state.fleet.standings)


@pytest.mark.parametrize("rule", ["ra-fed", "ram-fed"])
def test_claimed_samples_do_not_matter(task: Task, honest: float, rule: str) -> None:
    weighted = {"weighting": "samples"}
    accuracy, reports, federation = play(task, flipped, rule=rule, claimed=2**40, options=weighted)
    assert accuracy > honest - 0.1
    fleet = federation.state.fleet
    assert fleet.samples["bad"] == 5 * 40
    assert fleet.total_samples == 40 * HONEST + 5 * 40
    shares = [each.data_share for report in reports for each in report.levels]
    assert all(share is None or 0 <= share <= 1 for share in shares)


def test_honest_devices_are_not_refused(task: Task) -> None:
    _, reports, federation = play(task, lambda _, movement: movement)
    assert all(line.level == 1 for report in reports for line in report.devices)
    assert not federation.state.fleet.standings
