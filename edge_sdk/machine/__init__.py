"""The machine's state: probes read its sensors, and a snapshot holds their readings.

    probe = choose_probe()
    probe.snapshot().battery.percent      # None: unknown

Probes are loaded on first use: code that only decides from snapshots needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from edge_sdk.machine.snapshot import (
    Battery,
    CoreClass,
    Cpu,
    Gpu,
    Heat,
    MemoryState,
    Network,
    Power,
    Probe,
    Snapshot,
    Trip,
    Zone,
)
from edge_sdk.program.plain import ProfileError

if TYPE_CHECKING:
    from edge_sdk.machine.probe import (
        LocalProbe,
        ProbeName,
        PushedProbe,
        StaticProbe,
        choose_probe,
    )

__all__ = [
    "Battery",
    "CoreClass",
    "Cpu",
    "Gpu",
    "Heat",
    "LocalProbe",
    "MemoryState",
    "Network",
    "Power",
    "Probe",
    "ProbeName",
    "ProfileError",
    "PushedProbe",
    "Snapshot",
    "StaticProbe",
    "Trip",
    "Zone",
    "choose_probe",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("edge_sdk.machine.probe"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
