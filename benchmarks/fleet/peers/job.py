"""The job that every simulator does, and its files: settings as JSON, samples as arrays.

Drivers read it with other Pythons, so it is plain files. The samples are drawn once and mapped by
all of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.report.options import UsageError
from edge_sdk.protocol.streams import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """A perceptron trained by `participants` of `devices` in a round. Raises `UsageError`."""

    widths: tuple[int, ...] = (784, 200, 200, 10)
    devices: int = 1000
    participants: int = 100
    steps: int = 20
    """Steps of SGD that a device takes in a round."""
    batch: int = 32
    samples: int = 64
    """Samples of each device; its steps are whole passes through them."""
    learning_rate: float = 0.05
    momentum: float = 0.9
    processes: int = 2
    """Processes that train, where a simulator has any."""
    bare_share: float = 0.2
    """Share of a round's steps that the bare loop takes in its turn."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples % self.batch or (self.steps * self.batch) % self.samples:
            raise UsageError(
                f"{self.steps} steps of {self.batch} are no whole passes through {self.samples} "
                "samples, as one of the simulators counts: choose multiples"
            )

    def write(self, folder: Path) -> Path:
        """Write the job and its samples to a folder; return the path of the job."""
        random, count = stream(self.seed, "peers"), self.devices * self.samples
        inputs = random.standard_normal((count, self.widths[0]), dtype=np.float32)
        np.save(folder / "inputs.npy", inputs)
        np.save(folder / "targets.npy", random.integers(0, self.widths[-1], count))
        path = folder / "job.json"
        path.write_text(json.dumps({**asdict(self), "folder": str(folder)}), encoding="utf-8")
        return path
