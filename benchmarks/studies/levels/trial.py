"""One run: a way to train, a fleet and a setting; accuracy of every level and modelled energy.

Energy is that of a Raspberry Pi 4: seconds from the multiply-accumulates of every step that was
really taken, narrower passes included, times the watts it draws while training. Runs of one setting
and fleet get the same energy, and so different numbers of rounds; everybody at full level, the
upper bound, gets the setting's rounds instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.data.dealing import halves
from benchmarks.studies.levels.fleets import (
    FLEETS,
    LEVELS,
    WAYS,
    MixedFleet,
    TrainingWay,
)
from benchmarks.studies.levels.settings import SETTINGS, LevelSetting, data_of
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.rules import Rule, make_rule
from coordinator.errors import CoordinatorError
from coordinator.masks import make_masks
from coordinator.masks.levels import level_groups, settle_masks
from coordinator.rounds.state import stages
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.federation import Federation, Member
from coordinator.task.levels import score_levels
from edge_sdk.data.arrays import ArrayData, Batch
from edge_sdk.decide.costs.cost import Cost
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import PASSES, REFERENCE_MACS_PER_S
from edge_sdk.decide.observer import Observer
from edge_sdk.machine.board import find_board
from edge_sdk.machine.snapshot import Battery, MemoryState, Snapshot
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.messages.round import RoundOpen
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.plan.plan import ModelPlan
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend, Job, TimedBackend
from edge_sdk.train.torch import TorchBackend

BOARD = "raspberry_pi_4"
MOST_TIMES = 8
"""A way gets at most this many times the setting's rounds, however little energy it spends."""


