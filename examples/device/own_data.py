"""A device's own data from code, for what docs/data.md has no reader: data = "own_data.py:load".

A loader is any function without arguments that returns numpy arrays: `(x, y)`, or batches of them,
one after the other, as here. Samples come first, shapes are the task's. What it returns stays on
the device. (Here, data = "digits.csv" in device.toml does the same without code.)

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
"""A digit per line, after the names of the columns: 64 pixels from 0 to 1, and the digit."""

BATCH = 8


def load() -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Batches of images, float32 of shape 1 × 8 × 8 from 0 to 1, and their digits."""
    with FILE.open(newline="") as file:
        lines = csv.reader(file)
        next(lines)
        while rows := list(islice(lines, BATCH)):
            table = np.array(rows, dtype=np.float32)
            yield table[:, :64].reshape(-1, 1, 8, 8), table[:, 64].astype(np.int64)
