"""A simulated fleet under a real coordinator, round by round: hours, joules, bytes, money."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.pairings import fragment_advice
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.masks import settle_masks
from coordinator.rounds.fragments import FragmentsConfig, FragmentsState
from coordinator.rounds.report import RoundReport, RunTerms
from coordinator.rounds.synchronous import RoundsConfig, RoundsState
from coordinator.run.folder import Checkpoint
from coordinator.service.close import open_memory
from coordinator.service.courses.fragments import FragmentsCourse
from coordinator.service.courses.parts import Evaluate, Parts
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.simulate.engine import VirtualRun, warn_of_horizon
from coordinator.simulate.fleet.body import Nature
from coordinator.simulate.fleet.costs import RoundCosts
from coordinator.simulate.fleet.device import FleetDevice, Spending, Surroundings
from coordinator.simulate.fleet.population import DevicePopulation
from coordinator.simulate.fleet.training import FleetTraining, HollowTraining
from coordinator.simulate.ram import DirectOutlet, RunInRam
from edge_sdk.protocol.task.graphs import Manifest

log = logging.getLogger(__name__)

GB = 1e9
PATIENCE_S = 30 * 3600.0
"""Simulated seconds without a training after which a run gives up: habits return every day."""
SAMPLES = 100
"""Training samples of a device where nobody says how many it has."""


@dataclass(frozen=True, slots=True)
class FleetRound:
    """A closed round of a simulated fleet. What was spent counts from the beginning."""

    report: RoundReport
    """The coordinator's report, with `time_s`."""
    time_s: float
    """Simulated seconds since the beginning."""
    joules: float
    bytes_down: int
    bytes_up: int
    metered_bytes: int
    money: float
    """Price of the metered bytes."""
    trainings: int
    stopped: int
    dropped: int
    trained_coverage_min: int | None = None
    """`Γ*` of all rounds so far (`RunTerms`); the like below."""
    trained_blocks: int | None = None
    trained_regions: int | None = None
    oldest_memory: int | None = None

    @property
    def terms(self) -> RunTerms:
        """The papers' `Γ*`, `S*` and `τ` over all rounds so far."""
        return RunTerms(
            self.trained_coverage_min,
            self.trained_blocks,
            self.trained_regions,
            self.oldest_memory,
        )

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the whole model; None if it is not measured."""
        return self.report.accuracy

    @property
    def spent(self) -> dict[str, float]:
        """Amounts spent, by tags for a `TensorBoardSink`."""
        names = ("joules", "bytes_down", "bytes_up", "metered_bytes", "money", "trainings")
        return {f"spent/{name}": float(getattr(self, name)) for name in names}


class FleetSimulation:
    """A coordinator and a population of devices in virtual time. `run` goes through it once."""

    def __init__(
        self,
        config: RoundsConfig | FragmentsConfig,
        model: GlobalModel,
        population: DevicePopulation,
        *,
        training: FleetTraining | None = None,
        samples: Sequence[int] | None = None,
        manifest: Manifest | None = None,
        evaluate: Evaluate | None = None,
        threads: int = 1,
    ) -> None:
        """`training` None: nothing is trained, and movements have the right size alone.

        `samples` is the number of training samples of every device, in the population's order.
        `manifest`, of the task's compiled graphs, lets devices predict the memory of activations.
        `evaluate` measures the levels for every report; `threads` are those of the aggregation.
        Raises `ConfigError`.
        """
        if config.min_devices > len(population):
            raise ConfigError(
                f"min_devices is {config.min_devices} but the population has {len(population)}"
            )
        if samples is not None and len(samples) != len(population):
            raise ConfigError(
                f"samples are given for {len(samples)} devices; the population has "
                f"{len(population)}"
            )
        self.model = model
        masks = settle_masks(config.masks, config.plan, lambda: model.norms)
        self._config = replace(config, masks=masks)
        if advice := fragment_advice(masks, config.plan):
            log.warning("%s", advice)
        self._population = population
        self._evaluate = evaluate
        self._threads = threads
        self._store = RunInRam()
        self._outlet = DirectOutlet(model)
        seed, plan = config.seed, config.plan
        hollow = HollowTraining(plan, model.buffers, seed=seed)
        self._around = Surroundings(
            plan,
            seed,
            self._outlet,
            hollow if training is None else training,
            RoundCosts(plan, model.encoding, manifest),
            [SAMPLES] * len(population) if samples is None else samples,
            population.availability(),
        )
        natures = {kind.name: Nature(kind, population) for kind in population.kinds}
        self.devices: dict[str, FleetDevice] = {
            name: FleetDevice(number, name, natures[kind.name], self._around)
            for number, (name, kind) in enumerate(population.devices())
        }
        """The devices, by name."""
        if len(self.devices) < len(population):
            raise ConfigError("kinds: two devices would have the same name; give other names")
        warn_of_horizon(config, (kind.policy for kind in population.kinds), len(population))
        self._run = VirtualRun(
            self._start, self._store, self._outlet, self.devices, patience_s=PATIENCE_S
        )

    @property
    def spending(self) -> Spending:
        """Amounts that all devices together have spent so far."""
        return self._around.spending

    @property
    def state(self) -> RoundsState | FragmentsState:
        """The state of the coordinator's machine. Raises `CoordinatorError` before `run`."""
        if self._run.course is None:
            raise CoordinatorError("the simulation has not started: iterate over run() first")
        return self._run.course.state

    def lowest_percents(self) -> dict[str, float]:
        """Return the lowest charge that each device's battery has had until now, by its name.

        Devices that never acted are looked at too; those without a battery are left out. To be
        called after the run: it lets time pass for every device.
        """
        found = {}
        for name, device in self.devices.items():
            device.body.wait_until(self._run.now_s)
            if (percent := device.body.lowest_percent) is not None:
                found[name] = percent
        return found

    def run(self) -> Iterator[FleetRound]:
        """Simulate to the end, yielding every round as it closes.

        An asynchronous run reports after every `min_devices` updates. Raises `CoordinatorError` if
        the run makes no progress.
        """
        terms = RunTerms()
        for report in self._run.run():
            terms = terms.after(report)
            yield self._told(report, terms)

    def _told(self, report: RoundReport, terms: RunTerms) -> FleetRound:
        spent, time_s = self._around.spending, self._run.now_s
        return FleetRound(
            report=replace(report, time_s=time_s),
            time_s=time_s,
            joules=spent.joules,
            bytes_down=spent.bytes_down,
            bytes_up=spent.bytes_up,
            metered_bytes=spent.metered_bytes,
            money=self._population.price_per_gb * spent.metered_bytes / GB,
            trainings=spent.trainings,
            stopped=spent.stopped,
            dropped=spent.dropped,
            trained_coverage_min=terms.coverage,
            trained_blocks=terms.blocks,
            trained_regions=terms.regions,
            oldest_memory=terms.staleness,
        )

    def _start(self, now_s: float) -> RoundsCourse | FragmentsCourse:
        config, model = self._config, self.model
        parts = Parts(
            self._store, model, self._outlet, evaluate=self._evaluate, threads=self._threads
        )
        start = Checkpoint.first(config.plan, model.theta, model.buffers)
        if isinstance(config, FragmentsConfig):
            return FragmentsCourse(config, parts, start, report_every=config.min_devices)
        memory = open_memory(config, None, threads=self._threads, devices=len(self._population))
        return RoundsCourse(config, parts, start, memory, now_s)


def reached(rounds: Sequence[FleetRound], accuracy: float) -> FleetRound | None:
    """Return the first round with this accuracy: when, and at what cost; None: there is none."""
    return next((each for each in rounds if (each.accuracy or 0.0) >= accuracy), None)
