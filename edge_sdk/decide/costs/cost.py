"""The predicted cost of a round at one level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EnergySource = Literal["measured", "profile", "unknown"]
"""Source of watts: this device's own sensors, the profile of its board, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A prediction for one round at one level; None: unknown.

    Where the local rule trains several widths, it is that of steps with one pass, each of a width
    drawn from the level's own and the narrower ones; `second_…` is what two passes a step take on
    top of it, the own width and a drawn narrower one. 0: the rule asks for one.
    """

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
    second_s: float = 0.0
    second_j: float | None = 0.0
    second_bytes: float = 0.0
    transfers_counted: bool = True
    """False: the link's speed is unknown, and `seconds` covers training alone."""
