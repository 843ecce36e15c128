"""Device-steps per second of a simulated fleet that really trains, against a bare torch loop.

The fleet trains 100 devices a round in two processes. The bare loop takes the same steps on one
thread: one `torch.nn.Module`, SGD with momentum, batches of the same size. Both take turns, on the
wall clock: the ratio is what two cores of this machine give, not what one does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import FAMILIES, mlp
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.fleet.cohorts import COHORT, CohortTraining
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from coordinator.simulate.fleet.shared import DealtData, deal_out
from coordinator.simulate.fleet.simulation import FleetSimulation
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.gates import Limits
from edge_sdk.machine.board import find_board
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job
from edge_sdk.train.onnx import OnnxBackend

RULE = LocalRule(learning_rate=0.05, momentum=0.9)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mlp": (lambda: mlp(784, 200, 200, 10), (784,), 10),
    "sensor-cnn": (lambda: FAMILIES["sensor-cnn"].model(0), FAMILIES["sensor-cnn"].shape, 6),
}
"""Per model: what makes it, the shape of a sample, and the number of classes."""
TARGETS = {"mlp": 1.9, "sensor-cnn": 1.7}
OVERHEAD_TARGET_MS = 1.0
LONG_ROUNDS = 100
"""Rounds of the run whose minutes are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """The job: `participants` of `devices` train `steps` steps of `batch` samples in a round."""

    devices: int = 1000
    participants: int = 100
    steps: int = 20
    batch: int = 32
    samples: int = 64
    """Samples of each device."""
    processes: int = 2
    cohort: int = COHORT
    turns: int = 10
    overhead_turns: int = 5
    """Turns in which the overhead is measured."""
    bare_share: float = 0.2
    """Share of a round's steps that the bare loop takes in its turn."""

    @property
    def ticks(self) -> int:
        """Number of ticks of `measure_training`."""
        return len(MODELS) * (self.turns + 1)


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One model: device-steps per second, their ratio within turns, and a device-round's costs."""

    model: str
    steps_per_s: float
    bare_steps_per_s: float
    ratio: float
    cpu_ratio: float
    """The ratio of steps per CPU second of all processes, which other programs disturb less."""
    overhead_ms: float
    """CPU time of a device-round in one process beyond the backend's own."""
    minutes: float
    """Minutes of 100 rounds at this pace."""


def measure_training(config: TrainingConfig, begin: Begin) -> list[TrainingRow]:
    """Measure one row per model."""
    torch.set_num_threads(1)
    return [_measure(name, config, begin) for name in MODELS]


def training_figures(rows: list[TrainingRow]) -> list[Figure]:
    """Return the ratios, the overheads and the minutes of a long run."""
    found = []
    for row in rows:
        model = row.model.replace("-", "_")
        found += [
            Figure(
                f"fleet.training.{model}.steps_over_bare",
                row.ratio,
                "×",
                target=TARGETS[row.model],
                better="higher",
            ),
            Figure(
                f"fleet.training.{model}.cpu_steps_over_bare", row.cpu_ratio, "×", better="higher"
            ),
            Figure(
                f"fleet.training.{model}.overhead_ms",
                row.overhead_ms,
                "ms",
                target=OVERHEAD_TARGET_MS,
            ),
            Figure(f"fleet.training.{model}.minutes_100_rounds", row.minutes, "min"),
        ]
    return found


