"""One device as a program: its memory through whole rounds, and its cost while idle.

The idle device waits while other parts are measured: it does too little to disturb them, and a
keepalive takes half a minute to show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.network.stage.files import RunSettings, write_device, write_run
from benchmarks.network.stage.forwarder import Forwarder
from benchmarks.network.stage.packets import Packet
from benchmarks.network.stage.processes import cpu_s, peak_resident_bytes
from benchmarks.network.stage.programs import Programs, check, device_command, serve_command
from benchmarks.network.stage.tasks import BATCH_SIZE, PreparedTask
from benchmarks.network.wire.cases.bytes_by_level import split_rounds
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent
from benchmarks.training.footprint import train_in_child, write_task
from coordinator.operate.broker.embedded import embedded_broker
from edge_sdk.data.arrays import ArrayData
from edge_sdk.program.processes import ChildProcess

DEVICE = "device"
MEMORY_TARGET_MB = 20.0
SETTLE_S = 1.0
"""Seconds after the last round before a device counts as idle."""

METHOD = {
    "memory": (
        "VmHWM, the most ever resident, of `tessera-device run` after whole rounds with the full "
        "model, and of a process that does the same training on the onnx backend and nothing else "
        "(as in `tessera-bench footprint`; median). Bytecode is cached before. MB are 10⁶ bytes."
    ),
    "idle": (
        "Bytes in the TCP streams of a device that waits for a next run, both ways, keepalives "
        "every 30 s included, and its CPU time in ticks of 10 ms, while the other parts of this "
        "command are measured; scaled to a minute."
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCaseConfig:
    """`alone` processes train alone; the idle device is watched for at least `idle_s`."""

    rounds: int = 5
    steps: int = 20
    alone: int = 3
    idle_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentRow:
    """Peak resident memory, in MB of 10⁶ bytes."""

    model: str
    rounds: int
    device_mb: float
    alone_mb: float

    @property
    def more_mb(self) -> float:
        """Cost of taking part on top of training."""
        return self.device_mb - self.alone_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRow:
    """Traffic and CPU in `seconds`."""

    seconds: float
    up_bytes: int
    down_bytes: int
    packets: int
    cpu_s: float

    @property
    def bytes_per_minute(self) -> float:
        """Bytes per minute in both directions."""
        return (self.up_bytes + self.down_bytes) * 60 / self.seconds

    @property
    def cpu_ms_per_minute(self) -> float:
        """CPU time per minute of all threads."""
        return self.cpu_s * 1e3 * 60 / self.seconds


@dataclass(frozen=True, slots=True)
class WatchedDevice:
    """A device that has been through its rounds and idles; `watch` ends the idling."""

    memory: ResidentRow
    watch: Callable[[], IdleRow]


@contextmanager
def watched_device(
    task: PreparedTask, config: DeviceCaseConfig, bytecode: Path, begin: Begin = silent
) -> Iterator[WatchedDevice]:
    """Take a device through its rounds, then let it idle for the duration of the context.

    `begin` is called once, its result `config.alone + 1` times.
    """
    with TemporaryDirectory(prefix="tessera-bench-") as temporary:
        folder = Path(temporary)
        tick = begin(f"{task.name} alone and as a program")
        alone_mb = _alone_mb(task, config, folder, bytecode, tick)
        with (
            embedded_broker(folder / "broker") as broker,
            Forwarder(broker, [DEVICE]) as forwarder,
            Programs(folder, bytecode) as programs,
        ):
            settings = RunSettings(devices=1, rounds=config.rounds, steps=config.steps)
            coordinator = programs.begin(
                "coordinator", serve_command(write_run(folder, task, settings, broker))
            )
            path = write_device(folder, DEVICE, forwarder.settings(DEVICE), stay=True)
            device = programs.begin(DEVICE, device_command(path))
            programs.wait_until(
                lambda: len(split_rounds(forwarder.packets(DEVICE))) >= config.rounds,
                f"the end of round {config.rounds}",
            )
            programs.stop(coordinator)  # it would wait for the device to leave
            time.sleep(SETTLE_S)
            memory = ResidentRow(
                model=task.name,
                rounds=config.rounds,
                device_mb=peak_resident_bytes(device.pid) / 1e6,
                alone_mb=alone_mb,
            )
            watch = _Watch(device, forwarder, config.idle_s)
            tick()
            yield WatchedDevice(memory, watch.end)


def _alone_mb(
    task: PreparedTask,
    config: DeviceCaseConfig,
    folder: Path,
    bytecode: Path,
    tick: Callable[[], None],
) -> float:
    files = folder / "alone"
    files.mkdir()
    batch = ArrayData((task.data.inputs[0][:BATCH_SIZE],), task.data.targets[:BATCH_SIZE])
    write_task(task.model, batch, files)
    peaks: list[float] = []
    for _ in range(config.alone):
        done = train_in_child("onnx", task.name, config.steps, str(files), str(bytecode))
        peaks.append(done["peak_mb"])
        tick()
    return median(peaks)


class _Watch:
    """Records what a device sends, receives and computes from now on."""

    def __init__(self, device: ChildProcess, forwarder: Forwarder, least_s: float) -> None:
        self._device = device
        self._forwarder = forwarder
        self._least_s = least_s
        self._started_s = time.monotonic()
        self._cpu_s = cpu_s(device.pid)

    def end(self) -> IdleRow:
        """Return the record, after at least `least_s`."""
        time.sleep(max(0.0, self._started_s + self._least_s - time.monotonic()))
        check(self._device)
        return idle_row(
            self._forwarder.packets(DEVICE),
            self._started_s,
            time.monotonic(),
            cpu_s(self._device.pid) - self._cpu_s,
        )


def idle_row(
    packets: Sequence[Packet], started_s: float, ended_s: float, spent_s: float
) -> IdleRow:
    """Summarise what happened between two moments."""
    passed = [packet for packet in packets if started_s <= packet.at_s < ended_s]
    return IdleRow(
        seconds=ended_s - started_s,
        up_bytes=sum(packet.size for packet in passed if packet.up),
        down_bytes=sum(packet.size for packet in passed if not packet.up),
        packets=len(passed),
        cpu_s=spent_s,
    )


def device_figures(memory: ResidentRow, idle: IdleRow) -> list[Figure]:
    """Return the figures of a watched device."""
    return [
        Figure(
            f"wire.device.{memory.model}.rss_over_training",
            memory.more_mb,
            "MB",
            target=MEMORY_TARGET_MB,
        ),
        Figure(f"wire.device.{memory.model}.rss", memory.device_mb, "MB"),
        Figure("wire.device.idle.bytes_per_minute", idle.bytes_per_minute, "B"),
        Figure("wire.device.idle.cpu_per_minute", idle.cpu_ms_per_minute, "ms"),
    ]
