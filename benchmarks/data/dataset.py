"""A data set in memory, and the one error that reading it raises.

TesseraError
└── DatasetError     files that are missing, damaged or of another format; says what to do
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_sdk import TesseraError
from edge_sdk.data.arrays import ArrayData

Format = Literal["digits", "idx", "cifar-10", "uci-har", "ag-news"]


class DatasetError(TesseraError):
    """Unusable files; the text names the file and says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Samples for training and for testing.

    Inputs are float32, or int64 where they are token ids, samples first, one array; targets are
    int64 from 0 to below `classes`.
    """

    name: str
    """Name for people: `digits`, or that of the folder."""
    format: Format
    train: ArrayData
    test: ArrayData
    classes: int
    owners: NDArray[np.int64] | None = None
    """Owner of each training sample, where samples belong to people; None: they do not."""
    vocabulary: int = 0
    """Above 0: inputs are token ids below this; 0 is padding."""

    @property
    def samples(self) -> int:
        """Number of samples, for training and testing."""
        return len(self.train) + len(self.test)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: (channels, height, width) of images, (channels, length) of windows,
        (length,) of texts."""
        shape: tuple[int, ...] = self.train.inputs[0].shape[1:]
        return shape