@dataclass(frozen=True, slots=True, order=True)
class Trial:
    """A run, by names and numbers alone."""

    setting: str
    fleet: str
    way: str
    rate: float
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.setting}, {self.fleet}, {self.way}, rate {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The end of a run: accuracies of every level, in validation and test, and the spending."""

    case: Trial
    validation: dict[str, float]
    test: dict[str, float]
    rounds: int
    joules: float
    seconds: float
    """Wall time of the run here."""
    failed: str = ""
    """Reason why the run ended early, such as a loss that was not finite."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def joules_per_mac() -> float:
    """Return the modelled energy of one multiply-accumulate of a forward pass, while training."""
    board = find_board(BOARD)
    if board.speed.speed_ratio is None or board.power.train_w is None:
        raise ValueError(f"{BOARD} has no speed or no watts")
    per_s = REFERENCE_MACS_PER_S.value * board.speed.speed_ratio.value
    return PASSES / per_s * board.power.train_w.value


def budget_j(plan: ModelPlan, setting: LevelSetting, levels: list[float]) -> float:
    """Return the energy of a fleet whose devices all train their own level in every round."""
    masks = make_masks("nested")
    macs = sum(plan.submodel_macs(level_groups(masks, plan, level)) for level in levels)
    return setting.rounds * setting.steps * setting.batch_size * macs * joules_per_mac()


def growing_rounds(
    limit: float, plan: ModelPlan, setting: LevelSetting, way: TrainingWay, own: list[float]
) -> int:
    """Return the rounds that this energy buys, while the model grows or, if it `saves`, without.

    They are fixed beforehand, because stages are shares of them.
    """
    masks = make_masks("nested")
    macs = {level: plan.submodel_macs(level_groups(masks, plan, level)) for level in LEVELS}

    def step_macs(level: float) -> float:
        narrower = [macs[each] for each in LEVELS if each < level]
        match way.local.get("widths"):
            case "ordered-dropout":
                return mean([macs[level], *narrower])
            case "sandwich" if narrower:
                return macs[level] + mean(narrower)
            case _:
                return macs[level]

    round_macs = sum(
        share * step_macs(min(level, largest))
        for largest, share in stages(LEVELS, 0.0 if way.saves else way.grow)
        for level in way.level_of(own)
        if level is not None
    )
    steps = max(1, round(setting.steps * way.steps))
    return max(1, round(limit / (steps * setting.batch_size * round_macs * joules_per_mac())))


def run_case(
    case: Trial, root: Path | None, tick: Callable[[], object] = lambda: None
) -> TrialOutcome:
    """Train to the end of the energy. Equal cases give equal outcomes, but for their seconds."""
    started = time.monotonic()
    torch.set_num_threads(1)
    setting, way, fleet = SETTINGS[case.setting], WAYS[case.way], FLEETS[case.fleet]
    data = data_of(setting, root)
    task = setting.task(data, case.seed, decoupled=way.decoupled)
    shares = setting.shares(data, case.seed)
    own = fleet.levels(len(shares))
    spent = _Spent()
    members = _members(case, way, fleet, own, shares)
    steps = max(1, round(setting.steps * way.steps))
    limit = budget_j(task.plan, setting, own)
    most = MOST_TIMES * setting.rounds
    if way.grow:
        most = min(most, growing_rounds(limit, task.plan, setting, way, own))
    model = GlobalModel(task.plan, task.weights, task.buffers, seed=case.seed)
    rule = make_rule(way.rule, **way.rule_options)
    if not isinstance(rule, Rule):
        raise ValueError(f"{way.rule} has no rounds")
    local = LocalRule(learning_rate=case.rate, momentum=setting.momentum, **way.local)
    masks = settle_masks(make_masks(way.masks, **way.mask_options), task.plan, lambda: model.norms)
    config = RoundsConfig(
        plan=task.plan,
        rule=rule,
        masks=masks,
        local_rule=local,
        rounds=most,
        steps=steps,
        batch_size=setting.batch_size,
        min_devices=len(members),
        seed=case.seed,
        levels=LEVELS,
        server_optimizer=ServerOptimizer(**way.optimizer),
        grow=way.grow,
    )
    federation = Federation(
        config, model, lambda: spent.counting(TorchBackend(task), task.plan), members
    )
    rounds, failed = 0, ""
    try:
        for report in federation.run():
            rounds = report.round
            tick()
            if rounds >= setting.rounds if way.who == "full" else spent.joules >= limit:
                break
    except CoordinatorError as error:  # every device's training failed, or was refused
        failed = str(error)[:200]
    validation, test = halves(data)
    choices = {level: level_groups(config.masks, task.plan, level) for level in LEVELS}
    scores = [
        score_levels(
            task.traced, model.weights, model.buffers, choices, each, rescale=local.rescale
        )
        for each in (validation, test)
    ]
    named = [{f"{level:g}": share for level, share in (each or {}).items()} for each in scores]
    seconds = time.monotonic() - started
    return TrialOutcome(case, named[0], named[1], rounds, spent.joules, seconds, failed)


class _Spent:
    """Counts the energy of all devices' steps."""

    def __init__(self) -> None:
        self.joules = 0.0
        self._per_mac = joules_per_mac()

    def counting(self, backend: Backend, plan: ModelPlan) -> Backend:
        """Return the backend, counting every step it takes."""

        def stepping(job: Job) -> Callable[[Batch], None]:
            macs = job.step_macs(plan)
            return lambda batch: self._add(next(macs) * len(batch.targets))

        return TimedBackend(backend, stepping)

    def _add(self, macs: float) -> None:
        self.joules += macs * self._per_mac


def _members(
    case: Trial, way: TrainingWay, fleet: MixedFleet, own: list[float], shares: list[ArrayData]
) -> list[Member]:
    # Which data a strong device has is chance.
    order = stream(case.seed, "levels", "who").permutation(len(own))
    members = []
    for number, level in enumerate(way.level_of(own)):
        if level is not None:
            name, share = f"device-{number:02}", shares[order[number]]
            policy, observe = Policy(level=level), None
            if fleet.changing and way.mixes:
                policy = Policy()
                observe = partial(_pressed, policy, fleet, case.seed, name)
            members.append(Member(name, policy, share, None, observe))
    return members


def _pressed(
    policy: Policy, fleet: MixedFleet, seed: int, name: str, _backend: Backend
) -> Observer:
    """Return the observer of a device on which only a drawn level fits the round's time."""
    return Observer(policy, _Plenty(), _Drawn(fleet, seed, name))


class _Plenty:
    """A machine on mains with memory to spare."""

    def snapshot(self) -> Snapshot:
        return Snapshot(
            battery=Battery(present=False), memory=MemoryState(available_bytes=float(2**40))
        )


class _Drawn:
    """Costs by which everything above a level drawn for the round takes too long."""

    def __init__(self, fleet: MixedFleet, seed: int, name: str) -> None:
        self._fleet, self._seed, self._name = fleet, seed, name

    def predict(self, levels: tuple[float, ...], opened: RoundOpen) -> tuple[Cost, ...]:
        """See `Costs`."""
        draws = stream(self._seed, "levels", self._name, opened.round)
        shares = self._fleet.shares
        fits = float(draws.choice(list(shares), p=[*_normal(list(shares.values()))]))
        late_s = 2 * opened.train_deadline_s
        return tuple(_timed(level, 0.0 if level <= fits else late_s) for level in levels)

    is_off = False

    def renew(self, should_stop: Callable[[], bool]) -> None:
        """See `Costs`: they are what they are."""

    def forward(self, survey: Survey, number: int, _samples: int) -> Cost:
        """See `Costs`: a forward pass takes no time."""
        return _timed(survey.levels[number], 0.0)

    def metered(self, *_training: object) -> _Unmetered:
        """See `Costs`."""
        return _Unmetered()


def _timed(level: float, seconds: float) -> Cost:
    """Return a cost of time alone."""
    return Cost(
        level=level, seconds=seconds, joules=None, peak_bytes=0.0, bytes_down=0.0, bytes_up=0.0
    )


class _Unmetered:
    """Measures nothing."""

    joules: float | None = None

    def __enter__(self) -> _Unmetered:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _normal(shares: list[float]) -> list[float]:
    return [share / sum(shares) for share in shares]
