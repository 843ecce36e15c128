"""Named random streams: the same names give the same numbers, on every machine.

A stream belongs to one purpose, e.g. `stream(seed, "pi-4", 12, "batches")`. Nothing else in the
project makes a random generator, so any run can be replayed from its seed.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """An independent generator for this seed and these names."""
    text = json.dumps([seed, *names])  # keeps 1 and "1", and "ab", "c" and "a", "bc", apart
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
