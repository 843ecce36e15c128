"""The format of a task's data, and the one check of a device's data against it.

A `DataSpec` is made with the task and travels in the manifest of its graphs. Data that differs is
rejected before training, with an error that names both formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from edge_sdk.protocol.errors import GraphError, TensorError
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.description import InputDescription, check_names

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
    """Format of every sample of a task: the model's inputs x0, x1 …, and the targets.

    `classes` are the names of class 0, 1 …; empty: they have none. `descriptions` has one entry for
    each input, or none at all.
    """

    inputs: tuple[ArraySpec, ...]
    targets: ArraySpec
    classes: tuple[str, ...] = ()
    descriptions: tuple[InputDescription, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.inputs) <= MAX_INPUTS:
            raise GraphError(f"a task has 1 to {MAX_INPUTS} inputs, not {len(self.inputs)}")
        check_names("classes", self.classes)
        wanted = self.class_count
        if self.classes and wanted is not None and len(self.classes) != wanted:
            raise GraphError(f"{len(self.classes)} classes have names, but the task has {wanted}")
        if self.descriptions and len(self.descriptions) != len(self.inputs):
            raise GraphError(
                f"{len(self.descriptions)} inputs are described, but the task has "
                f"{len(self.inputs)}"
            )
        for spec, described in zip(self.inputs, self.descriptions, strict=False):
            described.check(spec.dtype, spec.shape)

    @property
    def class_count(self) -> int | None:
        """Number of classes, or of labels that a sample may have at once; None: unknown."""
        targets = self.targets
        if not targets.dtype.startswith("float"):
            return None if targets.highest is None else targets.highest + 1
        return targets.shape[-1] if targets.shape else 2 if targets.highest == 1 else None

    @property
    def first(self) -> InputDescription:
        """Description of the first input; empty if the task describes none."""
        return self.descriptions[0] if self.descriptions else InputDescription()

    def described(
        self,
        *,
        classes: Sequence[str] | None = None,
        inputs: Sequence[InputDescription] | None = None,
    ) -> DataSpec:
        """Return the same format with other names and descriptions; None leaves what is there.

        `inputs` may be fewer than the task's; the rest stay undescribed. Raises `GraphError`.
        """
        given = self.descriptions if inputs is None else tuple(inputs)
        if any(each != InputDescription() for each in given):
            rest = len(self.inputs) - len(given)
            given += (InputDescription(),) * rest
        else:
            given = ()
        names = self.classes if classes is None else tuple(classes)
        return replace(self, classes=names, descriptions=given)

    def describe(self) -> str:
        """Describe the format in a line, for people: inputs, and classes or targets."""
        parts = [f"x{number} {each}" for number, each in enumerate(self.inputs)]
        if self.first.range is not None:
            parts[0] += f" from {self.first.range[0]:g} to {self.first.range[1]:g}"
        if self.classes:
            shown = ", ".join(self.classes[:8]) + (", …" if len(self.classes) > 8 else "")
            parts.append(f"{len(self.classes)} classes ({shown})")
        elif self.class_count is not None and not self.targets.dtype.startswith("float"):
            parts.append(f"{self.class_count} classes")
        else:
            parts.append(f"targets {self.targets}")
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the whole as JSON, for metadata of models and for scripts."""
        described = self.descriptions or (InputDescription(),) * len(self.inputs)
        content: dict[str, Any] = {
            "inputs": [
                {**_array_dict(spec), **each.to_dict()}
                for spec, each in zip(self.inputs, described, strict=True)
            ],
            "targets": _array_dict(self.targets),
        }
        return {**content, "classes": list(self.classes)} if self.classes else content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DataSpec:
        """Return the format that `to_dict` wrote. Raises `GraphError`."""
        try:
            arrays = tuple(_array_of(each) for each in content["inputs"])
            spec = cls(arrays, _array_of(content["targets"]), tuple(content.get("classes", ())))
            inputs = [InputDescription.from_dict(each) for each in content["inputs"]]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise GraphError(f"this is not the format of a task's data: {error}") from error
        return spec.described(inputs=inputs)

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


def _array_dict(spec: ArraySpec) -> dict[str, Any]:
    content: dict[str, Any] = {"type": spec.dtype, "shape": list(spec.shape)}
    return content if spec.highest is None else {**content, "highest": spec.highest}


def _array_of(content: Mapping[str, Any]) -> ArraySpec:
    return ArraySpec(content["type"], tuple(content["shape"]), content.get("highest"))


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
