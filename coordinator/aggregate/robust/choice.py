"""Names and numbers of the robust choices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from coordinator.errors import ConfigError
from edge_sdk.program.settings import Example, Within, check_fields

RobustName = Literal[
    "none",
    "clip",
    "clip-median",
    "median",
    "trimmed-mean",
    "geometric-median",
    "multi-krum",
    "root",
]

RECOMMENDED: RobustName = "clip-median"
"""For a run whose devices nobody vouches for: it bounds every device, and an honest one that
differs from the others keeps its vote."""

SERVED: RobustName = "none"
"""Choice of `tessera-coordinator serve` where run.robust is not set, for synchronous rules."""

CLIPPING_ONLY: tuple[RobustName, ...] = ("none", "clip", "clip-median", "root")
"""Choices that leave the rule's mean as it is: they only shorten or weigh what enters it."""

THIN = 2
"""Coverage up to which a block is only clipped: of two devices, neither is a majority."""

ROUNDING = 1e-9
"""Room for rounding: 0.2 × 15 is 3, not a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """A robust choice and its numbers. Raises `ConfigError`."""

    name: RobustName = "none"
    """Defence against bad devices: `none`; `clip`, at a fixed norm; `clip-median`, at the median of
    the round; and on top of the latter `median`, `trimmed-mean`, `geometric-median` or `multi-krum`
    instead of the mean; `root` weighs devices by their agreement with a movement made from data of
    the operator."""
    norm: Annotated[float | None, Within(above=0), Example(1.0)] = None
    """Norm to which `clip` shortens longer movements; needed for it."""
    factor: Annotated[float, Within(above=0)] = 1.0
    """Multiple of the round's median norm to which longer blocks are shortened; with `root`, of the
    norm of the root's movement."""
    hostile: Annotated[float, Within(above=0, below=0.5)] = 0.2
    """Share of bad devices that `trimmed-mean` and `multi-krum` reckon with."""

    agreement: Annotated[float | None, Within(least=-1, below=0), Example(-0.15)] = None
    """Mean agreement with the others of its rounds, from −1 to 1, below which a device is
    quarantined if it also stands out; without it, none is for this reason. Not with `none`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name == "clip" and self.norm is None:
            raise ConfigError("robust = 'clip' needs the norm to clip at: set norm, or clip-median")
        if self.agreement is not None and not self.active:
            raise ConfigError(
                f"agreement = {self.agreement:g}: does nothing with robust = 'none'; set robust in "
                "[run], for example to clip-median"
            )

    @property
    def active(self) -> bool:
        """True if anything is done about bad devices."""
        return self.name != "none"

    @property
    def combines(self) -> bool:
        """True if the choice replaces a rule's mean, where enough devices hold a block."""
        return self.name not in CLIPPING_ONLY

    def suspects(self, coverage: int) -> int:
        """Return how many devices of a block may be bad: at least one, and fewer than half."""
        return min(max(1, math.ceil(self.hostile * coverage - ROUNDING)), (coverage - 1) // 2)
