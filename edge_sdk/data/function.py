"""Data from arrays in memory, or from the owner's Python function.

A function takes no arguments and returns `(x, y)`, or `((x0, x1), y)`, or an `ArrayData`, or
batches of the former, one after the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from edge_sdk.data.arrays import ArrayData
from edge_sdk.data.errors import DataError
from edge_sdk.protocol.errors import TrainingError
from edge_sdk.protocol.plan.layout import Array

Data = ArrayData | tuple[Any, Any] | Callable[[], Any] | str
"""Data for a device: arrays, a function that loads them, or a reference to either."""


def split_reference(data: str) -> tuple[str, str] | None:
    """Return place and name of the function that a text refers to; None: it names files."""
    place, colon, function = data.rpartition(":")
    return (place, function) if colon and function.isidentifier() else None


def load_arrays(data: ArrayData | tuple[Any, Any] | Callable[[], Any]) -> ArrayData:
    """Return arrays, or what a function returns. Raises `DataError`, caused by its error."""
    if isinstance(data, ArrayData):
        return data
    if callable(data):
        return _call(data, getattr(data, "__qualname__", repr(data)))
    return _arrays(data, "the data")


def call_reference(place: str, function: str) -> ArrayData:
    """Return what the function of a file or module returns. Raises `DataError`."""
    return _call(_find(place, function), f"{place}:{function}")


def _call(function: Callable[[], Any], what: str) -> ArrayData:
    try:
        result = function()
    except Exception as error:
        raise DataError(f"{what} failed: {type(error).__name__}: {error}") from error
    if isinstance(result, ArrayData):
        return result
    if _is_pair(result):
        return _arrays(result, what)
    if not isinstance(result, Iterable):
        raise DataError(f"{what} returned {type(result).__name__}, not (x, y) or batches")
    parts = []
    for number, batch in enumerate(result):
        name = f"batch {number} of {what}"
        data = batch if isinstance(batch, ArrayData) else _arrays(batch, name)
        parts.append((name, data.inputs, data.targets))
    if not parts:
        raise DataError(f"{what} returned no batches")
    return _joined(parts)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], np.ndarray)


def _arrays(value: Any, what: str) -> ArrayData:
    if not _is_pair(value):
        raise DataError(f"{what} is not (x, y) of numpy arrays but {_described(value)}")
    inputs, targets = value
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    for number, array in enumerate((*inputs, targets)):
        name = "y" if number == len(inputs) else f"x{number}"
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(
                f"{what}: {name} is {_described(array)}, not a numpy array, samples first"
            )
    try:
        return ArrayData(inputs, targets)
    except TrainingError as error:
        raise DataError(f"{what}: {error}") from error


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def _joined(parts: Sequence[tuple[str, tuple[Array, ...], Array]]) -> ArrayData:
    """Join all parts. Raises `DataError` if they do not fit together."""
    first, inputs, targets = parts[0]
    wanted = [*inputs, targets]
    for name, of_part, targets_of_part in parts:
        arrays = [*of_part, targets_of_part]
        if len(arrays) != len(wanted):
            raise DataError(f"{name} has {len(arrays) - 1} inputs, {first} has {len(wanted) - 1}")
        for place, (array, other) in enumerate(zip(arrays, wanted, strict=True)):
            if array.ndim == 0 or (array.dtype, array.shape[1:]) != (other.dtype, other.shape[1:]):
                label = "y" if place == len(wanted) - 1 else f"x{place}"
                raise DataError(
                    f"{label} is {array.dtype.name} {array.shape} in {name}, "
                    f"{other.dtype.name} {other.shape} in {first}: only the number of samples "
                    "may differ"
                )
        if len({len(array) for array in arrays}) > 1:
            raise DataError(f"{name}: every array needs the same number of samples")
    if len(parts) == 1:
        return ArrayData(inputs, targets)
    columns = zip(*((*inputs, targets) for _, inputs, targets in parts), strict=True)
    *joined, last = (np.concatenate(column) for column in columns)
    return ArrayData(tuple(joined), last)


def _find(place: str, function: str) -> Callable[[], Any]:
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name in vars(module) if callable(getattr(module, name))]
        raise DataError(
            f"{place} has no function {function!r}; it has {', '.join(names) or 'none'}"
        )
    loader: Callable[[], Any] = found
    return loader


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tessera_data_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"no data: {path} is not there")
    module = importlib.util.module_from_spec(spec)
    # Classes defined in the file, such as dataclasses, look up their module by name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise DataError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise DataError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
