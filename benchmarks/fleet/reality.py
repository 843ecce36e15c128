"""The same small fleet as programs over a broker, and simulated: what each device did.

The programs are those of the demo: a broker, a coordinator, and a process for each device, which
emulates a board. Their clocks are emulated too, so their seconds and joules are the boards', not
this machine's; what is real are the programs, the messages and the training. The simulation gets
the same devices, data and settings, and trains nothing. It is told that boards never get hot:
emulated ones do not know heat.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import AsyncRule
from coordinator.errors import ConfigError
from coordinator.masks import make_masks
from coordinator.rounds.report import DeviceRound
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.demo.config import DemoConfig
from coordinator.simulate.demo.digits import deal, load_digits
from coordinator.simulate.demo.processes import ProcessDemo
from coordinator.simulate.demo.run import BATCH_SIZE, STEPS, DemoRound, choose_masks, local_rule
from coordinator.simulate.fleet.population import DevicePopulation, population_of
from coordinator.simulate.fleet.simulation import FleetSimulation
from edge_sdk.decide.emulation.fleet import shipped_fleet
from edge_sdk.machine.board import Quantity

INTERVAL = re.compile(r"^interval_s = .*$", re.MULTILINE)
NEVER_S = 1e12
"""Seconds of training that make a board hot: more than there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealityConfig:
    """The fleet that is run both ways: all members of the demo's."""

    rounds: int = 8
    interval_s: int = 240
    """Seconds between the emulated rounds: about as long as the simulated ones take."""
    rule: str = "ra-fed"
    mask: str = "random"
    seed: int = 0

    @property
    def ticks(self) -> int:
        """Number of ticks of `measure_reality`."""
        return self.rounds + 1


@dataclass(frozen=True, slots=True)
class RealityRow:
    """One round both ways, over all devices; the programs' part first in every pair."""

    round: int
    devices: int
    alike: int
    """Devices that decided alike: the same level, or both skipped."""
    bytes_up: tuple[int, int]
    bytes_down: tuple[int, int]
    train_s: tuple[float, float]
    """Seconds of training of the devices' boards."""
    joules: tuple[float, float]
    """Energy of training above what the boards draw anyway; programs also calibrate."""
    wall_s: tuple[float, float]
    """Seconds of this machine's clock."""


def measure_reality(config: RealityConfig, begin: Begin) -> list[RealityRow]:
    """Run the fleet both ways and return one row per round."""
    with TemporaryDirectory(prefix="tessera-check-") as folder:
        fleet = Path(folder) / "fleet.toml"
        text = shipped_fleet("mixed").read_text(encoding="utf-8")
        fleet.write_text(INTERVAL.sub(f"interval_s = {config.interval_s}", text), encoding="utf-8")
        return _both_ways(config, fleet, begin)


def _both_ways(config: RealityConfig, fleet: Path, begin: Begin) -> list[RealityRow]:
    demo = DemoConfig(
        rule=config.rule, mask=config.mask, rounds=config.rounds, fleet=fleet, seed=config.seed
    )
    programs = ProcessDemo(demo)
    tick, took, before = begin("programs"), list[float](), time.perf_counter()
    for _ in programs.run():
        took.append(time.perf_counter() - before)
        before = time.perf_counter()
        tick()
    population = replace(population_of(programs.fleet), warm_s=NEVER_S)
    tick = begin("simulation")
    simulation, rows = _simulation(demo, programs, population), []
    began = time.perf_counter()
    for real, simulated, wall_s in zip(programs.rounds, simulation.run(), took, strict=True):
        ours = time.perf_counter() - began
        rows.append(compare_rounds(real, simulated.report.devices, population, (wall_s, ours)))
        began = time.perf_counter()
    tick()
    return rows


def _simulation(
    demo: DemoConfig, programs: ProcessDemo, population: DevicePopulation
) -> FleetSimulation:
    rule, settled = choose_masks(demo)
    if isinstance(rule, AsyncRule):
        raise ConfigError(f"rule = {demo.rule!r}: its devices follow no common rounds")
    names = [name for name, _ in population.devices()]
    shares = deal(load_digits(demo.seed).train, tuple(names), demo.seed)
    model = programs.initial
    config = RoundsConfig(
        plan=model.plan,
        rule=rule,
        masks=make_masks(str(settled.mask)),
        local_rule=local_rule(settled),
        rounds=demo.rounds,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        min_devices=len(names),
        train_deadline_s=programs.fleet.deadline_s,
        seed=demo.seed,
    )
    return FleetSimulation(
        config,
        GlobalModel(model.plan, model.weights, model.buffers, seed=demo.seed),
        population,
        samples=[len(shares[name]) for name in names],
        manifest=model.manifest,
    )


def compare_rounds(
    real: DemoRound,
    simulated: Sequence[DeviceRound],
    population: DevicePopulation,
    wall_s: tuple[float, float],
) -> RealityRow:
    """Compare a round of programs with the simulated one."""
    powers = {name: kind.board.power for name, kind in population.devices()}
    idle_w = {name: _value(power.idle_w) for name, power in powers.items()}
    train_w = {name: _value(power.train_w) for name, power in powers.items()}
    lines, other = real.report.devices, {line.device: line for line in simulated}
    # The programs' joules are those their batteries lost in training, idle power included.
    drawn = [
        (each.joules or 0.0) - idle_w[line.device] * each.train_s
        for line, each in zip(lines, real.lived, strict=True)
    ]
    spent = [(train_w[line.device] - idle_w[line.device]) * line.train_s for line in simulated]
    return RealityRow(
        real.report.round,
        len(lines),
        sum(line.level == other[line.device].level for line in lines),
        (sum(line.bytes_up for line in lines), sum(line.bytes_up for line in simulated)),
        (sum(line.bytes_down for line in lines), sum(line.bytes_down for line in simulated)),
        (fsum(line.train_s for line in lines), fsum(line.train_s for line in simulated)),
        (fsum(drawn), fsum(spent)),
        wall_s,
    )


def reality_figures(rows: Sequence[RealityRow]) -> list[Figure]:
    """Return the share of equal decisions, and what was simulated over what programs did."""
    figures = [
        Figure(
            "fleet.check.equal_decisions",
            sum(row.alike for row in rows) / sum(row.devices for row in rows),
            "×",
            better="higher",
        )
    ]
    for name in ("bytes_up", "bytes_down", "train_s", "joules"):
        real, simulated = (sum(getattr(row, name)[side] for row in rows) for side in (0, 1))
        figures.append(Figure(f"fleet.check.{name}_over_real", simulated / real, "×"))
    return figures


def _value(quantity: Quantity | None) -> float:
    return 0.0 if quantity is None else quantity.value
