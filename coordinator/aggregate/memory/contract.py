"""The interface of a memory: for every device and block, the movement of the latest round.

Laws, for both stores (tests/contract/memory):

- *newest by round made*: a block's entry is replaced only by a movement made in a later round,
  whatever the order of arrival;
- *sums*: `total`, `weight` and `entries` are those of the entries that `recall` gives, up to the
  rounding of float64 sums. Held values are summed, not the ones given before they were rounded to
  the stored type, so no error of the type builds up;
- *age*: after `advance(now)` no entry with `now − made > max_staleness` is left;
- *order*: the result does not depend on the order in which one call's movements are given, nor on
  the number of threads; each parameter is summed in device-name order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution, Weighting
from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.blocks import Blocks
from edge_sdk.protocol.plan.layout import Indices
from edge_sdk.protocol.plan.plan import ModelPlan

MemoryType = Literal["fp32", "fp16", "int8"]
Float64 = NDArray[np.float64]
Rounds = NDArray[np.int32]
Reader = Callable[[int, Float64], None]
"""Called with stretches of a change: the first parameter, and the values, which it may not keep.
Several threads call it at a time, each with other stretches; together they are the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Settings of a memory. Raises `ConfigError` for values that make no sense."""

    memory_type: MemoryType = "fp16"
    """Type of held values; `values.py` states each type's bound."""
    damping: float = 1.0
    """ρ: factor that an entry's share of `total` fades by every round. In (0, 1]."""
    max_staleness: int = 1_000_000
    """Rounds after which an entry leaves."""
    weighting: Weighting = "uniform"
    """An entry's weight: 1, the device's samples, or the movement's level."""
    sums: bool = True
    """Keep `total` and `weight`."""
    threads: int = 1

    def __post_init__(self) -> None:
        for name, known in (("memory_type", MemoryType), ("weighting", Weighting)):
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"{name} is one of {get_args(known)}, not {getattr(self, name)!r}"
                )
        if not (math.isfinite(self.damping) and 0 < self.damping <= 1):
            raise ConfigError(f"memory damping is in (0, 1], not {self.damping!r}")
        if self.max_staleness < 0:
            raise ConfigError(f"memory max_staleness must not be negative: {self.max_staleness}")
        if self.threads < 1:
            raise ConfigError(f"memory threads must be at least 1, not {self.threads}")


@dataclass(frozen=True, slots=True)
class Made:
    """Terms that one stored movement was made under."""

    round: int
    learning_rate: float
    """γ; above 0."""
    level: float
    weight: float
    """As the memory's weighting says."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The part of one stored movement that is still the newest."""

    made: Made
    blocks: Blocks
    """Float32; at times a read-only view of the store, valid as long as it is referenced."""


class Memory(Protocol):
    """The newest movement of every device, block by block. Not safe for use by two threads."""

    plan: ModelPlan
    total: Float64
    """Per parameter, in block order: Σ weight · damping^(now − made) · u / learning_rate.

    Updated in place; not to be changed by others. Empty without sums."""
    weight: Float64
    """Per block, the sum of the entries' weights. Empty without sums."""
    entries: NDArray[np.int64]
    """Per block, the number of entries."""

    @property
    def now(self) -> int:
        """Round that `advance` last went to; 0 at first."""

    def recall(self, device: str, ids: Indices | None = None) -> list[Piece]:
        """Return the entries of a device, by round made; only of these blocks, if ids are given.

        `ids` are ascending. An unknown device has no pieces.
        """

    def rounds(self, device: str) -> Rounds:
        """Return per block the round its entry was made in; 0 where there is none. Read-only."""

    def oldest(self) -> int | None:
        """Return the earliest round made that is still held; None when nothing is."""

    def advance(self, now: int) -> None:
        """Go to round `now`: `total` fades by damping per round passed, stale entries leave.

        Raises `StateError` if that is before the present round.
        """

    def write(self, contributions: Sequence[Contribution], reader: Reader | None = None) -> None:
        """Take movements where they are newer than what is held and not stale.

        `reader` is shown, stretch by stretch, the change of `total` per parameter with the new
        values as given rather than as held: Σ weight · damping^(now − made) · D / learning_rate
        over what was taken, minus what left. Without sums it is shown nothing.

        Values are finite, ids ascending and the plan's: a `Contribution` has been checked. Raises
        `StateError` for a movement of a later round than `now`, `BlockError` for one that does not
        fit the plan; nothing has changed then.
        """

    def commit(self) -> None:
        """Make all changes since the last commit durable at once; a crash before leaves none."""

    def close(self) -> None:
        """Close files and threads. On disk, changes that were not committed are lost."""
