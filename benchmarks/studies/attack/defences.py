"""Defences by name: settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.studies.attack.attackers import COHORT_LIMIT
from coordinator.aggregate.robust import Robust, RobustName
from edge_sdk.protocol.messages.local_rule import CLIP_NORM


@dataclass(frozen=True, slots=True, kw_only=True)
class Defence:
    """A defence, as the settings of a run that switch it on."""

    tells: str
    """The defence in words."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the rounds, beside their defaults."""
    clip_norm: float | None = CLIP_NORM
    """Norm to which devices clip gradients, which bounds their movements."""


def _robust(name: RobustName, tells: str, **numbers: Any) -> Defence:
    return Defence(tells=tells, run={**_SCREENED, "robust": Robust(name=name, **numbers)})


_SCREENED = {"cohort_limit": COHORT_LIMIT}


NO_DEFENCE = "none"
DEFENCES: dict[str, Defence] = {
    NO_DEFENCE: Defence(
        tells="every movement that can be decoded counts",
        run={
            "rms_limit": None,
            "cohort_limit": None,
            "samples_limit": 1e300,
            "quarantine_after": 0,
        },
        clip_norm=None,
    ),
    "screening": Defence(
        tells="impossible movements and those far from the others are refused; samples are capped",
        run=_SCREENED,
    ),
    "clip": _robust("clip", "`screening`, and movements are shortened to a norm of 1", norm=1.0),
    "clip-median": _robust(
        "clip-median", "`screening`, and blocks are shortened to the median norm of the round"
    ),
    "agreement": Defence(
        tells=(
            "`clip-median`, and devices that lead away from the others again and again are "
            "quarantined; `cohort_limit` is 100"
        ),
        run={"robust": Robust(name="clip-median", agreement=-0.15), "cohort_limit": 100.0},
    ),
    "median": _robust("median", "`clip-median`, with the coordinate-wise median for the mean"),
    "trimmed-mean": _robust("trimmed-mean", "`clip-median`, with the trimmed mean for the mean"),
    "geometric-median": _robust(
        "geometric-median", "`clip-median`, with the geometric median for the mean"
    ),
    "multi-krum": _robust(
        "multi-krum", "`clip-median`, with the mean of the devices nearest to others"
    ),
    "root": _robust(
        "root", "`screening`, and devices weigh as much as they agree with 100 samples of ours"
    ),
}
"""Defences by name."""

RECOMMENDED = "agreement"
"""The defence that the aims are about."""
