"""A device's movement as rules and memory see it: checked, free of the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edge_sdk.protocol.plan.blocks import Blocks, Float32
from edge_sdk.protocol.plan.layout import Indices

Weighting = Literal["uniform", "samples", "level"]
"""Weight of a movement in every mean: 1, its device's samples, or its level."""


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """One device's movement of some blocks, and the terms it was made under."""

    device: str
    made: int
    """The round it was made in, from 1."""
    blocks: Blocks
    """Values are a view of the upload, or `PackedBlocks`."""
    learning_rate: float
    level: float
    """The level the device offered, a share in (0, 1]."""
    samples: int
    keeps_copy: bool = False
    """The device can send it again itself."""
    trust: float = 1.0
    """Factor of its weight, in [0, 1]: its agreement with the root's movement."""

    def weight(self, weighting: Weighting) -> float:
        """Weight of the movement. A level is rounded to 2⁻³⁰, so that running sums stay exact."""
        if weighting == "samples":
            return self.samples * self.trust
        level = max(1, round(self.level * 2**30)) / 2**30 if weighting == "level" else 1.0
        return level * self.trust


class PackedBlocks(Blocks):
    """Blocks that stay encoded: every read of `values` decodes all of them anew.

    So a movement that waits for its round to close takes no memory beyond its upload.
    """

    __slots__ = ("_decode",)

    _decode: Callable[[], Float32]

    def __init__(self, ids: Indices, decode: Callable[[], Float32]) -> None:
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "_decode", decode)

    @property
    def values(self) -> Float32:
        """The decoded values, a new vector each time."""
        return self._decode()
