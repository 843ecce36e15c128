"""What devices and the coordinator say to each other in a round.

    RoundOpen ▶ Bid ▶ Assignment ▶ (weights are fetched) ▶ Movement ▶ Receipt … RoundClosed

A device says how much (a level, or a skip, and why); the coordinator says which groups. A second
`Bid` of the same round that skips withdraws the first: the device stopped its training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from edge_sdk.protocol.blocks import Blocks
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.layout import Array
from edge_sdk.protocol.local_rule import LocalRule

MAX_REASON_CHARACTERS = 500


class Outcome(Enum):
    """What became of a movement."""

    COUNTED = "counted"
    LATE = "late"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpen:
    """A round begins: what is trained, how, and how long bids and movements are awaited."""

    round: int
    plan_hash: str
    rule: LocalRule
    steps: int
    batch_size: int
    bid_s: float
    train_s: float

    def __post_init__(self) -> None:
        for name in ("round", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise MessageError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("bid_s", "train_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise MessageError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """How much of the model a device offers to train; `level is None` is a skip."""

    device: str
    round: int
    level: float | None
    reason: str
    samples: int = 0

    def __post_init__(self) -> None:
        if self.level is not None and not (math.isfinite(self.level) and 0 < self.level <= 1):
            raise MessageError(f"a level is a share in (0, 1], not {self.level!r}")
        if not self.reason or len(self.reason) > MAX_REASON_CHARACTERS:
            raise MessageError(f"a bid needs a reason of 1 to {MAX_REASON_CHARACTERS} characters")
        if self.samples < 0:
            raise MessageError(f"samples must not be negative: {self.samples}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The groups, per axis, that a device trains."""

    device: str
    round: int
    groups: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Movement:
    """What local training changed, block by block, and what a memory of it needs to know."""

    device: str
    round: int
    plan_hash: str
    groups: Mapping[str, tuple[int, ...]]
    blocks: Blocks
    statistics: Mapping[str, Array]
    learning_rate: float
    samples: int
    loss: float
    train_s: float

    def __post_init__(self) -> None:
        for name in ("learning_rate", "samples", "loss", "train_s"):
            if not math.isfinite(getattr(self, name)):
                raise MessageError(f"a movement's {name} must be finite: {getattr(self, name)!r}")
        if self.learning_rate <= 0 or self.samples < 0 or self.train_s < 0 or self.round < 1:
            raise MessageError(
                f"a movement of round {self.round} cannot have learning rate "
                f"{self.learning_rate}, {self.samples} samples, {self.train_s} s of training"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The coordinator has dealt with a movement; the device may forget it."""

    device: str
    round: int
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """Nothing more counts for this round."""

    round: int


Message = RoundOpen | Bid | Assignment | Movement | Receipt | RoundClosed
