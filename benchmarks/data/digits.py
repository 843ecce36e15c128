"""The 1,797 handwritten digits of 8 × 8 pixels that ship with scikit-learn.

Pixels are divided by 16: from 0, black, to 1.
"""

from __future__ import annotations

import numpy as np

from benchmarks.data.dataset import Dataset
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream

TEST_SAMPLES = 360
CLASSES = 10


def load_digits(seed: int) -> Dataset:
    """Load the digits; a fifth of them, drawn by `seed`, is for testing."""
    from sklearn.datasets import load_digits as load

    pixels, labels = load(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = stream(seed, "digits", "split").permutation(len(labels))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Dataset(
        "digits",
        "digits",
        ArrayData((images[train],), labels[train].astype(np.int64)),
        ArrayData((images[test],), labels[test].astype(np.int64)),
        CLASSES,
    )
