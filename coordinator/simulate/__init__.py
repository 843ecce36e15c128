"""A whole federation in one process, fleets of thousands in virtual time, and the demo.

`from coordinator import simulate` gives the names below (docs/fleets.md); modules behind them are
private and may move.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.simulate.fleet.cohorts import CohortTraining
    from coordinator.simulate.fleet.engines.ray import RayEngine
    from coordinator.simulate.fleet.population import (
        DeviceKind,
        DevicePopulation,
        load_population,
        population_of,
    )
    from coordinator.simulate.fleet.shared import DealtData, deal_out
    from coordinator.simulate.fleet.simulation import FleetRound, FleetSimulation, reached
    from coordinator.simulate.fleet.trace import Availability, read_trace

__all__ = [
    "Availability",
    "CohortTraining",
    "DealtData",
    "DeviceKind",
    "DevicePopulation",
    "FleetRound",
    "FleetSimulation",
    "RayEngine",
    "deal_out",
    "load_population",
    "population_of",
    "reached",
    "read_trace",
]

_HOMES = {
    "Availability": "trace",
    "CohortTraining": "cohorts",
    "DealtData": "shared",
    "DeviceKind": "population",
    "FleetRound": "simulation",
    "FleetSimulation": "simulation",
    "DevicePopulation": "population",
    "RayEngine": "engines.ray",
    "deal_out": "shared",
    "load_population": "population",
    "population_of": "population",
    "reached": "simulation",
    "read_trace": "trace",
}
"""Modules of the names, which are loaded when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"coordinator.simulate.fleet.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
