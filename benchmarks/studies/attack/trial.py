"""One run: the real coordinator in process, honest devices and hostile ones, real training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.data.dealing import halves
from benchmarks.studies.attack.attackers import ATTACKS, NO_ATTACK
from benchmarks.studies.attack.defences import DEFENCES
from benchmarks.studies.attack.settings import (
    ATTACKERS,
    DEVICES,
    RATE,
    SERVER_MOMENTUM,
    SETTINGS,
    AttackSetting,
    choose_attackers,
    device_levels,
)
from benchmarks.studies.attack.watching import Watch
from benchmarks.studies.levels.fleets import LEVELS
from benchmarks.studies.levels.settings import data_of
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.rules import Rule, make_rule
from coordinator.errors import CoordinatorError
from coordinator.masks import make_masks
from coordinator.masks.levels import level_groups, settle_masks
from coordinator.rounds.report import DeviceRound
from coordinator.rounds.reputation import quarantined
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.federation import Federation, Member
from coordinator.task.levels import score_levels
from coordinator.task.task import Task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Backend
from edge_sdk.train.torch import TorchBackend

LEAST = DEVICES // 2
"""Devices without which no round opens: some may be quarantined."""
ROOT_SAMPLES = 100
"""Samples of the operator, of those that are for validation, for the defence that has some."""


@dataclass(frozen=True, slots=True, order=True)
class AttackTrial:
    """A run, by names and numbers alone."""

    setting: str
    rule: str
    drawn: int
    """Devices drawn for every round, of `DEVICES`."""
    attack: str
    defence: str
    weighting: str = "uniform"
    seed: int = 0

    def __str__(self) -> str:
        return (
            f"{self.setting}, {self.rule}, {self.drawn} a round, {self.attack}, {self.defence}, "
            f"seed {self.seed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackOutcome:
    """The end of a run. Shares are from 0 to 1; what is None does not apply."""

    case: AttackTrial
    accuracy: dict[str, float]
    """Accuracy of every level, in the test."""
    rounds: int
    honest: int
    """Movements that honest devices sent."""
    honest_refused: int
    hostile: int
    hostile_refused: int
    honest_quarantined: int
    """Devices whose bids were declined in the end."""
    hostile_quarantined: int
    backdoor: float | None
    """Share of the test samples with the trigger that the whole model takes for the goal; those
    of the goal itself are left out."""
    few_share: float
    """Share of the trained parameters that at most two devices of a round held, over rounds."""
    few: float | None
    many: float | None
    """Mean agreement of the model's steps with honest devices, see `Watch`."""
    round_s: float
    """Processor time of a round without the devices' training, in seconds."""
    seconds: float
    """Wall time of the run here."""
    failed: str = ""
    """Reason why the run ended early."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def run_attack(
    case: AttackTrial, root: Path | None, tick: Callable[[], object] = lambda: None
) -> AttackOutcome:
    """Train to the end. Equal cases give equal outcomes, but for their times."""
    started = time.monotonic()
    torch.set_num_threads(1)
    setting = SETTINGS[case.setting]
    data = data_of(setting.base, root)
    task = setting.base.task(data, case.seed)
    config, model = _config(case, setting, task)
    watch = Watch(task.plan, SERVER_MOMENTUM)
    hostile = _hostile(case)
    members = _members(case, setting, setting.base.shares(data, case.seed), hostile, watch)
    honest = {member.name for member in members} - hostile
    validation, test = halves(data)
    own = _first(validation, ROOT_SAMPLES) if config.robust.name == "root" else None
    federation = Federation(config, model, lambda: TorchBackend(task), members, root=own)
    rounds, failed, made, refused = 0, "", [0, 0], [0, 0]
    before, began = model.theta.copy(), time.process_time()
    try:
        for report in federation.run():
            rounds = report.round
            for line in report.devices:
                if line.level is not None or was_refused(line):
                    made[line.device in hostile] += 1
                    refused[line.device in hostile] += was_refused(line)
            counted = {line.device for line in report.devices if line.level is not None}
            watch.closed(before, model.theta, counted, honest)
            before = model.theta.copy()
            tick()
    except CoordinatorError as error:  # every device's training failed, or was refused
        failed = str(error)[:200]
    took = time.process_time() - began - watch.train_s
    barred = quarantined(federation.state.fleet.standings)
    return AttackOutcome(
        case=case,
        accuracy=_accuracy(config, task, model, test),
        rounds=rounds,
        honest=made[0],
        honest_refused=refused[0],
        hostile=made[1],
        hostile_refused=refused[1],
        honest_quarantined=sum(name in honest for name in barred),
        hostile_quarantined=sum(name in hostile for name in barred),
        backdoor=_backdoor(case, setting, config, task, model, test),
        few_share=_mean(watch.few_share) or 0.0,
        few=_mean(watch.few),
        many=_mean(watch.many),
        round_s=took / max(1, rounds),
        seconds=time.monotonic() - started,
        failed=failed,
    )


def was_refused(line: DeviceRound) -> bool:
    """Tell if a device's movement came and was not counted, for what it held."""
    return line.level is None and line.reason.startswith("skip: rejected")


