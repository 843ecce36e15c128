"""All parts of `tessera-bench wire`, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.network.stage.processes import MEASURABLE
from benchmarks.network.stage.programs import write_bytecode
from benchmarks.network.stage.tasks import prepare_family, prepare_perceptron
from benchmarks.network.wire.cases import bids, bytes_by_level, device, fan_out, overhead, serving
from benchmarks.network.wire.cases.bids import BidsRow
from benchmarks.network.wire.cases.bytes_by_level import BytesRow
from benchmarks.network.wire.cases.device import IdleRow, ResidentRow
from benchmarks.network.wire.cases.fan_out import FanOutRow
from benchmarks.network.wire.cases.overhead import OverheadRow
from benchmarks.network.wire.cases.serving import ServingRow
from benchmarks.network.wire.config import WireConfig
from benchmarks.report.figures import Figure
from benchmarks.report.progress import Begin, silent

METHOD = {
    "bytes": bytes_by_level.METHOD,
    "fan_out": fan_out.METHOD,
    "overhead": overhead.METHOD,
    **device.METHOD,
    "serving": serving.METHOD,
    "bids": bids.METHOD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRows:
    """Results; empty where there is no /proc to read."""

    bytes: list[BytesRow]
    fan_out: list[FanOutRow]
    bids: list[BidsRow]
    overhead: list[OverheadRow]
    memory: list[ResidentRow]
    idle: list[IdleRow]
    serving: list[ServingRow]


def measure_wire(config: WireConfig, begin: Begin = silent) -> WireRows:
    """Measure everything; the results of `begin` are called `config.ticks` times in all."""
    rows = WireRows(**{each.name: [] for each in fields(WireRows)})
    with ExitStack() as stack:
        bytecode = Path(stack.enter_context(TemporaryDirectory(prefix="tessera-bench-")))
        tick = begin("tasks and programs")
        write_bytecode(bytecode)
        tick()
        small, wide = prepare_family(config.small), prepare_family(config.wide)
        tick()
        tick()
        large = prepare_perceptron(config.serving.widths)
        tick()
        if MEASURABLE:  # first: it idles while the rest is measured
            watched = stack.enter_context(
                device.watched_device(small, config.device, bytecode, begin)
            )
            rows.memory.append(watched.memory)
        rows.bytes.extend(bytes_by_level.measure_bytes(small, config.bytes, begin))
        rows.bytes.extend(bytes_by_level.measure_bytes(wide, config.wide_bytes, begin))
        rows.fan_out.extend(fan_out.measure_fan_out(small, config.fan_out, begin))
        rows.bids.extend(bids.measure_bids(config.bids, bytecode, begin))
        if MEASURABLE:
            rows.overhead.append(overhead.measure_overhead(small, config.overhead, bytecode, begin))
            devices = config.serving.devices
            rows.serving.append(serving.measure_serving(small, large, devices, bytecode, begin))
            tick = begin("idle device")
            rows.idle.append(watched.watch())
            tick()
    return rows


def wire_figures(rows: WireRows) -> Iterator[Figure]:
    """Return the figures of all parts."""
    yield from bytes_by_level.bytes_figures(rows.bytes)
    yield from fan_out.fan_out_figures(rows.fan_out)
    for each in rows.overhead:
        yield from overhead.overhead_figures(each)
    for memory, idle in zip(rows.memory, rows.idle, strict=True):
        yield from device.device_figures(memory, idle)
    for serve in rows.serving:
        yield from serving.serving_figures(serve)
    yield from bids.bids_figures(rows.bids)
