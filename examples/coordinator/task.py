"""A task: a small CNN that learns scikit-learn's handwritten digits.

Only the coordinator has this file. Devices get the graphs that are compiled from it and the
description of the data, and bring their own: images of 1 × 8 × 8 pixels, scaled to 0 to 1, and the
class of each.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from coordinator import InputDescription, Task
from coordinator import make_task as task_of


def make_task() -> Task:
    """The model and its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
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
    return task_of(
        model,
        torch.zeros(2, 1, 8, 8),
        loss="cross-entropy",
        groups=4,
        classes=[str(digit) for digit in range(10)],
        inputs=InputDescription(range=(0, 1)),
    )


def evaluation() -> tuple[np.ndarray, np.ndarray]:
    """Test data that no device trains on: every fifth digit."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return images[::5], labels[::5].astype(np.int64)
