"""One sample drawn in the terminal, where it is an image."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge_sdk.data.readers.images import image_shape
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec

SHADES = " ░▒▓█"
MAX_PIXELS = 28
"""Most pixels drawn side by side; a pixel is two characters wide."""


def is_drawable(spec: DataSpec) -> bool:
    """True if the task's input is an image: three sizes, of which one is a number of channels."""
    shape, described = spec.inputs[0].shape, spec.first
    sound = described.mels is not None or described.sample_rate is not None
    return len(shape) == 3 and image_shape(shape) is not None and not sound


def draw_image(sample: Array, spec: DataSpec) -> Iterator[str]:
    """Yield the lines of a drawing of one sample, in grey, from its darkest to its lightest."""
    layout = image_shape(spec.inputs[0].shape)
    if layout is None:
        return
    axis = 0 if layout.channels_first else 2
    grey = sample.astype(np.float64)
    grey = grey if grey.ndim == 2 else grey.mean(axis=axis)
    step = -(-max(grey.shape) // MAX_PIXELS)
    # Each drawn pixel is the mean of a square, so that thin lines do not disappear.
    rows, columns = (grey.shape[0] // step, grey.shape[1] // step)
    grey = grey[: rows * step, : columns * step]
    grey = grey.reshape(rows, step, columns, step).mean(axis=(1, 3))
    low, high = float(grey.min()), float(grey.max())
    share = (grey - low) / ((high - low) or 1.0)
    shades = np.minimum((share * len(SHADES)).astype(int), len(SHADES) - 1)
    for line in shades:
        yield "".join(2 * SHADES[shade] for shade in line).rstrip()
