"""Server rules: how movements become a movement of the global model (docs/algorithms.md).

A rule is a frozen value with its options. Synchronous ones (`Rule`) run once a round over all
movements, asynchronous ones (`AsyncRule`) at every arrival. A new rule is one short file
and one line in `RULES` or `ASYNC_RULES`.
"""

from __future__ import annotations

from typing import Any

from coordinator.aggregate.rules.asynchronous import AsyncRule
from coordinator.aggregate.rules.ccfl import Ccfl1, Ccfl2, Ccfl3, Strategy2
from coordinator.aggregate.rules.fed_buff import FedBuff
from coordinator.aggregate.rules.fed_raa import FedAsync, FedRaa
from coordinator.aggregate.rules.ra_fed import FedAvg, RaFed, Strategy1, SubDisMo
from coordinator.aggregate.rules.ram_fed import FedVarp, RamFed
from coordinator.aggregate.rules.rule import Closing, Rule
from coordinator.aggregate.rules.scaffold import Scaffold
from edge_sdk.program.settings.choices import make_named

__all__ = ["ASYNC_RULES", "RULES", "AsyncRule", "Closing", "Rule", "Scaffold", "make_rule"]

RULES: dict[str, type[Rule]] = {
    "fedavg": FedAvg,
    "ra-fed": RaFed,
    "ram-fed": RamFed,
    "ccfl-1": Ccfl1,
    "ccfl-2": Ccfl2,
    "ccfl-3": Ccfl3,
    "strategy-1": Strategy1,
    "strategy-2": Strategy2,
    "subdismo": SubDisMo,
    "fedvarp": FedVarp,
    "scaffold": Scaffold,
}
"""Synchronous rules by name."""

ASYNC_RULES: dict[str, type[AsyncRule]] = {
    "fed-raa": FedRaa,
    "fedasync": FedAsync,
    "fedbuff": FedBuff,
}
"""Asynchronous rules by name."""


def make_rule(name: str, **options: Any) -> Rule | AsyncRule:
    """Make the rule called `name`. Raises `ConfigError` for an unknown name or option."""
    known: dict[str, type[Rule] | type[AsyncRule]] = {**RULES, **ASYNC_RULES}
    return make_named("rule", known, name, options)
