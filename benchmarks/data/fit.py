"""Converts images of one shape for models that take another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.data.dataset import Dataset, DatasetError
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.plan.layout import Array


def fit_images(data: Dataset, shape: tuple[int, ...]) -> Dataset:
    """Return the same data with images of this shape: (channels, height, width).

    One channel is repeated; several become one by their mean. An image is enlarged by the largest
    whole factor that fits, every pixel becoming a square. The rest is padded with zeros on all
    sides, or cropped on all sides, with the odd row or column at the end. Data that already has the
    shape, images or not, is returned unchanged. Raises `DatasetError` if either is not an image, or
    channels cannot be matched.
    """
    if data.shape == shape:
        return data
    if len(data.shape) != 3 or len(shape) != 3:
        raise DatasetError(
            f"{data.name} has samples of shape {data.shape}, the model takes {shape}: only images "
            "(channels, height, width) can be fitted; choose another model or other data"
        )
    if data.shape[0] != shape[0] and 1 not in (data.shape[0], shape[0]):
        raise DatasetError(
            f"{data.name} has {data.shape[0]} channels, the model takes {shape[0]}: choose another "
            "model or other data"
        )
    return replace(data, train=_fit_all(data.train, shape), test=_fit_all(data.test, shape))


def _fit_all(data: ArrayData, shape: tuple[int, ...]) -> ArrayData:
    return ArrayData(tuple(_fit(images, shape) for images in data.inputs), data.targets)


def _fit(images: Array, shape: tuple[int, ...]) -> Array:
    channels, height, width = shape
    if images.shape[1] > channels:
        images = images.mean(axis=1, keepdims=True, dtype=np.float32)
    factor = max(1, min(height // images.shape[2], width // images.shape[3]))
    images = images.repeat(factor, axis=2).repeat(factor, axis=3)
    (from_y, to_y), (from_x, to_x) = (
        _centred(images.shape[axis], size) for axis, size in ((2, height), (3, width))
    )
    fitted = np.zeros((len(images), *shape), np.float32)
    fitted[:, :, to_y, to_x] = images[:, :, from_y, from_x]  # one channel fills them all
    return fitted


def _centred(there: int, wanted: int) -> tuple[slice, slice]:
    """Return the pixels to take along one side, and where to put them."""
    size = min(there, wanted)
    first, place = (there - size) // 2, (wanted - size) // 2
    return slice(first, first + size), slice(place, place + size)
