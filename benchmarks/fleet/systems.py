"""Speed and size of a simulated fleet without training: device-rounds, bytes per device.

A device-round is everything from a selected device's opening to its receipt: its decision with
battery, heat and costs, the bid, the assignment, the transfers, the movement's checks. The close of
the round is included. Movements are zeros of the model's size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch

from benchmarks.models import mlp
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin
from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import RULES
from coordinator.masks import make_masks
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from coordinator.simulate.fleet.simulation import FleetSimulation
from coordinator.task.task import Task, make_task
from edge_sdk.machine.board import find_board
from edge_sdk.protocol.messages.local_rule import LocalRule

BOARDS = ("redmi_7a", "pixel_4", "pixel_8", "galaxy_s23")
MODELS = {"small": (64, 32, 10), "mlp": (784, 200, 200, 10)}
"""Widths of perceptrons: one whose arithmetic is nothing, and one with 200,000 weights."""
RATE_TARGET = 5000.0
HELD_TARGET_KB = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemsConfig:
    """The job: `participants` of `devices` phones take part in each round."""

    devices: int = 1000
    participants: int = 100
    rounds: int = 60
    held: int = 100_000
    """Devices of the fleet whose memory is measured."""

    @property
    def ticks(self) -> int:
        """Number of ticks of `measure_systems`."""
        return len(MODELS) + 1


@dataclass(frozen=True, slots=True)
class SystemsRow:
    """One model: device-rounds per second of the wall clock, and of this process's CPU time."""

    model: str
    parameters: int
    per_s: float
    per_cpu_s: float


@dataclass(frozen=True, slots=True)
class HeldFleet:
    """A fleet that is held: its size, kilobytes per device, and seconds until its first round."""

    devices: int
    kb_per_device: float
    start_s: float


def phones(count: int) -> DevicePopulation:
    """Make a population of phones in the evening, a quarter of each kind."""
    kinds = [
        DeviceKind(
            board=find_board(board),
            count=max(1, count // len(BOARDS)),
            battery_percent=(40, 95),
            charging_hours=(22 * 60, 6 * 60 + 30),
            spread_minutes=60,
            background_load=(0.0, 0.3),
        )
        for board in BOARDS
    ]
    return DevicePopulation(kinds=tuple(kinds), starts=22 * 60)


def measure_systems(config: SystemsConfig, begin: Begin) -> tuple[list[SystemsRow], HeldFleet]:
    """Measure one row per model, and a large fleet."""
    rows = []
    for name, widths in MODELS.items():
        tick = begin(f"without training, {name}")
        rows.append(_rate(name, _task(widths), config))
        tick()
    tick = begin(f"{config.held:,} devices")
    held = _held(_task(MODELS["small"]), config)
    tick()
    return rows, held


def systems_figures(rows: list[SystemsRow], held: HeldFleet) -> list[Figure]:
    """Return the rates, and the memory of a device that is only there."""
    found = [
        Figure(
            f"fleet.systems.{row.model}.device_rounds_per_s",
            row.per_s,
            "1/s",
            target=RATE_TARGET if row.model == "small" else None,
            better="higher",
        )
        for row in rows
    ]
    found.append(
        Figure("fleet.systems.idle_device_kb", held.kb_per_device, "kB", target=HELD_TARGET_KB)
    )
    return found


def _task(widths: tuple[int, ...]) -> Task:
    torch.manual_seed(0)
    return make_task(mlp(*widths), torch.zeros(2, widths[0]), groups=4)


def _simulation(task: Task, devices: int, config: SystemsConfig) -> FleetSimulation:
    population = phones(devices)
    rounds = RoundsConfig(
        plan=task.plan,
        rule=RULES["ra-fed"](),
        masks=make_masks("random"),
        local_rule=LocalRule(learning_rate=0.1),
        rounds=config.rounds + 1,
        steps=20,
        batch_size=32,
        min_devices=len(population),
        participants=config.participants,
        seed=0,
    )
    return FleetSimulation(rounds, GlobalModel(task.plan, task.weights, task.buffers), population)


def _rate(name: str, task: Task, config: SystemsConfig) -> SystemsRow:
    simulation = _simulation(task, config.devices, config)
    rounds = simulation.run()
    next(rounds)
    done, wall, cpu = simulation.spending.trainings, time.perf_counter(), time.process_time()
    for _ in rounds:
        pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    made = simulation.spending.trainings - done
    return SystemsRow(name, task.plan.parameters, made / wall, made / cpu)


def _held(task: Task, config: SystemsConfig) -> HeldFleet:
    process, started = psutil.Process(), time.perf_counter()
    before = process.memory_info().rss
    simulation = _simulation(task, config.held, config)
    rounds = simulation.run()
    next(rounds)
    took = time.perf_counter() - started
    grown = process.memory_info().rss - before
    devices = len(simulation.devices)
    return HeldFleet(devices, grown / 1e3 / devices, took)
