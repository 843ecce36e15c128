"""The interface of a memory: for every device and block, the movement of the latest round.

Laws, for both stores (tests/contract/memory):

- *newest by round made*: a block's entry is replaced only by a movement made in a later round,
  whatever the order of arrival;
- *sums*: `total`, `weight` and `entries` are those of the entries that `recall` gives, up to the
  rounding of float64 sums. Held values are summed, not the ones given before they were rounded to
  the stored type, so no error of the type builds up;
- *age*: after `advance(now)` no entry with `now − made > max_staleness` is left;
- *forgetting*: after `forget(device)` there is no entry of that device, and the sums are those of
  the others, up to the rounding of float64 sums;
- *order*: the result does not depend on the order in which one call's movements are given, nor on
  the number of threads; each parameter is summed in device-name order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Weighting
from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.blocks import Blocks

MemoryType = Literal["fp32", "fp16", "int8"]
Float64 = NDArray[np.float64]
Rounds = NDArray[np.int32]
Reader = Callable[[int, Float64], None]
"""Called with stretches of a change: the first parameter, and the values, which it may not keep.
Several threads call it at a time, each with other stretches; together they are the whole model."""


NO_LIMIT = 1_000_000
"""More rounds than any run has: an age that is never reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Settings of a memory. Raises `ConfigError` for values that make no sense."""

    memory_type: MemoryType = "fp16"
    """Type of held values; `values.py` states each type's bound."""
    damping: float = 1.0
    """ρ: factor that an entry's share of `total` fades by every round. In (0, 1]."""
    max_staleness: int = NO_LIMIT
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
