"""The state of a device in words."""

from __future__ import annotations

from edge_sdk.device.advice.seeing import seen_lines
from edge_sdk.machine.snapshot import (
    Battery,
    CoreClass,
    Cpu,
    Gpu,
    Heat,
    MemoryState,
    Network,
    Power,
    Snapshot,
    Trip,
    Zone,
)


def test_all_that_is_known_is_said_with_units() -> None:
    snapshot = Snapshot(
        cpu=Cpu(
            cores=8.0,
            load=1.26,
            busy=0.5,
            mhz=900.4,
            max_mhz=2840.0,
            pressure=93.29,
            classes=(
                CoreClass(cores=4, max_mhz=2840.0, capacity=1024.0),
                CoreClass(cores=4, max_mhz=None, capacity=380.0),
            ),
        ),
        memory=MemoryState(total_bytes=2.52765e10, available_bytes=1.96654e10, unified=True),
        battery=Battery(present=True, percent=71, charging=False, watts=2.5, capacity_wh=10.6),
        heat=Heat(
            zones=(
                Zone(name="gpu", celsius=40.2),
                Zone(name="cpu", celsius=51, trips=(Trip(kind="passive", celsius=85),)),
            ),
            throttling=False,
            status=1,
        ),
        power=Power(rails={"VDD_CPU": 1.25}, total_watts=5.0, undervoltage=True, mode="MAXN"),
        gpu=Gpu(busy=0.07),
        network=Network(metered=False, up_bytes_per_s=12_000.0, down_bytes_per_s=3e6),
        ages_s={"battery.percent": 5.2, "battery.charging": 2.0, "gpu.busy": 0.4},
    )
    assert list(seen_lines(snapshot)) == [
        "cpu      8 cores (4 × 2,840 MHz + 4), 50% busy, 900 MHz of 2,840 MHz, "
        "1.3 programs at work (mean of a minute), pressure 93 % (programs waiting for a core)",
        "memory   25,276 MB, 19,665 MB free, shared with the GPU",
        "battery  71 %, not charging, 2.5 W drawn, 10.6 Wh when full  (5 s ago)",
        "heat     cpu 51 °C, gpu 40 °C, not slowed down, thermal status light",
        "power    5.0 W, VDD_CPU 1.2 W, the supply is too weak, mode MAXN",
        "gpu      7% busy",
        "network  not metered, 12 KB/s up, 3,000 KB/s down",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert list(seen_lines(Snapshot())) == []
    alike = CoreClass(cores=1, max_mhz=None, capacity=1024.0)
    few = Snapshot(
        cpu=Cpu(cores=1.0, max_mhz=2000.0, classes=(alike,)), battery=Battery(present=False)
    )
    assert list(seen_lines(few)) == ["cpu      1 core, up to 2,000 MHz", "battery  none: on mains"]
