"""MNIST and Fashion-MNIST: four files in the idx format, plain or packed with gzip.

An idx file is big-endian: two zero bytes, the type (8: bytes), the number of dimensions, each
dimension as four bytes, then the values. Pixels are divided by 255: from 0, black, to 1.
"""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.dataset import Dataset, DatasetError
from benchmarks.data.packed import find_packed, read_packed
from edge_sdk.data.arrays import ArrayData

FILES = re.compile(r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte(\.gz)?")
"""File names, one of which identifies a folder of this format."""
ENDINGS = ("", ".gz")
CLASSES = 10
MOST_BYTES = 1 << 28
"""Most bytes in one file; MNIST has 47 MB."""
BYTES = 8
"""Required type of values."""


def load_idx(folder: Path) -> Dataset:
    """Load the four files of a folder. Raises `DatasetError`."""
    train, test = _split(folder, "train"), _split(folder, "t10k")
    shapes = [each.inputs[0].shape[1:] for each in (train, test)]
    if shapes[0] != shapes[1]:
        raise DatasetError(
            f"{folder}: training images are {shapes[0]}, test images {shapes[1]}: these files do "
            "not belong together"
        )
    return Dataset(folder.resolve().name, "idx", train, test, CLASSES)


def _split(folder: Path, which: str) -> ArrayData:
    images_path, labels_path = (_find(folder, which, what) for what in ("images-3", "labels-1"))
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DatasetError(
            f"{images_path} has {len(images)} images, {labels_path} has {len(labels)} labels: "
            "these files do not belong together"
        )
    if labels.max() >= CLASSES:
        row = int(labels.argmax())
        raise DatasetError(
            f"{labels_path}: label {row} is {labels[row]}, and there are only 0 to {CLASSES - 1}"
        )
    pixels = images[:, None].astype(np.float32)
    pixels /= 255
    return ArrayData((pixels,), labels.astype(np.int64))


def _find(folder: Path, which: str, what: str) -> Path:
    kind, dimensions = what.split("-")
    names = [f"{which}-{kind}{separator}idx{dimensions}-ubyte" for separator in "-."]
    return find_packed(folder, names, ENDINGS)


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file with this many dimensions, none of them 0. Raises `DatasetError`."""
    header_bytes = 4 + 4 * dimensions
    header = read_packed(path, header_bytes)
    magic = bytes([0, 0, BYTES, dimensions])
    if header[:4] != magic:
        raise DatasetError(
            f"{path} begins with {header[:4].hex(' ') or 'nothing'}, an idx file of bytes in "
            f"{dimensions} dimensions with {magic.hex(' ')}: get it anew"
        )
    if len(header) < header_bytes:
        raise DatasetError(f"{path} ends within its header: get it anew")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", header[4:])
    count = math.prod(shape)
    if not 0 < count <= MOST_BYTES:
        raise DatasetError(
            f"{path} claims to have {' × '.join(map(str, shape))} values; from 1 to {MOST_BYTES:,} "
            "are read: get it anew"
        )
    content = read_packed(path, header_bytes + count + 1)[header_bytes:]
    if len(content) != count:
        there = "more" if len(content) > count else f"{len(content):,} bytes"
        raise DatasetError(f"{path} should have {count:,} bytes of values and has {there}")
    return np.frombuffer(content, np.uint8).reshape(shape)
