"""Blocks of samples on their way from a file to the task's form, and the places they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from edge_sdk.protocol.plan.layout import Array

BLOCK_BYTES = 4 * 2**20
"""Bytes of samples that a reader holds at once, about."""

Values = Literal["ready", "measured", "pixels", "sound", "mels"]
"""What the values of an input are, which says how they are scaled.

    ready      the model's own, from arrays; only uint8 images are scaled
    measured   numbers of a table or a time series
    pixels     0 to 255
    sound      −1 to 1
    mels       log-mel frames
"""


class Block(NamedTuple):
    """Some samples of a source: raw values, samples first, and where each comes from.

    `targets` are numbers, or names of classes (an array of str); None: the source has none.
    `columns` are the names of a sample's values in flat order, if they have any.
    """

    inputs: tuple[Array, ...]
    targets: Array | None
    where: Callable[[int], str]
    values: Values
    columns: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    """Names of the columns that are the targets."""


def rows_of(bytes_of_sample: int) -> int:
    """Return how many samples of this size make a block."""
    return max(1, BLOCK_BYTES // max(1, bytes_of_sample))
