"""The predicted cost of a round at one level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EnergySource = Literal["measured", "profile", "unknown"]
"""Source of watts: this device's own sensors, the profile of its board, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A prediction for one round at one level; None: unknown."""

    level: float
    seconds: float
    """Time to fetch, train and send, from the assignment to the receipt."""
    joules: float | None
    """Energy above what the device would draw without it."""
    peak_bytes: float
    """Memory beyond what the program holds now; an upper bound, with its margin."""
    bytes_down: float
    bytes_up: float
    energy_from: EnergySource = "unknown"
    """Source of `joules`."""
    transfers_counted: bool = True
    """False: the link's speed is unknown, and `seconds` covers training alone."""
