"""The jobs that are deployed: a small model on ten devices, a large one on four."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.fleet.peers.job import PeerJob
from benchmarks.network.stage.tasks import BATCH_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedJob:
    """A perceptron that all devices train whole, `rounds` measured rounds after `warm` others.

    Targets: CPU of a device's program over that of the bare loop, seconds of a round, and peak
    memory of a device (`rss_models` times the model, and `rss_mb`). None: no target.
    """

    name: str
    widths: tuple[int, ...]
    devices: int
    steps: int = 20
    rounds: int = 20
    warm: int = 2
    bare_devices: int = 10
    """Devices that the bare loop stands for in one turn."""
    cpu_target: float | None = None
    wall_target_s: float | None = None
    rss_models: float | None = None
    rss_mb: float = 0.0

    def bare(self) -> PeerJob:
        """Return the bare loop's job: the same steps, on as many samples."""
        return PeerJob(
            widths=self.widths,
            devices=self.bare_devices,
            participants=self.bare_devices,
            steps=self.steps,
            batch=BATCH_SIZE,
            samples=2 * BATCH_SIZE,
            bare_share=1.0,
        )

    def with_rounds(self, rounds: int) -> DeployedJob:
        """Return the job with another number of measured rounds."""
        return replace(self, rounds=rounds)


SMALL = DeployedJob(
    name="j", widths=(784, 200, 200, 10), devices=10, bare_devices=20, cpu_target=2.0
)
LARGE = DeployedJob(
    name="l",
    widths=(1024, *(2048,) * 6, 1000),
    devices=4,
    steps=4,
    rounds=8,
    bare_devices=4,
    cpu_target=3.0,
    wall_target_s=4.5,
    rss_models=3.0,
    rss_mb=60.0,
)
JOBS = (SMALL, LARGE)
QUICK_ROUNDS = {"j": 6, "l": 3}
