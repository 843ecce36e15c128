"""Values that are needed only while a round closes, in a file that vanishes with its mapping.

Rules read all movements side by side, a slice of each at a time. What is decoded or shortened
first, one movement after the other, would take as much RAM as all devices' models together.
"""

from __future__ import annotations

from collections.abc import Iterable
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from edge_sdk.protocol.plan.blocks import Float32


def spool(vectors: Iterable[Float32], folder: Path | None) -> list[Float32]:
    """Write vectors to a file, one at a time, and return them as views of it.

    `folder` None means the folder for temporary files.
    """
    with TemporaryFile(dir=folder) as file:
        sizes = [file.write(np.ascontiguousarray(each).data) for each in vectors]
        if not sum(sizes):
            return [np.empty(0, dtype=np.float32) for _ in sizes]
        file.flush()
        values = np.frombuffer(mmap(file.fileno(), 0, access=ACCESS_READ), np.float32)
    return np.split(values, np.cumsum(sizes)[:-1] // values.itemsize)