def _config(
    case: AttackTrial, setting: AttackSetting, task: Task
) -> tuple[RoundsConfig, GlobalModel]:
    base, defence = setting.base, DEFENCES[case.defence]
    model = GlobalModel(task.plan, task.weights, task.buffers, seed=case.seed)
    rule = make_rule(case.rule, weighting=case.weighting)
    if not isinstance(rule, Rule):
        raise ValueError(f"{case.rule} has no rounds")
    config = RoundsConfig(
        plan=task.plan,
        rule=rule,
        masks=settle_masks(make_masks("nested"), task.plan, lambda: model.norms),
        local_rule=LocalRule(
            learning_rate=RATE,
            momentum=base.momentum,
            clip_norm=defence.clip_norm,
            rescale=0.0,
            widths="ordered-dropout",
        ),
        rounds=base.rounds,
        steps=base.steps,
        batch_size=base.batch_size,
        min_devices=LEAST,
        participants=case.drawn if case.drawn < DEVICES else None,
        seed=case.seed,
        levels=LEVELS,
        server_optimizer=ServerOptimizer(name="momentum", beta1=SERVER_MOMENTUM),
        **defence.run,
    )
    return config, model


def _hostile(case: AttackTrial) -> set[str]:
    if case.attack == NO_ATTACK:
        return set()
    count = 1 if ATTACKS[case.attack].alone else ATTACKERS
    return {_name(number) for number in choose_attackers(device_levels(), count)}


def _name(number: int) -> str:
    return f"device-{number:02}"


def _members(
    case: AttackTrial,
    setting: AttackSetting,
    shares: list[ArrayData],
    hostile: set[str],
    watch: Watch,
) -> list[Member]:
    attack, members = ATTACKS[case.attack], []
    # Which data a device has does not depend on its level, nor on whether it is hostile.
    order = stream(case.seed, "attack", "who").permutation(len(shares))

    def training(name: str, backend: Backend) -> Backend:
        if name in hostile:
            backend = attack.backend(backend, case.seed, name)
        return watch.backend(backend, name)

    for number, level in enumerate(device_levels()):
        name, share = _name(number), shares[order[number]]
        if name in hostile and attack.absent:
            continue
        if name in hostile:
            share = attack.data(setting, share, stream(case.seed, "attack", name))
        members.append(Member(name, Policy(level=level), share, train=partial(training, name)))
    return members


def _accuracy(
    config: RoundsConfig, task: Task, model: GlobalModel, test: ArrayData
) -> dict[str, float]:
    choices = {level: level_groups(config.masks, task.plan, level) for level in LEVELS}
    with np.errstate(all="ignore"):
        scores = score_levels(
            task.traced,
            model.weights,
            model.buffers,
            choices,
            test,
            rescale=config.local_rule.rescale,
        )
    return {f"{level:g}": share for level, share in (scores or {}).items()}


def _backdoor(
    case: AttackTrial,
    setting: AttackSetting,
    config: RoundsConfig,
    task: Task,
    model: GlobalModel,
    test: ArrayData,
) -> float | None:
    """Return the share of samples that the trigger turns into the goal.

    Measured without an attack too: some models take the trigger for the goal by themselves.
    """
    if not (case.attack == NO_ATTACK or case.attack.startswith("backdoor")):
        return None
    others = test.targets != setting.goal
    stamped = setting.stamp(test.inputs[0][others])
    goals = np.full(len(stamped), setting.goal, test.targets.dtype)
    return _accuracy(config, task, model, ArrayData((stamped,), goals))["1"]


def _first(data: ArrayData, count: int) -> ArrayData:
    return ArrayData(tuple(each[:count] for each in data.inputs), data.targets[:count])


def _mean(values: list[float]) -> float | None:
    known = [value for value in values if isfinite(value)]
    return mean(known) if known else None
