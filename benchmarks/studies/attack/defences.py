"""Defences by name: settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.aggregate.robust import Robust, RobustName


@dataclass(frozen=True, slots=True, kw_only=True)
class Defence:
    """A defence, as the settings of a run that switch it on."""

    tells: str
    """The defence in words."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the rounds, beside their defaults."""


NO_DEFENCE = "none"
_ROBUST: tuple[tuple[RobustName, dict[str, float], str], ...] = (
    ("clip", {"norm": 1.0}, "movements are shortened to a norm of 1"),
    ("clip-median", {}, "blocks are shortened to the median norm of the round"),
    ("median", {}, "and the coordinate-wise median replaces the mean"),
    ("trimmed-mean", {}, "and the trimmed mean replaces the mean"),
    ("geometric-median", {}, "and the geometric median replaces the mean"),
    ("multi-krum", {}, "and only the devices that are nearest to others count"),
)
DEFENCES: dict[str, Defence] = {
    NO_DEFENCE: Defence(tells="every movement that can be decoded counts", run={"rms_limit": None}),
    "screening": Defence(tells="movements far from the usual are refused"),
    **{
        name: Defence(tells=tells, run={"robust": Robust(name=name, **numbers)})
        for name, numbers, tells in _ROBUST
    },
}
"""Defences by name."""

RECOMMENDED = "screening"
"""The defence that the aims are about."""
