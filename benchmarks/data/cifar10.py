"""CIFAR-10's binary version: six files of records, plain or packed with xz or gzip.

A record is a label (one byte) and 3 × 32 × 32 bytes: red, green and blue, row by row. Each channel
has the mean of the training images subtracted and is divided by their standard deviation, so 0 is
their mean colour.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.dataset import Dataset, DatasetError
from benchmarks.data.packed import find_packed, read_packed
from edge_sdk.data.arrays import ArrayData

FILES = re.compile(r"(data_batch_[1-5]|test_batch)\.bin(\.xz|\.gz)?")
"""File names, one of which identifies a folder of this format."""
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
ENDINGS = ("", ".xz", ".gz")
CLASSES = 10
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
RECORDS = 10_000
"""Records in every file."""


def load_cifar10(folder: Path, records: int = RECORDS) -> Dataset:
    """Load the six files of a folder, with this many records each. Raises `DatasetError`."""
    train, test = (
        np.concatenate(
            [read_records(find_packed(folder, [name], ENDINGS), records) for name in names]
        )
        for names in (TRAIN, TEST)
    )
    mean, deviation = _statistics(train)
    return Dataset(
        folder.resolve().name,
        "cifar-10",
        _scaled(train, mean, deviation),
        _scaled(test, mean, deviation),
        CLASSES,
    )


def read_records(path: Path, records: int) -> NDArray[np.uint8]:
    """Read this many records, one per row. Raises `DatasetError`."""
    size = records * RECORD_BYTES
    content = read_packed(path, size + 1)
    if len(content) != size:
        there = "more" if len(content) > size else f"{len(content):,}"
        raise DatasetError(
            f"{path} should have {size:,} bytes ({records:,} records of {RECORD_BYTES}) and has "
            f"{there}: get CIFAR-10's binary version anew"
        )
    rows = np.frombuffer(content, np.uint8).reshape(records, RECORD_BYTES)
    labels = rows[:, 0]
    if labels.max() >= CLASSES:
        row = int(labels.argmax())
        raise DatasetError(
            f"{path}: the label of record {row} is {labels[row]}, and there are only 0 to "
            f"{CLASSES - 1}: get CIFAR-10's binary version anew"
        )
    return rows


def _statistics(rows: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute each channel's mean and standard deviation value by value, without large copies."""
    values = np.arange(256.0)
    channels = rows[:, 1:].reshape(len(rows), SHAPE[0], -1)
    means, deviations = [], []
    for channel in range(SHAPE[0]):
        shares = np.bincount(channels[:, channel].ravel(), minlength=256) / channels[:, 0].size
        mean = float(shares @ values)
        means.append(mean)
        deviations.append(float(np.sqrt(shares @ (values - mean) ** 2)) or 1.0)
    return np.asarray(means, np.float32), np.asarray(deviations, np.float32)


def _scaled(
    rows: NDArray[np.uint8], mean: NDArray[np.float32], deviation: NDArray[np.float32]
) -> ArrayData:
    images = rows[:, 1:].reshape(-1, *SHAPE).astype(np.float32)
    images -= mean[:, None, None]
    images /= deviation[:, None, None]
    return ArrayData((images,), rows[:, 0].astype(np.int64))
