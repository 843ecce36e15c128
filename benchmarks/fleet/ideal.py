"""Fleets of studies: populations from files, shipped fleets, and ideal ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.fleet.config import StudyFleetTable
from coordinator.simulate.fleet.population import (
    DeviceKind,
    DevicePopulation,
    load_population,
    population_of,
)
from edge_sdk.decide.decision import Policy
from edge_sdk.decide.emulation.emulation import PASSES, REFERENCE_MACS_PER_S
from edge_sdk.decide.emulation.fleet import find_fleet
from edge_sdk.decide.gates import Limits
from edge_sdk.machine.board import Board, Quantity, SpeedSpec, find_board

DEVICES = 10
"""Devices of an ideal fleet, where nobody says how many."""
NEVER_WARM_S = 1e9


def find_population(fleet: StudyFleetTable) -> DevicePopulation:
    """Return the devices of a study. Raises `ConfigError`."""
    if fleet.population is None:
        return ideal_fleet(fleet)
    if fleet.population.endswith(".toml"):
        return load_population(Path(fleet.population))
    return population_of(find_fleet(fleet.population), fleet.devices)


def ideal_fleet(fleet: StudyFleetTable) -> DevicePopulation:
    """Make devices that are always there, never warm and on mains, each with a level of its own.

    Such a device trains its level or, in the rounds that `participation` leaves out, nothing.
    """
    board, devices = find_board(fleet.board), fleet.devices or DEVICES

    def kind(number: int, count: int, name: str) -> DeviceKind:
        level = fleet.levels[number % len(fleet.levels)]
        paced = _paced(board, fleet.speeds[number % len(fleet.speeds)])
        policy = Policy(
            level=level,
            levels=(level,),
            compute=_compute(paced),
            bytes_per_s=_bytes_per_s(paced),
            participation=fleet.participation[number % len(fleet.participation)],
            schedule=fleet.schedule,
            limits=Limits(heat_margin_c=0.0),
        )
        return DeviceKind(
            board=paced,
            count=count,
            name=name,
            policy=policy,
            battery_percent=None if board.battery is None else (100.0, 100.0),
            charging_hours=None if board.battery is None else (0, 24 * 60),
        )

    if len(fleet.levels) == len(fleet.participation) == len(fleet.speeds) == 1:
        kinds = [kind(0, devices, "device")]
    else:
        digits = len(str(devices - 1))
        kinds = [kind(number, 1, f"device-{number:0{digits}}") for number in range(devices)]
    return DevicePopulation(kinds=tuple(kinds), warm_s=NEVER_WARM_S)


def _paced(board: Board, speed: float) -> Board:
    ratio = board.speed.speed_ratio
    if ratio is None or speed == 1:
        return board
    pace = Quantity(ratio.value * speed, f"{speed:g} times that of the profile", "assumed")
    return replace(board, speed=SpeedSpec(speed_ratio=pace))


def _compute(board: Board) -> float | None:
    """Parameters × samples per second of training, each parameter used once a sample."""
    ratio = board.speed.speed_ratio
    return None if ratio is None else REFERENCE_MACS_PER_S.value * ratio.value / PASSES


def _bytes_per_s(board: Board) -> float | None:
    sends = board.network.up_mbit_s
    return None if sends is None else sends.value * 1e6 / 8
