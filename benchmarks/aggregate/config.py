"""Settings of one run of `tessera-bench aggregate`, and a check that the disk has room for it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.aggregate.closes import ClosesConfig
from benchmarks.aggregate.members import MembersConfig
from benchmarks.aggregate.scale import ScaleConfig
from benchmarks.aggregate.throughput import ThroughputConfig
from benchmarks.aggregate.traffic import TrafficConfig
from benchmarks.report.figures import FigureError

RESERVE_BYTES = 1 << 30
"""Bytes left free on the disk, as an open memory does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateConfig:
    """All parts."""

    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    closes: ClosesConfig = field(default_factory=ClosesConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    members: MembersConfig = field(default_factory=MembersConfig)
    traffic: TrafficConfig = field(default_factory=TrafficConfig)

    @property
    def disk_bytes(self) -> int:
        """The most that is on disk at a time: the parts come one after the other."""
        parts = (self.throughput, self.closes, self.scale)
        return max(part.disk_bytes for part in parts)


FULL = AggregateConfig()
QUICK = AggregateConfig(
    throughput=ThroughputConfig(
        inputs=512, widths=(1024,) * 5, outputs=256, warm=3, turns=4
    ),  # 5 million parameters
    closes=ClosesConfig(inputs=512, widths=(1024,) * 5, outputs=256, rounds=1),
    scale=ScaleConfig(fleets=(100, 1_000), warm=2, turns=15),
    members=MembersConfig(fleets=(100, 10_000), turns=30),
)


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise `FigureError` unless the folder's disk has room, before minutes are spent."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + RESERVE_BYTES:
        raise FigureError(
            f"{folder} has {free / 1e9:.1f} GB free; memories take up to "
            f"{needed_bytes / 1e9:.1f} GB, and {RESERVE_BYTES / 1e9:.1f} GB are to stay free: set "
            "TMPDIR to a folder on a larger disk, or use --quick, which takes less"
        )
