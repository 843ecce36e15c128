"""Defences by name: settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Defence:
    """A defence, as the settings of a run that switch it on."""

    tells: str
    """The defence in words."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the rounds, beside their defaults."""


NO_DEFENCE = "none"
DEFENCES: dict[str, Defence] = {
    NO_DEFENCE: Defence(tells="every movement that can be decoded counts", run={"rms_limit": None}),
    "screening": Defence(tells="movements far from the usual are refused"),
}
"""Defences by name."""

RECOMMENDED = "screening"
"""The defence that the aims are about."""