class TrainingJob:
    """One model, its data and its devices."""

    def __init__(self, name: str, config: TrainingConfig, data: ArrayData | None = None) -> None:
        """`data` None: samples are drawn."""
        make, shape, classes = MODELS[name]
        torch.manual_seed(0)
        self.module, self.config = make(), config
        self.task = make_task(self.module, torch.zeros(2, *shape), groups=4)
        self.graphs = compile_graphs(self.task)
        count = config.devices * config.samples
        if data is None:
            random = stream(0, "fleet", name)
            inputs = random.standard_normal((count, *shape), dtype=np.float32)
            data = ArrayData((inputs,), random.integers(0, classes, count))
        parts = np.array_split(np.arange(count), config.devices)
        self.dealt: DealtData = deal_out(data, parts)
        self.population = DevicePopulation(
            kinds=(
                DeviceKind(
                    board=find_board("raspberry_pi_5"),
                    count=config.devices,
                    policy=Policy(limits=Limits(heat_margin_c=0.0)),
                ),
            ),
            warm_s=1e9,
        )

    def rounds(self, processes: int, turns: int) -> Generator[int, None, None]:
        """Go through a simulation, yielding the number of trainings so far after every round."""
        config, task = self.config, self.task
        names = {name: place for place, (name, _) in enumerate(self.population.devices())}
        rounds = RoundsConfig(
            plan=task.plan,
            rule=RULES["ra-fed"](),
            masks=make_masks("random"),
            local_rule=RULE,
            rounds=turns,
            steps=config.steps,
            batch_size=config.batch,
            min_devices=config.devices,
            participants=config.participants,
            train_deadline_s=1e6,
            seed=0,
        )
        model = GlobalModel(task.plan, task.weights, task.buffers)
        with CohortTraining(
            task.plan,
            self.graphs.manifest,
            self.graphs.files,
            self.dealt,
            names,
            seed=0,
            processes=processes,
            cohort=config.cohort,
        ) as training:
            simulation = FleetSimulation(
                rounds, model, self.population, training=training, samples=self.dealt.counts()
            )
            for _ in simulation.run():
                yield simulation.spending.trainings

    def bare(self) -> Iterator[int]:
        """Take the steps of so many devices, without end; yields the number of steps of a turn."""
        config, module = self.config, self.module
        devices = max(1, round(config.participants * config.bare_share))
        random = stream(0, "fleet", "bare")
        while True:
            for device in range(devices):
                optimiser = torch.optim.SGD(module.parameters(), RULE.learning_rate, RULE.momentum)
                for batch in self.dealt.batches(device, config.steps, config.batch, random):
                    x, y = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.targets)
                    optimiser.zero_grad()
                    torch.autograd.backward(F.cross_entropy(module(x), y))
                    optimiser.step()
            yield devices * config.steps

    def overhead_ms(self) -> float:
        """Return the CPU time of a device-round in one process, less that of the backend alone.

        Both take turns, and the difference is the median over them.
        """
        config, plan, task = self.config, self.task.plan, self.task
        backend = OnnxBackend(plan, self.graphs.manifest, self.graphs.files)
        job = Job(
            groups=plan.full_groups(),
            weights=task.weights,
            buffers=task.buffers,
            rule=RULE,
            mask_stream=stream(0, "dropout"),
        )
        devices = max(1, round(config.participants * config.bare_share))

        def alone() -> float:
            started = time.process_time()
            for device in range(devices):
                random = stream(0, "batches", device)
                backend.train(job, self.dealt.batches(device, config.steps, config.batch, random))
            return (time.process_time() - started) / devices

        rounds, found = self.rounds(1, 2 + config.overhead_turns), []
        next(rounds)
        alone()
        for _ in range(config.overhead_turns):
            started = time.process_time()
            next(rounds)
            ours = (time.process_time() - started) / config.participants
            found.append(1e3 * (ours - alone()))
        rounds.close()
        return median(found)


def _measure(name: str, config: TrainingConfig, begin: Begin) -> TrainingRow:
    tick = begin(f"training {name}")
    job = TrainingJob(name, config)
    overhead_ms = job.overhead_ms()
    tick()
    rounds, bare = job.rounds(config.processes, config.turns), job.bare()
    before = next(rounds)  # which starts the processes
    next(bare)
    tick()
    rates: list[tuple[float, float]] = []
    cpu_ratios: list[float] = []
    for _ in range(config.turns - 1):
        started, cpu = time.perf_counter(), _cpu_s()
        trained = next(rounds)
        between, cpu_between = time.perf_counter(), _cpu_s()
        bare_steps = next(bare)
        ended, cpu_ended = time.perf_counter(), _cpu_s()
        steps = (trained - before) * config.steps
        rates.append((steps / (between - started), bare_steps / (ended - between)))
        cpu_ratios.append(steps / (cpu_between - cpu) / (bare_steps / (cpu_ended - cpu_between)))
        before = trained
        tick()
    rounds.close()
    pace = median(ours for ours, _ in rates)
    return TrainingRow(
        model=name,
        steps_per_s=pace,
        bare_steps_per_s=median(theirs for _, theirs in rates),
        ratio=median(ours / theirs for ours, theirs in rates),
        cpu_ratio=median(cpu_ratios),
        overhead_ms=overhead_ms,
        minutes=LONG_ROUNDS * config.participants * config.steps / pace / 60,
    )


def _cpu_s() -> float:
    """Return the CPU time of this process and of those it started."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))
