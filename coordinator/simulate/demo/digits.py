"""The demo's data and model: scikit-learn's handwritten digits, split unevenly among devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulate.partitions import dirichlet_parts
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream

if TYPE_CHECKING:
    from torch import nn

DIGITS = "datasets/data/digits.csv.gz"
"""Their file in scikit-learn."""
TEST_SAMPLES = 360
CONCENTRATION = 1.0
"""Dirichlet concentration of each class over the devices: below 1 very uneven, above 10 even."""


@dataclass(frozen=True, slots=True, eq=False)
class Digits:
    """Images (float32, N × 1 × 8 × 8, in [0, 1]) and labels, split into training and test."""

    train: ArrayData
    test: ArrayData


def load_digits(seed: int) -> Digits:
    """Load and shuffle the 1,797 digits that ship with scikit-learn."""
    sklearn = find_spec("sklearn")  # importing it takes a hundred times as long as the file
    if sklearn is None or sklearn.origin is None:
        raise ModuleNotFoundError("scikit-learn is not installed", name="sklearn")
    rows = np.loadtxt(Path(sklearn.origin).parent / DIGITS, delimiter=",")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    order = stream(seed, "demo", "split").permutation(len(labels))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return Digits(
        ArrayData((images[train],), labels[train]), ArrayData((images[test],), labels[test])
    )


def make_model(seed: int) -> nn.Module:
    """Make a small CNN without touching torch's global generator."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1024, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


def deal(data: ArrayData, names: Sequence[str], seed: int) -> dict[str, ArrayData]:
    """Give each device an uneven share of the data."""
    random = stream(seed, "demo", "shares")
    shares = dirichlet_parts(data.targets, len(names), random, alpha=CONCENTRATION)
    return {
        name: ArrayData(tuple(x[rows] for x in data.inputs), data.targets[rows])
        for name, rows in zip(names, shares, strict=True)
    }
