"""A device's movement as rules and memory see it: decoded, checked, free of the wire."""

from __future__ import annotations

from dataclasses import dataclass

from edge_sdk.protocol.plan.blocks import Blocks


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """What one device has to say about some blocks, and what it was made with."""

    device: str
    made: int
    """The round it was made in, from 1."""
    blocks: Blocks
    learning_rate: float
    level: float
    """What the device offered, a share in (0, 1]."""
    samples: int
    keeps_copy: bool = False
    """The device can send it again itself."""
