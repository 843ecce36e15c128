"""The format of a task's data, and the one check of a device's data against it.

A `DataSpec` is made with the task and travels in the manifest of its graphs. Data that differs is
rejected before training, with an error that names both formats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edge_sdk.protocol.errors import GraphError, TensorError
from edge_sdk.protocol.plan.layout import Array

DTYPE = re.compile(r"bool|float(16|32|64)|u?int(8|16|32|64)")
"""numpy's names of the types that data and graphs may have."""

MAX_INPUTS = 10_000
MAX_RANK = 32
MAX_SIZE = 2**48
"""Largest size of one dimension: far above any array, far below overflow."""


class Samples(Protocol):
    """Data, or a batch of it: the first dimension of every array is the samples."""

    @property
    def inputs(self) -> tuple[Array, ...]:
        """Inputs of the model, in order."""

    @property
    def targets(self) -> Array:
        """Targets: the outputs the model should give."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a task's data: numpy's name of its type, and its shape without the samples.

    Values are 0 to `highest`, inclusive: class numbers, ids of a vocabulary, shares. None: any.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    highest: int | None = None

    def __post_init__(self) -> None:
        if not DTYPE.fullmatch(self.dtype):
            raise GraphError(f"data has the unknown type {self.dtype!r}")
        if len(self.shape) >= MAX_RANK:
            raise GraphError(f"data has {len(self.shape)} dimensions, over {MAX_RANK - 1}")
        if not all(0 <= size <= MAX_SIZE for size in self.shape):
            raise GraphError(f"a size of data is 0 to {MAX_SIZE}, not {list(self.shape)}")
        if self.highest is not None and not 0 <= self.highest <= MAX_SIZE:
            raise GraphError(f"the highest value of data is 0 to {MAX_SIZE}, not {self.highest}")

    def __str__(self) -> str:
        return _words(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class DataSpec:
    """Format of every sample of a task: the model's inputs x0, x1 …, and the targets."""

    inputs: tuple[ArraySpec, ...]
    targets: ArraySpec

    def __post_init__(self) -> None:
        if not 1 <= len(self.inputs) <= MAX_INPUTS:
            raise GraphError(f"a task has 1 to {MAX_INPUTS} inputs, not {len(self.inputs)}")

    def check(self, data: Samples) -> None:
        """Raise `TensorError`, which names both formats, unless the data fits the task."""
        self.check_inputs(data.inputs)
        samples, targets = len(data.inputs[0]), data.targets
        _check_array("targets", self.targets, targets)
        if len(targets) != samples:
            raise TensorError(f"{samples} samples but {len(targets)} targets: give one target each")
        if self.targets.highest is not None and (found := _stray(targets, self.targets.highest)):
            value, place = found
            if self.targets.dtype.startswith("float"):
                raise TensorError(
                    f"target {value} at {place}: the task needs 0 to {self.targets.highest}"
                )
            raise TensorError(f"label {value} at {place}: {_classes(self.targets.highest)}")

    def check_inputs(self, inputs: Sequence[Array]) -> None:
        """Check the inputs alone, as `check` does."""
        if len(inputs) != len(self.inputs):
            raise TensorError(
                f"the task needs {len(self.inputs)} inputs, the data has {len(inputs)}"
            )
        for number, (spec, array) in enumerate(zip(self.inputs, inputs, strict=True)):
            _check_array(f"x{number}", spec, array)
            if spec.highest is not None and (found := _stray(array, spec.highest)):
                raise TensorError(
                    f"x{number}: id {found[0]} at {found[1]}: the task's vocabulary has "
                    f"{spec.highest + 1} ids, 0 to {spec.highest}"
                )
        if len(counts := {len(array) for array in inputs}) > 1:
            raise TensorError(f"all inputs need equally many samples; they have {sorted(counts)}")


def _check_array(name: str, spec: ArraySpec, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise TensorError(f"{name}: the task needs {spec}, the data is {type(array).__name__}")
    if array.ndim == 0:
        raise TensorError(f"{name}: a number without dimensions is not data: samples come first")
    # The byte order may differ; comparing types is quick, comparing names is not.
    same_type = array.dtype == spec.dtype or array.dtype.name == spec.dtype
    if not same_type or array.shape[1:] != spec.shape:
        has = _words(array.dtype.name, array.shape[1:])
        raise TensorError(f"{name}: the task needs {spec}, the data is {has}")


def _stray(array: Array, highest: int) -> tuple[Any, str] | None:
    """Return the first value outside 0 to `highest`, and its position."""
    if array.size == 0 or (array.min() >= 0 and array.max() <= highest):  # also false for NaN
        return None
    outside = ~((array >= 0) & (array <= highest))
    place = np.unravel_index(int(np.argmax(outside)), array.shape)
    inside = f", place {[int(at) for at in place[1:]]}" if array.ndim > 1 else ""
    return array[place].item(), f"sample {int(place[0])}{inside}"


def _words(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {'×'.join(map(str, shape)) if shape else 'numbers'}"


def _classes(highest: int) -> str:
    return f"the task has {highest + 1} classes, 0 to {highest}"
