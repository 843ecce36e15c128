"""Parameters of one run of `tessera-bench wire`."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.network.wire.cases.bids import BidsConfig
from benchmarks.network.wire.cases.bytes_by_level import BytesConfig
from benchmarks.network.wire.cases.device import DeviceCaseConfig
from benchmarks.network.wire.cases.fan_out import FanOutConfig
from benchmarks.network.wire.cases.overhead import OverheadConfig
from benchmarks.network.wire.cases.serving import ServingConfig

PLAIN_ENCODINGS = (("fp32", "fp32"), ("fp16", "fp16"), ("int8", "int8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WireConfig:
    """All parts. `small` is the model of all except the second of `bytes`, which uses `wide`."""

    small: str = "mlp"
    wide: str = "cnn"
    """Families of `benchmarks.models`."""
    bytes: BytesConfig = field(default_factory=BytesConfig)
    wide_bytes: BytesConfig = field(default_factory=lambda: BytesConfig(encodings=PLAIN_ENCODINGS))
    fan_out: FanOutConfig = field(default_factory=FanOutConfig)
    overhead: OverheadConfig = field(default_factory=OverheadConfig)
    device: DeviceCaseConfig = field(default_factory=DeviceCaseConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    bids: BidsConfig = field(default_factory=BidsConfig)

    @property
    def ticks(self) -> int:
        """Ticks of all parts together."""
        return (
            4  # bytecode, and a task for each of three models
            + (self.device.alone + 2)
            + len(self.bytes.encodings)
            + len(self.wide_bytes.encodings)
            + len(self.fan_out.fleets)
            + self.overhead.rounds
            + 3
            + self.bids.uploads
        )


FULL = WireConfig()
QUICK = WireConfig(
    bytes=BytesConfig(
        encodings=(*PLAIN_ENCODINGS, ("int8+zstd", "int8"), ("top-k:0.1", "fp16")), rounds=2
    ),
    wide_bytes=BytesConfig(encodings=PLAIN_ENCODINGS, rounds=2),
    fan_out=FanOutConfig(rounds=2),
    overhead=OverheadConfig(rounds=5),
    device=DeviceCaseConfig(rounds=2, alone=1, idle_s=32.0),  # one keepalive at least
    serving=ServingConfig(widths=(784, 1536, 1536, 1024, 10)),  # 5 million parameters
    bids=BidsConfig(uploads=3, quiet_bids=200),
)
