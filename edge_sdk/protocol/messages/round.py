"""Messages between devices and the coordinator in a round.

    RoundOpen ▶ Bid ▶ Assignment ▶ (weights are fetched) ▶ Movement ▶ Receipt (kept)
              … Receipt (counted or rejected), RoundClosed
              ▶ Bid (skip) ▶ Replay ▶ Receipt, where the rule uses replays
              ▶ Bid ▶ Receipt (rejected): the bid is declined

A device says how much it trains (a level, or a skip, and why); the coordinator says which groups. A
second `Bid` in the same round that skips withdraws the first: the device stopped its training.

Everybody hears the opening of a round. If it is by invitation, a device takes part only if it also
gets an opening of its own.

`run` names the run that a round belongs to (`TaskNotice`); "" where there is only one, as in one
process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from edge_sdk.protocol.chunks import Blob
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.errors import MessageError
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array

MAX_REASON_CHARACTERS = 500
MAX_LEVELS = 64
MAX_SAMPLES = 2**40
"""Most samples of one device: far above any real number, far below overflow."""
MAX_JOULES = 1e9
"""Most joules of one training, or of a day: likewise."""


class Outcome(Enum):
    """The fate of a movement. All but *kept* are verdicts, which do not change."""

    KEPT = "kept"
    """Stored; the verdict follows when the round closes, beside the movements of others."""
    COUNTED = "counted"
    MEMORY = "memory"
    """Too late for its round; kept as the device's newest movement."""
    LATE = "late"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOpen:
    """Opens a round: what to train, how, and how long to wait for bids and movements."""

    round: int
    plan_hash: str
    local_rule: LocalRule
    steps: int
    batch_size: int
    bid_s: float
    train_deadline_s: float
    whole: bool = False
    """Only the whole model is useful this round: offer that or skip."""
    replay_within: int = 0
    """A device that skips resends its last movement if it is at most this many rounds old."""
    up: Encoding = field(default_factory=Encoding)
    """Encoding of movements."""
    run: str = ""
    model: Blob | None = None
    """The index of the round's model (`packs/index.py`); None: the model arrives in another way."""
    rounds_left: int | None = None
    """Rounds left in the run as planned, including this one; None: unknown."""
    warmup: bool = False
    """The rule starts with movements of the whole model, or the masks measure with them: every
    device that can train it does so this round, even if it normally trains less or more rarely. One
    that cannot decides as usual, unless the round is also `whole`."""
    levels: tuple[float, ...] = ()
    """Levels that are to become models of their own, largest first; where the local rule trains
    several widths, those below a device's own are its narrower ones."""
    by_invitation: bool = False
    """Announces a round for some devices only, which get an opening of their own without this flag:
    the invitation. All others wait for the next round."""
    statistics: Blob | None = None
    """BatchNorm statistics of the model's levels (`survey.py`), for evaluations; None: those in the
    model are the only ones."""
    largest: float = 1.0
    """The largest level trained this round, while the model grows; a larger offer gets this."""
    variates: bool = False
    """Devices correct their gradients by control variates (SCAFFOLD)."""
    control: Blob | None = None
    """With `variates`: the index of the global variate, which is packed as the model is; None: it
    arrives as the model does."""

    def __post_init__(self) -> None:
        if self.control is not None and not self.variates:
            raise MessageError("control is the global variate of a round with variates")
        if not 0 < self.largest <= 1:
            raise MessageError(f"largest is a level, a share in (0, 1], not {self.largest!r}")
        if self.replay_within < 0:
            raise MessageError(f"replay_within must not be negative: {self.replay_within}")
        if self.rounds_left is not None and self.rounds_left < 1:
            raise MessageError(f"rounds_left includes this round, so it is not {self.rounds_left}")
        if any(not 0 < level <= 1 for level in self.levels) or list(self.levels) != sorted(
            set(self.levels), reverse=True
        ):
            raise MessageError(f"levels are shares in (0, 1], largest first, not {self.levels}")
        for name in ("round", "steps", "batch_size"):
            if getattr(self, name) < 1:
                raise MessageError(f"{name} must be at least 1, not {getattr(self, name)!r}")
        for name in ("bid_s", "train_deadline_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise MessageError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bid:
    """The share of the model a device offers to train; `level is None` is a skip.

    `reason` says why in words, `code` in one word for programs (`decide.Code`). `replays`: a
    `Replay` follows the skip. `compute` (parameters × samples per second) and `bytes_per_s` are the
    device's speeds, where it knows them.
    """

    device: str
    round: int
    level: float | None
    reason: str
    samples: int = 0
    replays: bool = False
    compute: float | None = None
    bytes_per_s: float | None = None
    run: str = ""
    code: str | None = None

    def __post_init__(self) -> None:
        if self.level is not None and not (math.isfinite(self.level) and 0 < self.level <= 1):
            raise MessageError(f"a level is a share in (0, 1], not {self.level!r}")
        if not self.reason or len(self.reason) > MAX_REASON_CHARACTERS:
            raise MessageError(f"a bid needs a reason of 1 to {MAX_REASON_CHARACTERS} characters")
        if not 0 <= self.samples <= MAX_SAMPLES:
            raise MessageError(f"samples are 0 to {MAX_SAMPLES}, not {self.samples}")
        if self.replays and self.level is not None:
            raise MessageError("a bid that offers a level cannot announce a replay")
        for name in ("compute", "bytes_per_s"):
            speed = getattr(self, name)
            if speed is not None and not (math.isfinite(speed) and speed > 0):
                raise MessageError(f"{name} must be above 0 or unknown, not {speed!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The groups, per axis, that a device trains.

    `widths`: narrower submodels, each within the one before and the first within `groups`; the
    local rule says whether and how steps train them.
    """

    device: str
    round: int
    groups: Mapping[str, tuple[int, ...]]
    run: str = ""
    widths: tuple[Mapping[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Movement:
    """The result of local training, and the facts a memory of it needs.

    `payload` holds the blocks and their groups (`encoding/codec.py`); `level` is the level the
    device offered; `keeps_copy` is True if it could resend the movement in a later round.
    """

    device: str
    round: int
    plan_hash: str
    payload: bytes | memoryview
    statistics: Mapping[str, Array]
    learning_rate: float
    level: float
    samples: int
    loss: float
    train_s: float
    keeps_copy: bool = False
    energy_j: float | None = None
    """Joules that training took, above those of an idle device; None: unknown."""

    def __post_init__(self) -> None:
        if self.energy_j is not None and not 0 <= self.energy_j <= MAX_JOULES:
            raise MessageError(f"energy_j is 0 to {MAX_JOULES:g} joules, not {self.energy_j!r}")
        if not 0 <= self.samples <= MAX_SAMPLES:
            raise MessageError(f"samples are 0 to {MAX_SAMPLES}, not {self.samples}")
        for name in ("learning_rate", "level", "loss", "train_s"):
            if not math.isfinite(getattr(self, name)):
                raise MessageError(f"a movement's {name} must be finite: {getattr(self, name)!r}")
        if self.learning_rate <= 0 or self.train_s < 0 or self.round < 1:
            raise MessageError(
                f"a movement of round {self.round} cannot have learning rate "
                f"{self.learning_rate}, {self.train_s} s of training"
            )
        if not 0 < self.level <= 1:
            raise MessageError(f"a level is a share in (0, 1], not {self.level!r}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Resends the last movement of a device that skips (CCFL)."""

    round: int
    """The round it answers; the movement names the older one it was made in."""
    movement: Movement

    def __post_init__(self) -> None:
        if not self.movement.round < self.round:
            raise MessageError(
                f"a replay in round {self.round} of a movement made in {self.movement.round}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The coordinator has a movement; the device need not send it again.

    A device that missed the verdict offers the movement once more and gets it. *Rejected* for a
    round without a movement declines the bid: no assignment follows.
    """

    device: str
    round: int
    outcome: Outcome
    reason: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundClosed:
    """Closes a round: nothing more counts for it."""

    round: int
    run: str = ""


Message = RoundOpen | Bid | Assignment | Movement | Replay | Receipt | RoundClosed
