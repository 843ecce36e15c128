"""Level or skip: how much of the model this device trains in a round, and why.

The skip rule is CCFL's (docs/algorithms.md): a device whose budget allows a share `p` of all
rounds trains once every `1/p` rounds (*round-robin*), or with probability `p` (*ad-hoc*).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from edge_sdk.protocol.errors import MessageError
from edge_sdk.streams import stream

Schedule = Literal["round-robin", "ad-hoc"]


@dataclass(frozen=True, slots=True)
class Decision:
    """A level, or None for a skip, and the reason in words."""

    level: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the device's owner allows: the level, and the share `p` of rounds to take part in."""

    level: float = 1.0
    participation: float = 1.0
    schedule: Schedule = "round-robin"
    keeps_copy: bool = True
    """Keep the last movement, to send it again when a round is skipped and the rule wants that."""
    compute: float | None = None
    """How fast the device is, in parameters × samples per second; None: not known."""
    bytes_per_s: float | None = None
    """How fast its link is; None: not known."""

    def __post_init__(self) -> None:
        for name in ("level", "participation"):
            if not 0 < getattr(self, name) <= 1:
                raise MessageError(f"{name} is a share in (0, 1], not {getattr(self, name)!r}")
        if self.schedule not in get_args(Schedule):
            raise MessageError(f"schedule is one of {get_args(Schedule)}, not {self.schedule!r}")


def decide(policy: Policy, *, device: str, round: int, seed: int, whole: bool = False) -> Decision:
    """The device's answer to a round. The same arguments give the same answer.

    `whole`: the round takes nothing but the whole model, and asks for it in spite of the level.
    """
    p = policy.participation
    if whole:
        return Decision(1.0, "full model: this round everybody trains everything")
    if not _takes_part(policy, device, round, seed):
        return Decision(None, f"skip: the budget allows {p:.0%} of rounds ({policy.schedule})")
    allowed = "full model" if policy.level == 1 else f"level {policy.level:.0%}"
    return Decision(policy.level, f"{allowed}: the most this device's owner allows")


def _takes_part(policy: Policy, device: str, round: int, seed: int) -> bool:
    p = policy.participation
    if policy.schedule == "ad-hoc":
        return bool(stream(seed, device, round, "skip").random() < p)
    # Rounds at which floor(p · round + phase) steps up: exactly p of them in the long run.
    phase = stream(seed, device, "phase").random()
    return math.floor(p * round + phase) > math.floor(p * (round - 1) + phase)
