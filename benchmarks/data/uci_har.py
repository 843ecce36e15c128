"""UCI HAR: activities of people, from the motion sensors of a phone at the waist; `uci_har.npz`.

    halves         (H, 9, 64) float32: half windows of 1.28 s, 9 channels at 50 Hz
    window_halves  (N, 2): a window is two halves, one after the other
    y              (N,): one of 6 activities
    subject        (N,): the person
    segment        (N,): an uninterrupted stretch of one activity of one subject, in order

Windows overlap by half, so a random split would test on training data. Here the last segment of
every activity of every subject is for testing, about 23 % of all windows: every subject is a device
that trains, the test has all their activities, and no half window is in both, which is checked. So
accuracy is measured on people who took part; it says nothing about strangers.

Each channel has the mean of the training windows subtracted and is divided by their standard
deviation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.dataset import Dataset, DatasetError
from benchmarks.data.npz import read_npz
from edge_sdk.data.arrays import ArrayData

FILE = "uci_har.npz"
KEYS = ("halves", "window_halves", "y", "subject", "segment")
CLASSES = 6
HALF = (9, 64)
MOST_WINDOWS = 100_000
"""Most windows; the data set has 10,299."""


def load_uci_har(folder: Path) -> Dataset:
    """Load the windows of a folder's file. Raises `DatasetError`."""
    path = folder / FILE
    arrays = read_npz(path, KEYS)
    _check(path, arrays)
    halves, rows = arrays["halves"], arrays["window_halves"]
    y, subject, segment = (arrays[key].astype(np.int64) for key in ("y", "subject", "segment"))
    test = held_out(y, subject, segment)
    if not test.any():
        raise DatasetError(f"{path}: no subject has two segments of an activity, one to test with")
    if shared := np.intersect1d(rows[test], rows[~test]).size:
        raise DatasetError(
            f"{path}: windows of different segments share {shared} halves, so the test would "
            "hold what is trained; get it anew"
        )
    windows = np.concatenate([halves[rows[:, 0]], halves[rows[:, 1]]], axis=2, dtype=np.float32)
    trained = windows[~test]
    mean = trained.mean(axis=(0, 2), keepdims=True, dtype=np.float64)
    deviation = trained.std(axis=(0, 2), keepdims=True, dtype=np.float64)
    deviation[deviation == 0] = 1.0
    windows = ((windows - mean) / deviation).astype(np.float32)
    return Dataset(
        folder.resolve().name,
        "uci-har",
        ArrayData((windows[~test],), y[~test]),
        ArrayData((windows[test],), y[test]),
        CLASSES,
        owners=subject[~test],
    )


def held_out(
    y: NDArray[np.int64], subject: NDArray[np.int64], segment: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Flag the windows for testing: the last segment of every activity of every subject.

    If a subject has only one segment of an activity, it is used for training.
    """
    _, owns = np.unique(np.stack([subject, y]), axis=1, return_inverse=True)
    owns = owns.ravel()
    first = np.full(owns.max() + 1, np.iinfo(np.int64).max)
    last = np.full(owns.max() + 1, np.iinfo(np.int64).min)
    np.minimum.at(first, owns, segment)
    np.maximum.at(last, owns, segment)
    test: NDArray[np.bool_] = (segment == last[owns]) & (segment != first[owns])
    return test


def _check(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    halves = arrays["halves"]
    windows = len(arrays["y"]) if arrays["y"].ndim else 0
    wanted = {
        "halves": (len(halves) if halves.ndim else 1, *HALF),
        "window_halves": (windows, 2),
        **dict.fromkeys(("y", "subject", "segment"), (windows,)),
    }
    for key, shape in wanted.items():
        if arrays[key].shape != shape or 0 in shape:
            raise DatasetError(f"{path}: {key} is {arrays[key].shape}, should be {shape}")
        kinds = "f" if key == "halves" else "iu"
        if arrays[key].dtype.kind not in kinds:
            raise DatasetError(f"{path}: {key} is {arrays[key].dtype}, not numbers of its kind")
    if windows > MOST_WINDOWS:
        raise DatasetError(f"{path} has {windows:,} windows; up to {MOST_WINDOWS:,} are read")
    if not np.isfinite(halves).all():
        raise DatasetError(f"{path}: halves has values that are not numbers")
    for key, below in (("window_halves", len(halves)), ("y", CLASSES)):
        least, greatest = int(arrays[key].min()), int(arrays[key].max())
        if least < 0 or greatest >= below:
            worst = least if least < 0 else greatest
            raise DatasetError(f"{path}: {key} has {worst}, and there are only 0 to {below - 1}")
