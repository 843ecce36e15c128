"""A question about a fleet, answered by simulation: hours, energy, traffic, money."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import FAMILIES
from benchmarks.report.options import UsageError
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES, Rule
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.service.courses import Evaluator
from coordinator.simulate.demo.digits import load_digits, make_model
from coordinator.simulate.fleet.cohorts import CohortTraining
from coordinator.simulate.fleet.population import (
    DevicePopulation,
    load_population,
    population_of,
)
from coordinator.simulate.fleet.shared import deal_out
from coordinator.simulate.fleet.simulation import FleetRound, FleetSimulation
from coordinator.simulate.partitions import iid_parts
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task, make_task
from edge_sdk.decide.emulation.fleet import find_fleet
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyConfig:
    """Settings of a study."""

    population: str
    """File of a population, or the name of a fleet that ships with the project."""
    devices: int | None = None
    """Devices of a shipped fleet; None: one of each member."""
    rounds: int = 50
    participants: int | None = None
    over_selection: float = 1.0
    quorum: float = 1.0
    deadline_s: float = 600.0
    rule: str = "ra-fed"
    model: str = "cnn"
    """Family of the model that is not trained."""
    train: bool = False
    """True: handwritten digits are really learned, by the demo's model."""
    steps: int = 20
    batch: int = 32
    processes: int = 1
    seed: int = 0


def run_study(config: StudyConfig) -> Iterator[FleetRound]:
    """Simulate, yielding every round. Raises `UsageError` and `ConfigError` before that."""
    population = _population(config)
    task = _task(config)
    rounds = RoundsConfig(
        plan=task.plan,
        rule=_rule(config.rule),
        masks=make_masks("coverage"),
        local_rule=LocalRule(learning_rate=0.05, momentum=0.5),
        rounds=config.rounds,
        steps=config.steps,
        batch_size=config.batch,
        min_devices=1,
        min_participants=1,
        participants=config.participants,
        over_selection=config.over_selection,
        quorum=config.quorum,
        train_deadline_s=config.deadline_s,
        seed=config.seed,
    )
    model = GlobalModel(task.plan, task.weights, task.buffers)
    with ExitStack() as stack:
        more: dict[str, Any] = {}
        if config.train:
            digits, graphs = load_digits(config.seed), compile_graphs(task)
            names = {name: place for place, (name, _) in enumerate(population.devices())}
            draws = stream(config.seed, "fleet", "shares")
            parts = iid_parts(digits.train.targets, len(population), draws)
            dealt = deal_out(digits.train, parts)
            training = CohortTraining(
                task.plan,
                graphs.manifest,
                graphs.files,
                dealt,
                names,
                seed=config.seed,
                processes=config.processes,
            )
            more = {
                "training": stack.enter_context(training),
                "samples": dealt.counts(),
                "manifest": graphs.manifest,
                "evaluate": Evaluator(task.traced, digits.test),
            }
        yield from FleetSimulation(rounds, model, population, **more).run()


def round_row(each: FleetRound) -> dict[str, Any]:
    """Return a round as plain values."""
    trained = sum(device.level is not None for device in each.report.devices)
    row = {key: value for key, value in asdict(each).items() if key != "report"}
    return {
        "round": each.report.round,
        "trained": trained,
        "asked": len(each.report.devices),
        "accuracy": each.accuracy,
        **row,
    }


def _population(config: StudyConfig) -> DevicePopulation:
    if config.population.endswith(".toml"):
        if config.devices is not None:
            raise UsageError("--devices is for fleets by name: a population has its own counts")
        return load_population(Path(config.population))
    return population_of(find_fleet(config.population), config.devices)


def _task(config: StudyConfig) -> Task:
    if config.train:
        return make_task(make_model(config.seed), torch.zeros(2, 1, 8, 8), groups=4)
    if config.model not in FAMILIES:
        raise UsageError(f"unknown model {config.model!r}; choose from {', '.join(FAMILIES)}")
    family = FAMILIES[config.model]
    return make_task(family.model(config.seed), family.inputs(2), groups=4)


def _rule(name: str) -> Rule:
    if name not in RULES:
        raise UsageError(f"unknown rule {name!r}; choose from {', '.join(RULES)}")
    return RULES[name]()
