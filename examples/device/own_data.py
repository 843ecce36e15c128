"""A device's own data: handwritten digits of 8 × 8 pixels, read from a file beside this one.

A loader is any function without arguments that returns numpy arrays: `(x, y)`, or batches of them,
one after the other, as here. Samples come first, types and shapes are the task's. What it returns
stays on the device.

The file holds 60 of the "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI
Machine Learning Repository, CC BY 4.0).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("digits.csv")
"""A digit per line: 64 pixels from 0 to 16, and which digit it is."""

BATCH = 8


def load() -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Batches of images, float32 of shape 1 × 8 × 8 from 0 to 1, and their digits."""
    with FILE.open(newline="") as file:
        lines = csv.reader(file)
        while rows := list(islice(lines, BATCH)):
            table = np.array(rows, dtype=np.int64)
            images = table[:, :64].reshape(-1, 1, 8, 8).astype(np.float32) / np.float32(16)
            yield images, table[:, 64]
