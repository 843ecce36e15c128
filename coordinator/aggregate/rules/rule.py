"""The shape of a rule: what it is given, what it returns, what it asks of the rounds around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coordinator.aggregate.contribution import Contribution
from coordinator.aggregate.memory import Memory
from coordinator.errors import ConfigError
from edge_sdk.protocol.plan.blocks import Float32
from edge_sdk.protocol.plan.plan import ModelPlan

Weighting = Literal["uniform", "samples"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Closing:
    """A round about to close, as a rule sees it."""

    plan: ModelPlan
    round: int
    theta: Float32
    """The global model before the round, in block order; not to be changed."""
    learning_rate: float
    """γ of this round: what memory made at another rate is scaled to."""
    fresh: Sequence[Contribution] = ()
    """Movements made in this round, in device-name order."""
    replayed: Sequence[Contribution] = ()
    """Older movements that skipping devices sent again, in device-name order."""
    silent: Sequence[str] = ()
    """Selected devices of which nothing came, sorted."""
    registered: float = 0.0
    """All devices ever known: their number, or under `weighting = "samples"` their samples."""
    memory: Memory | None = None
    threads: int = 1

    @property
    def selected(self) -> int:
        """How many devices were asked."""
        return len(self.fresh) + len(self.replayed) + len(self.silent)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A synchronous rule: movements and memory in, movement of θ out.

    A rule is a value with its options. `move` is deterministic; one that remembers has advanced
    the memory to this round and written the fresh movements to it when it returns.
    """

    whole_models: ClassVar[bool] = False
    """A level below 1 counts as a skip."""
    remembers: ClassVar[Literal["nothing", "movements", "models"]] = "nothing"
    """What the memory holds. Late movements enter it only where it holds movements."""
    sums: ClassVar[bool] = False
    """Whether the memory keeps running sums."""

    weighting: Weighting = "uniform"
    server_rate: float = 1.0

    def __post_init__(self) -> None:
        if self.weighting not in get_args(Weighting):
            raise ConfigError(f"weighting is one of {get_args(Weighting)}, not {self.weighting!r}")
        if not (math.isfinite(self.server_rate) and self.server_rate > 0):
            raise ConfigError(f"server_rate must be above 0, not {self.server_rate!r}")

    @property
    def replay_within(self) -> int:
        """How old a movement that is sent again may be, in rounds; 0: no replays."""
        return 0

    @property
    def warmup_rounds(self) -> int:
        """Rounds at the start in which everybody trains everything."""
        return 0

    @property
    def damping(self) -> float:
        """What memory fades by with every round of age."""
        return 1.0

    def takes(self, part: Contribution) -> bool:
        """Whether memory is to hold this movement."""
        return bool(part.blocks.ids.size)

    def move(self, closing: Closing) -> Float32:
        """The movement of the whole model, in block order."""
        raise NotImplementedError

    def weight(self, samples: int) -> float:
        """The weight of a device's word."""
        return 1.0 if self.weighting == "uniform" else float(samples)

    def total_weight(self, devices: int, samples: int) -> float:
        """The weight of so many devices that have so many samples together."""
        return float(devices if self.weighting == "uniform" else samples)


def divide(total: Float32, by: NDArray[np.float64], plan: ModelPlan) -> Float32:
    """`total` divided by a number per block, in place; 0 where that is 0."""
    share = np.divide(1.0, by, out=np.zeros_like(by), where=by > 0).astype(np.float32)
    total *= np.repeat(share, plan.block_sizes)
    return total
