"""A whole federation in one process, fleets of thousands in virtual time, and the demo.

`from coordinator import simulate` gives the names below (docs/fleets.md); modules behind them are
private and may move.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.simulate.budgets import (
        SkewedDevices,
        beta_budgets,
        even_skew,
        high_skew,
        moderate_skew,
        split_budgets,
    )
    from coordinator.simulate.fleet.cohorts import CohortTraining
    from coordinator.simulate.fleet.population import (
        DeviceKind,
        DevicePopulation,
        load_population,
        population_of,
        study_population,
    )
    from coordinator.simulate.fleet.shared import DealtData, deal_out
    from coordinator.simulate.fleet.simulation import FleetRound, FleetSimulation, reached
    from coordinator.simulate.fleet.trace import Availability, read_trace
    from coordinator.simulate.presets import LEVEL_PRESETS, preset_levels, study_policies

__all__ = [
    "LEVEL_PRESETS",
    "Availability",
    "CohortTraining",
    "DealtData",
    "DeviceKind",
    "DevicePopulation",
    "FleetRound",
    "FleetSimulation",
    "SkewedDevices",
    "beta_budgets",
    "deal_out",
    "even_skew",
    "high_skew",
    "load_population",
    "moderate_skew",
    "population_of",
    "preset_levels",
    "reached",
    "read_trace",
    "split_budgets",
    "study_policies",
    "study_population",
]

_HOMES = {
    "LEVEL_PRESETS": "presets",
    "Availability": "fleet.trace",
    "CohortTraining": "fleet.cohorts",
    "DealtData": "fleet.shared",
    "DeviceKind": "fleet.population",
    "DevicePopulation": "fleet.population",
    "FleetRound": "fleet.simulation",
    "FleetSimulation": "fleet.simulation",
    "SkewedDevices": "budgets",
    "beta_budgets": "budgets",
    "deal_out": "fleet.shared",
    "even_skew": "budgets",
    "high_skew": "budgets",
    "load_population": "fleet.population",
    "moderate_skew": "budgets",
    "population_of": "fleet.population",
    "preset_levels": "presets",
    "reached": "fleet.simulation",
    "read_trace": "fleet.trace",
    "split_budgets": "budgets",
    "study_policies": "presets",
    "study_population": "fleet.population",
}
"""Modules of the names, which are loaded when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"coordinator.simulate.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
