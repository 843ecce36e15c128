"""Named random streams: the same names give the same numbers, on every machine.

(With the same numpy: its generators may change between versions, though they rarely do.)

A stream belongs to one purpose, e.g. `stream(seed, "pi-4", 12, "batches")`. Devices and
coordinator draw from nothing else, so any run can be replayed from its seed; only a model's initial
weights come from torch.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return an independent generator for this seed and these names."""
    text = json.dumps([seed, *names])  # keeps 1 and "1", and "ab", "c" and "a", "bc", apart
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))
