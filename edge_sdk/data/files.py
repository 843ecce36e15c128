"""Arrays from .npy and .npz files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from edge_sdk.protocol.errors import TensorError
from edge_sdk.protocol.plan.layout import Array


def read_data(path: Path) -> tuple[dict[str, Array], Array | None]:
    """Read (inputs by name, labels or None) from a .npy (one input) or a .npz file.

    In a .npz, `y` are the labels and `x` is short for `x0`. Raises `TensorError`.
    """
    if path.suffix not in (".npy", ".npz"):
        raise TensorError(f"data must be a .npy or .npz file, not {path.name}")
    if not path.is_file():
        raise TensorError(f"no data: {path} is {'a folder' if path.is_dir() else 'not there'}")
    try:
        with path.open("rb") as file:  # numpy would leave a file open that its name misdescribes
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"x0": loaded}, None
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise TensorError(f"{path} cannot be read as plain numpy arrays: {error}") from error
    labels = arrays.pop("y", None)
    if "x" in arrays and "x0" not in arrays:
        arrays = {"x0" if name == "x" else name: array for name, array in arrays.items()}
    if not arrays:
        raise TensorError(f"{path} has no inputs: name them x, or x0, x1 …")
    if odd := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise TensorError(f"{path}: {odd[0]!r} is not an array")
    return arrays, labels
