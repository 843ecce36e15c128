"""Values that are needed only while a round closes, in a file that vanishes with its mapping.

Rules read all movements side by side, a slice of each at a time. What is decoded or shortened
first, one movement after the other, would take as much RAM as all devices' models together.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import gettempdir

import numpy as np

from edge_sdk.program.files import PlacedFile, remove
from edge_sdk.protocol.plan.blocks import Float32


def spool(vectors: Iterable[Float32], folder: Path | None) -> list[Float32]:
    """Write vectors to a file, one at a time, and return them as views of it.

    `folder` None means the folder for temporary files.
    """
    folder = Path(gettempdir()) if folder is None else folder
    file = PlacedFile(folder / f"{secrets.token_hex(8)}.part", mode=0o600)
    try:
        sizes: list[int] = []
        for each in vectors:
            data = np.ascontiguousarray(each).data
            file.write_at(data, sum(sizes))  # waits where the disk is full
            sizes.append(data.nbytes)
        if not sum(sizes):
            return [np.empty(0, dtype=np.float32) for _ in sizes]
        values = np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), np.float32)
    finally:
        file.close()
        remove(file.path)
    return np.split(values, np.cumsum(sizes)[:-1] // values.itemsize)
