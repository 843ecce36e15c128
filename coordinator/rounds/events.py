"""Events of both state machines besides messages, and effects of both.

Events happen at the edge (a device came, a movement is stored, time passed); effects are performed
there, in the order they are given.
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
from edge_sdk.protocol.messages.transfer import Offer
from edge_sdk.transport.uploads import Upload

# -- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A device is there, for the first time or again."""

    device: str


@dataclass(frozen=True, slots=True)
class Left:
    """A device is gone; what it owes may still come."""

    device: str


@dataclass(frozen=True, slots=True, eq=False)
class Uploaded:
    """A movement or a replay has come in an upload, which can be stored as it is."""

    sent: Movement | Replay
    upload: Upload


@dataclass(frozen=True, slots=True)
class Kept:
    """A device's upload for a round is stored."""

    device: str
    round: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Tell every device."""

    message: RoundOpen | RoundClosed


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
    """Store what a device sent for this round and answer with `Kept`."""

    round: int
    arrival: Arrival
    upload: Upload | None = None
    """The bytes to store; None where nothing outlives the process."""
