"""Events, besides messages, and effects that both state machines share.

Events come from outside the machine (a device joined, a movement is stored, time passed); its
caller performs the effects in the order given.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.aggregate.arrivals import Arrival
from edge_sdk.protocol.messages.round import (
    Assignment,
    Movement,
    Receipt,
    Replay,
    RoundClosed,
    RoundOpen,
)
from edge_sdk.protocol.messages.survey import Survey
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.transport.uploads import Upload

# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A device joined, for the first time or again."""

    device: str


@dataclass(frozen=True, slots=True)
class Left:
    """A device left; the movement it owes may still arrive."""

    device: str


@dataclass(frozen=True, slots=True, eq=False)
class Uploaded:
    """A movement or a replay arrived in an upload, which can be stored unchanged."""

    sent: Movement | Replay
    upload: Upload


@dataclass(frozen=True, slots=True)
class Kept:
    """A device's upload for a round is stored."""

    device: str
    round: int


@dataclass(frozen=True, slots=True)
class Disowned:
    """An operator had the movements of a device forgotten; those in the model stay there."""

    device: str


@dataclass(frozen=True, slots=True)
class Released:
    """An operator holds nothing against a device any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Barred:
    """An operator quarantined a device, for a reason."""

    device: str
    reason: str
    round: int
    """Newest round that was open then."""


@dataclass(frozen=True, slots=True)
class RoundsHeld:
    """No further round is to open from now on; or, if `held` is False, rounds may open again."""

    held: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tell every device."""

    message: RoundOpen | RoundClosed | Survey


@dataclass(frozen=True, slots=True)
class Send:
    """Tell one device."""

    device: str
    message: RoundOpen | Assignment | Receipt | RoundClosed


@dataclass(frozen=True, slots=True)
class Accept:
    """Let a device upload what it offers."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Keep:
    """Store a device's movement for this round and answer with `Kept`."""

    round: int
    arrival: Arrival
    upload: Upload | None = None
    """The bytes to store; None if nothing needs to outlive the process."""
