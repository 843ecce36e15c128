"""Images with Pillow (extra `images`): turned upright, in the task's colours and size.

A task's input is channels × height × width, height × width × channels or height × width; 1 channel
is grey, 3 are red, green and blue, 4 have transparency too. Images are resized to the task's height
and width with Pillow's bilinear filter; the sides are not kept in proportion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_sdk.data.block import Block, rows_of
from edge_sdk.data.errors import DataError
from edge_sdk.data.readers.files import FoundFiles
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.task.data_spec import DataSpec

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
"""Pillow's colours by number of channels."""


class ImageShape(NamedTuple):
    """The layout of a task's images."""

    height: int
    width: int
    channels: int
    channels_first: bool

    def arranged(self, pixels: Array) -> Array:
        """Return pixels (height × width × channels) in the task's layout."""
        return pixels.transpose(2, 0, 1) if self.channels_first else pixels


def image_shape(shape: Sequence[int]) -> ImageShape | None:
    """Return the layout of an input of this shape; None: it is not an image."""
    if len(shape) == 2:
        return ImageShape(shape[0], shape[1], 1, True)
    if len(shape) != 3:
        return None
    # Four is a number of channels less often than a height.
    for channels in ((1, 3), (4,)):
        if shape[0] in channels:
            return ImageShape(shape[1], shape[2], shape[0], True)
        if shape[2] in channels:
            return ImageShape(shape[0], shape[1], shape[2], False)
    return None


def read_images(found: FoundFiles, spec: DataSpec, *, labelled: bool) -> Iterator[Block]:
    """Yield one sample for every image. Raises `DataError`."""
    if labelled and found.files[0].label is None:
        raise DataError(
            f"{found.files[0].path} lies in no class folder: put the images of each class into a "
            "folder with its name"
        )
    layout = image_shape(spec.inputs[0].shape)
    if layout is None:
        wanted = "×".join(map(str, spec.inputs[0].shape)) or "single numbers"
        raise DataError(f"{found.root} has images, but the task's input is {wanted}")
    step = rows_of(layout.height * layout.width * layout.channels)
    for start in range(0, len(found.files), step):
        part = found.files[start : start + step]
        names = [found.name_of(each.path) for each in part]
        pixels = [
            layout.arranged(read_image(each.path, name, layout))
            for each, name in zip(part, names, strict=True)
        ]
        labels = [each.label for each in part if each.label is not None]
        yield Block(
            (np.stack(pixels),),
            np.array(labels) if labels else None,
            names.__getitem__,
            "pixels",
        )


def read_image(path: Path, name: str, layout: ImageShape) -> Array:
    """Return an image's pixels, uint8, height × width × channels. Raises `DataError`."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError as error:
        raise DataError(f"{name}: images need Pillow: pip install 'tessera-fl[images]'") from error
    try:
        with Image.open(path) as opened:
            image: Any = ImageOps.exif_transpose(opened)
            deep = image.mode == "I" and opened.format in ("PNG", "PPM")  # never more than 16 bits
            if image.mode == "F" or (image.mode == "I" and not deep):
                kind = "floats" if image.mode == "F" else "32-bit whole numbers"
                raise DataError(
                    f"{name}: its pixels are {kind}, whose range the file does not say: save 8 or "
                    "16 bits a channel, or give .npy arrays with [format] range"
                )
            if image.mode.startswith("I"):  # 16 bits a pixel, of which the upper 8 are taken
                image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).astype(np.uint8))
            image = image.convert(MODES[layout.channels])
            image = image.resize((layout.width, layout.height), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, np.uint8)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds for bad bytes
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{name} cannot be read as an image: {said}") from error
    return pixels.reshape(layout.height, layout.width, layout.channels)
