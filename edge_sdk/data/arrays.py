"""A device's own data as batches of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.plan.layout import Array


class Batch(NamedTuple):
    """One step's data: the model's inputs, each with the batch first, and the targets."""

    inputs: tuple[Array, ...]
    targets: Array


@dataclass(frozen=True, slots=True, eq=False)
class ArrayData:
    """Samples in memory: the model's inputs, each with samples first, and the targets."""

    inputs: tuple[Array, ...]
    targets: Array

    def __post_init__(self) -> None:
        for array in self.inputs:
            if len(array) != len(self.targets):
                raise TrainingError(
                    f"{len(array)} samples but {len(self.targets)} targets: give one target each"
                )

    def __len__(self) -> int:
        return len(self.targets)

    def batches(self, steps: int, size: int, stream: np.random.Generator) -> Iterator[Batch]:
        """Yield `steps` batches, going through shuffled data as often as needed.

        A batch never holds a sample twice; it is smaller than `size` only if there are fewer
        samples.
        """
        size = min(size, len(self))
        order: list[int] = []
        for _ in range(steps if size else 0):
            if len(order) < size:
                order = stream.permutation(len(self)).tolist()
            rows, order = order[:size], order[size:]
            yield Batch(tuple(array[rows] for array in self.inputs), self.targets[rows])
