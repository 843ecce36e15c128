"""Cost of many connected devices while rounds finish: CPU and memory of coordinator and broker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.network.load.site.files import participants_of
from benchmarks.network.load.site.history import ClosedRound
from benchmarks.network.load.site.presences import Count, least_between, reached_at
from benchmarks.network.load.site.site import CpuSpent, open_site
from benchmarks.network.stage.processes import anonymous_bytes, peak_resident_bytes
from benchmarks.network.stage.tasks import PreparedTask
from benchmarks.report.figures import Figure, FigureError
from benchmarks.report.progress import Begin, silent

TARGET = 500

METHOD = (
    "One `tessera-coordinator serve` (rule ram-fed, settings by default, no TLS) and one Mosquitto "
    "as programs, and devices on this machine. Devices are not programs of their own, since so "
    "many do not fit here: some share a process, each a DeviceService as `tessera-device run` has "
    "it, with two MQTT connections, four threads, its own onnxruntime session and folder; they "
    "train a small model for one step. So what they need of this machine, which they share with "
    "coordinator and broker, is not what devices need, and makes rounds longer. All bid in every "
    'round; 20 % are picked (select = "after"), and all of these are waited for. Held: the fewest '
    "devices present, as "
    "anybody sees it on the broker, in the time of the measured rounds, of which each counted the "
    "movements of all that were picked (else 0). The first round is not measured. Seconds of a "
    "round are from one entry of the coordinator's history to the next, median; CPU is user and "
    "system time per measured round, mean; RSS is VmHWM, the most ever resident; kB per device is "
    "anonymous memory at the end over that before devices came, divided by their number. MB are "
    "10⁶ bytes."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldConfig:
    """Parameters: `rounds` are measured after a first one; `together` devices share a process."""

    devices: int = 500
    rounds: int = 20
    together: int = 125


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Use of a program: CPU seconds of a round, MB of 10⁶ bytes, kB for each device."""

    cpu_s: float
    rss_mb: float
    kb_per_device: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """Results; seconds of rounds are medians, CPU seconds of a round means."""

    devices: int
    """Devices that were started."""
    held: int
    participants: int
    rounds: int
    joined_s: float
    """Time from the start of the devices' processes until all were present."""
    round_s: float
    longest_round_s: float
    coordinator: Taken
    broker: Taken
    devices_cpu_s: float
    """CPU seconds of all devices together."""
    devices_mb: float
    """Peak resident memory of all devices together."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a program: anonymous ones before and after devices, and the most ever resident."""

    before: int
    after: int
    peak: int


def measure_held(
    task: PreparedTask, config: HeldConfig, bytecode: Path, begin: Begin = silent
) -> HeldRow:
    """Let devices take part for some rounds; `begin`'s result is called `rounds + 2` times."""
    tick = begin(f"{config.devices} devices")
    with open_site(task, config.devices, config.together, bytecode) as site:
        pids = (site.coordinator.pid, site.broker.pid)
        before = [anonymous_bytes(pid) for pid in pids]
        started_s = time.time()
        site.start_devices()
        site.wait_for_devices()
        tick()
        spent: list[CpuSpent] = []
        for number in range(1, config.rounds + 2):
            site.wait_for_rounds(number)
            spent.append(site.spent())
            tick()
        coordinator, broker = (
            MemoryUse(least, anonymous_bytes(pid), peak_resident_bytes(pid))
            for least, pid in zip(before, pids, strict=True)
        )
        return held_row(
            config.devices,
            started_s,
            site.history.closed()[: config.rounds + 1],
            site.broker.presences.counts,
            (spent[0], spent[-1]),
            coordinator=coordinator,
            broker=broker,
            devices_bytes=sum(peak_resident_bytes(fleet.pid) for fleet in site.fleets),
        )


def held_row(
    devices: int,
    started_s: float,
    closed: Sequence[ClosedRound],
    counts: Sequence[Count],
    spent: tuple[CpuSpent, CpuSpent],
    *,
    coordinator: MemoryUse,
    broker: MemoryUse,
    devices_bytes: int,
) -> HeldRow:
    """Summarise the observations; the first of the `closed` rounds is not measured.

    `spent` is that at the end of the first round and of the last. Raises `FigureError` if the
    devices were never all present.
    """
    measured = closed[1:]
    walls = [entry.at_s - before.at_s for before, entry in pairwise(closed)]
    wanted = participants_of(devices)
    whole = all(entry.movements == wanted for entry in measured)
    first, last = spent
    joined_s = reached_at(counts, devices)
    if joined_s is None:
        raise FigureError(f"{devices} devices were never there at the same time")
    # The last device may be noticed only when its first round is already over.
    since_s = max(joined_s, closed[0].at_s)

    def taken(cpu_s: float, memory: MemoryUse) -> Taken:
        return Taken(
            cpu_s=cpu_s / len(walls),
            rss_mb=memory.peak / 1e6,
            kb_per_device=(memory.after - memory.before) / 1e3 / devices,
        )

    return HeldRow(
        devices=devices,
        held=least_between(counts, since_s, closed[-1].at_s) if whole else 0,
        participants=wanted,
        rounds=len(walls),
        joined_s=joined_s - started_s,
        round_s=median(walls),
        longest_round_s=max(walls),
        coordinator=taken(last.coordinator_s - first.coordinator_s, coordinator),
        broker=taken(last.broker_s - first.broker_s, broker),
        devices_cpu_s=(last.devices_s - first.devices_s) / len(walls),
        devices_mb=devices_bytes / 1e6,
    )


def held_figures(row: HeldRow) -> list[Figure]:
    """Return the figures of `measure_held`. Fewer devices have no target."""
    target = TARGET if row.devices >= TARGET else None
    stem = f"load.{row.devices}"
    figures = [
        Figure(f"{stem}.held", row.held, "devices", target=target, better="higher"),
        Figure(f"{stem}.joined", row.joined_s, "s"),
        Figure(f"{stem}.round", row.round_s, "s"),
    ]
    for name, taken in (("coordinator", row.coordinator), ("broker", row.broker)):
        figures += [
            Figure(f"{stem}.{name}.cpu_per_round", taken.cpu_s, "s"),
            Figure(f"{stem}.{name}.cpu_per_device", taken.cpu_s * 1e3 / row.devices, "ms"),
            Figure(f"{stem}.{name}.rss", taken.rss_mb, "MB"),
            Figure(f"{stem}.{name}.memory_per_device", taken.kb_per_device, "kB"),
        ]
    return figures
