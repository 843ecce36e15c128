"""What a round at one level costs a device, before it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EnergySource = Literal["measured", "profile", "unknown"]
"""Of watts: this device's own sensors, the profile of its board, or nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A prediction for one round at one level; None: not known."""

    level: float
    seconds: float
    """Fetching, training and sending, from the assignment to the receipt."""
    joules: float | None
    """Above what the device would draw without it."""
    peak_bytes: float
    """Memory above what the program holds now; a bound, with its margin."""
    bytes_down: float
    bytes_up: float
    energy_from: EnergySource = "unknown"
    """Where `joules` come from."""
    transfers_counted: bool = True
    """False: nobody knows how fast the link is, and `seconds` are those of training alone."""
