"""A simulated experiment: any data, model, partition, rule, masks, local rule and fleet.

    config = make_study({"data.name": "uci_har", "data.partition": "key", "run.rounds": 20})
    study = Study(config, Path("data"))
    for each in study.run():             # a FleetRound as it closes
        print(each.report.round, each.time_s, each.accuracy)
    study.outcome().test                 # accuracy of every level

Samples for testing never train. One half of them, the validation, measures rounds while the
experiment goes on; the other half is only looked at in the outcome.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.data import Dataset, DatasetError, fit_images, load_data
from benchmarks.data.dealing import halves
from benchmarks.fleet.config import DIGITS, DIGITS_CNN, StudyConfig
from benchmarks.fleet.ideal import find_population
from benchmarks.models import FAMILIES
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.published import find_recipe
from coordinator.masks import MASKS, settle_masks
from coordinator.rounds.fragments import FragmentsConfig
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.service.courses.parts import Evaluator
from coordinator.service.store import Keeping
from coordinator.simulate.demo.digits import make_model
from coordinator.simulate.fleet.cohorts import CohortTraining
from coordinator.simulate.fleet.population import DevicePopulation
from coordinator.simulate.fleet.shared import deal_out
from coordinator.simulate.fleet.simulation import FleetRound, FleetSimulation
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.levels import LevelScores, evaluate_levels
from coordinator.task.task import Task, make_task
from coordinator.task.tracing.norms import decouple_norms
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream
from edge_sdk.train.inference import Predictor


@dataclass(frozen=True, slots=True)
class StudyOutcome:
    """The end of an experiment: accuracy of every level, and what it took."""

    validation: dict[float, float]
    test: dict[float, float]
    last: FleetRound

    def plain(self) -> dict[str, Any]:
        """Return it as values that JSON can hold."""
        return {
            "validation": {f"{level:g}": share for level, share in self.validation.items()},
            "test": {f"{level:g}": share for level, share in self.test.items()},
            **round_row(self.last),
        }


class Study:
    """An experiment, made and ready to run once.

    `task`, `machine` (the coordinator's settings), `model`, `population`, `data` and `simulation`
    are there for whoever wants to look closer; `simulation` from the first round on.
    """

    def __init__(
        self,
        config: StudyConfig,
        data_dir: Path | None = None,
        *,
        population: DevicePopulation | None = None,
    ) -> None:
        """`data_dir` holds a folder for each data set. `population` replaces that of the settings.

        Raises `ConfigError` and `DatasetError`.
        """
        self.config = config
        self.population = find_population(config.fleet) if population is None else population
        self.data = _dataset(config, data_dir) if config.simulation.train else None
        self.task = _task(config)
        self.model = GlobalModel(
            self.task.plan,
            self.task.weights,
            self.task.buffers,
            encoding=config.run.down,
            seed=config.run.seed,
        )
        machine = config.machine(self.task.plan)
        masks = settle_masks(machine.masks, self.task.plan, lambda: self.model.norms)
        self.machine: RoundsConfig | FragmentsConfig = replace(machine, masks=masks)
        self.simulation: FleetSimulation | None = None
        self._last: FleetRound | None = None

    @cached_property
    def graphs(self) -> CompiledGraphs:
        """The compiled graphs of the task."""
        return _graphs(self.config.model_name, self.task, self.machine)

    @cached_property
    def runtime(self) -> Predictor:
        """Runs the model and its levels, to measure them."""
        return Predictor(self.task.plan, self.graphs.manifest, self.graphs.files)

    @cached_property
    def rows(self) -> list[NDArray[np.int64]]:
        """The training samples of every device, by their numbers in `data`; empty without data."""
        return [] if self.data is None else deal_rows(self.config, self.data, len(self.population))

    def settings(self) -> dict[str, Any]:
        """Return every setting as a plain value, those too that the settings leave to the run."""
        local, masks = self.machine.local_rule, type(self.machine.masks)
        found = {
            **self.config.plain(),
            "run.widths": local.widths,
            "run.rescale": local.rescale,
            "run.clip_norm": local.clip_norm or 0.0,
            "mask.name": next((name for name, kind in MASKS.items() if kind is masks), None),
        }
        if isinstance(self.machine, RoundsConfig):
            found |= {"run.rounds": self.machine.rounds, "run.grow": self.machine.grow}
            found["run.robust"] = self.machine.robust.name
        else:
            found["run.updates"] = self.machine.updates
        return found

    def run(self) -> Iterator[FleetRound]:
        """Simulate, yielding every round as it closes. Raises `CoordinatorError`."""
        with ExitStack() as stack:
            more = {} if self.data is None else self._training(self.data, stack)
            self.simulation = FleetSimulation(
                self.machine,
                self.model,
                self.population,
                threads=Keeping(threads=self.config.run.threads).workers,
                **more,
            )
            for each in self.simulation.run():
                self._last = each
                yield each

    def outcome(self) -> StudyOutcome:
        """Return the end of a run; measures every level. Raises `ValueError` before `run`."""
        if self._last is None:
            raise ValueError("no round of this study has closed: iterate over run() first")
        if self.data is None:
            return StudyOutcome({}, {}, self._last)
        validation, test = (self.measure(each).accuracies for each in self._checks(self.data))
        return StudyOutcome(validation, test, self._last)

    def measure(self, data: ArrayData) -> LevelScores:
        """Measure every level of the model as it is now, on these samples."""
        levels, model = self.machine.unscored(), self.model
        choices = {each.level: each.groups for each in levels.levels}
        return evaluate_levels(
            self.runtime, model.weights, model.buffers, choices, data, rescale=levels.rescale
        )

    def _checks(self, data: Dataset) -> tuple[ArrayData, ArrayData]:
        validation, test = halves(data)
        most = self.config.data.check_samples
        return _some(validation, most), _some(test, most)

    def _training(self, data: Dataset, stack: ExitStack) -> dict[str, Any]:
        config, plan = self.config, self.task.plan
        graphs = self.graphs
        names = {name: place for place, (name, _) in enumerate(self.population.devices())}
        dealt = deal_out(data.train, self.rows)
        training = CohortTraining(
            plan,
            graphs.manifest,
            graphs.files,
            dealt,
            names,
            seed=config.run.seed,
            cohort=config.simulation.cohort,
            engine=config.simulation.make_engine(),
        )
        validation, _ = self._checks(data)
        return {
            "training": stack.enter_context(training),
            "samples": dealt.counts(),
            "manifest": graphs.manifest,
            "evaluate": _Seldom(
                Evaluator(self.runtime, validation),
                config.simulation.evaluate_every,
                config.reports,
            ),
        }


def run_study(config: StudyConfig, data_dir: Path | None = None) -> Iterator[FleetRound]:
    """Make an experiment and run it, yielding every round as it closes. See `Study`."""
    yield from Study(config, data_dir).run()


def round_row(each: FleetRound) -> dict[str, Any]:
    """Return a round as plain values."""
    trained = [device for device in each.report.devices if device.level is not None]
    # Nothing was trained where all losses are 0 (`HollowTraining`).
    losses = [device.loss for device in trained if device.loss]
    spent = {entry.name: getattr(each, entry.name) for entry in fields(each)[1:]}
    return {
        "round": each.report.round,
        "trained": len(trained),
        "asked": len(each.report.devices),
        "accuracy": each.accuracy,
        "loss": fmean(losses) if losses else None,
        **spent,
        **{
            f"accuracy_{100 * level.level:g}": level.accuracy
            for level in each.report.levels
            if level.accuracy is not None
        },
    }


def deal_rows(config: StudyConfig, data: Dataset, devices: int) -> list[NDArray[np.int64]]:
    """Return the training samples of every device, by their numbers in the data set."""
    draws = stream(config.run.seed, "study", "shares")
    some = np.arange(len(data.train))
    if config.data.samples is not None:
        some = np.sort(draws.permutation(len(data.train))[: config.data.samples])
    owners = None if data.owners is None else data.owners[some]
    parts = config.data.deal(data.train.targets[some], devices, draws, owners)
    return [some[part] for part in parts]


def _some(data: ArrayData, most: int | None) -> ArrayData:
    if most is None or most >= len(data):
        return data
    rows = stream(0, "study", "checks").permutation(len(data))[:most]
    return ArrayData(tuple(each[rows] for each in data.inputs), data.targets[rows])


class _Seldom:
    """Evaluates only every n-th time, and the last."""

    def __init__(self, evaluate: Evaluator, every: int, last: int) -> None:
        self._evaluate, self._every, self._last, self._calls = evaluate, every, last, 0

    def __call__(self, model: GlobalModel, levels: LevelScores) -> LevelScores:
        """See `Evaluate`."""
        self._calls += 1
        if self._calls % self._every and self._calls != self._last:
            return levels
        return self._evaluate(model, levels)


@lru_cache(maxsize=4)
def _loaded(folder: Path | None, seed: int, shape: tuple[int, ...]) -> Dataset:
    return fit_images(load_data(folder, seed), shape)


def _dataset(config: StudyConfig, data_dir: Path | None) -> Dataset:
    """Load a data set in the shape that the model takes, once for several studies."""
    name, shape = config.data.name, _shape(config.model_name)
    if name == DIGITS:
        return _loaded(None, config.run.seed, shape)
    if data_dir is None or not (data_dir / name).is_dir():
        where = "no folder of data sets is given" if data_dir is None else f"not in {data_dir}"
        raise DatasetError(f"data set {name!r}: {where}; give the folder that holds it")
    return _loaded(data_dir / name, 0, shape)


def _shape(model: str) -> tuple[int, ...]:
    return (1, 8, 8) if model == DIGITS_CNN else FAMILIES[model].shape


def _task(config: StudyConfig) -> Task:
    name, seed, table = config.model_name, config.run.seed, config.model
    recipe = config.run.recipe
    decoupled = table.decoupled or (recipe is not None and find_recipe(recipe).decoupled)
    if name == DIGITS_CNN:
        model: nn.Module = make_model(seed)
        example = torch.zeros(2, *_shape(name))
    else:
        model, example = FAMILIES[name].model(seed), FAMILIES[name].inputs(2)
    if decoupled:
        model = decouple_norms(model, table.groups)
    return make_task(
        model,
        example,
        groups=None if table.ratios else table.groups,
        ratios=table.ratios or None,
        regions=table.regions,
    )


MOST_COMPILED = 8
_COMPILED: dict[tuple[Any, ...], CompiledGraphs] = {}
"""Graphs of earlier studies of this process; weights are not in them."""


def _graphs(model: str, task: Task, machine: RoundsConfig | FragmentsConfig) -> CompiledGraphs:
    local = machine.local_rule
    wanted: dict[str, Any] = {
        "levels": machine.levels,
        "batch_sizes": (machine.batch_size,),
        "distillation": local.distillation > 0,
        "class_masks": local.classes != "all",
    }
    key = (model, task.plan.hash, *wanted.values())
    if key not in _COMPILED:
        if len(_COMPILED) >= MOST_COMPILED:
            _COMPILED.pop(next(iter(_COMPILED)))
        _COMPILED[key] = compile_graphs(task, **wanted)
    return _COMPILED[key]
