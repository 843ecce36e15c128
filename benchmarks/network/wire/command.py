"""`tessera-bench wire`: costs of a round besides its training, over a real broker."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import make_table

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.network.wire.cases.bids import BidsRow
    from benchmarks.network.wire.cases.bytes_by_level import BytesRow
    from benchmarks.network.wire.cases.device import IdleRow, ResidentRow
    from benchmarks.network.wire.cases.fan_out import FanOutRow
    from benchmarks.network.wire.cases.overhead import OverheadRow
    from benchmarks.network.wire.cases.serving import ServingRow
    from benchmarks.network.wire.measure import WireRows


def add_parser(commands: Any) -> None:
    """Add the command."""
    add_command(
        commands,
        "wire",
        _measure,
        help="bytes, seconds and memory of rounds over a real broker",
        description=(
            "Runs coordinator and devices on their own broker (mosquitto, or amqtt if that is not "
            "installed) and measures: bytes on the socket of a device in a round by level and "
            "encoding, and the share of pulled bytes it needs; bytes of the coordinator by the "
            "number of devices; seconds and CPU of a round of 10 programs besides training; "
            "memory of a device through a round, and the cost of an idle one; memory of the "
            "coordinator while a model of 100 MB goes to 8 devices; the latency of a bid while "
            "bulk moves. Uses up to 3 GB in the folder for temporary files (TMPDIR), which it "
            "deletes. Takes two minutes; --quick, with fewer rounds and a model of 20 MB, "
            "under one."
        ),
        example="wire --quick --json wire.json",
        quick="fewer rounds, a smaller large model",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.network.wire import config as configs
    from benchmarks.network.wire.measure import METHOD, measure_wire, wire_figures
    from coordinator.operate.broker.embedded import available

    config = configs.QUICK if arguments.quick else configs.FULL
    broker = next(iter(available()), None)
    with progress("wire", config.ticks) as part:
        rows = measure_wire(config, part)

    slower = f"The broker was {broker}: mosquitto, which is faster, is not installed."
    return Measured(
        figures=list(wire_figures(rows)),
        shown=[*([] if broker == "mosquitto" else [slower]), *_tables(rows)],
        packages=("onnxruntime", "numpy", "paho-mqtt", "amqtt"),
        config=asdict(config),
        data={"broker": broker, "method": METHOD, **asdict(rows)},
    )


def _tables(rows: WireRows) -> Iterator[Table]:
    for model in dict.fromkeys(row.model for row in rows.bytes):
        yield _bytes_table([row for row in rows.bytes if row.model == model])
    yield _fan_out_table(rows.fan_out)
    if rows.overhead:
        yield _overhead_table(rows.overhead)
        yield _device_table(rows.memory, rows.idle)
        yield _serving_table(rows.serving)
    yield _bids_table(rows.bids)


def _bytes_table(rows: Sequence[BytesRow]) -> Table:
    first = rows[0]
    table = make_table(
        f"{first.model}: kB on the socket of a device in a round; the whole model in fp32 has "
        f"{first.full_bytes / 1e3:.0f}",
        *("up", "down", "level", "kB up", "kB down", "÷ 2 ×\nmodel", "pulled ÷\nneeded"),
    )
    for column in table.columns[:2]:
        column.justify = "left"
    for row in rows:
        table.add_row(
            row.up_encoding,
            row.down_encoding,
            f"{row.level:.0%}",
            f"{row.up_bytes / 1e3:.1f}",
            f"{row.down_bytes / 1e3:.1f}",
            f"{row.share:.1%}",
            f"{row.pulled_over_needed:.4f}",
        )
    return table


def _fan_out_table(rows: Sequence[FanOutRow]) -> Table:
    table = make_table(
        "Bytes that the coordinator sends in a round",
        *("devices", "model", f"÷ {rows[0].devices} device", "control"),
    )
    for row in rows:
        table.add_row(
            str(row.devices),
            f"{row.model_bytes:,.0f}",
            f"{row.model_ratio:.4f}",
            f"{row.control_bytes:,.0f}",
        )
    return table


def _overhead_table(rows: Sequence[OverheadRow]) -> Table:
    table = make_table(
        "A round of programs besides its training; CPU for each device",
        *("devices", "round\ns", "training\ns", "overhead\ns", "longest\ns"),
        *("coordinator\nCPU ms", "broker\nCPU ms", "device\nCPU ms", "of it\ntraining"),
        "overhead\nCPU ms",
    )
    for row in rows:
        broker = "–" if row.broker_cpu_s is None else f"{row.broker_cpu_s * 1e3:.1f}"
        table.add_row(
            str(row.devices),
            f"{row.wall_s:.2f}",
            f"{row.slowest_training_s:.2f}",
            f"{row.overhead_s:.2f}",
            f"{row.longest_overhead_s:.2f}",
            f"{row.coordinator_cpu_s * 1e3:.1f}",
            broker,
            f"{row.device_cpu_s * 1e3:.1f}",
            f"{row.training_cpu_s * 1e3:.1f}",
            f"{row.overhead_cpu_s * 1e3:.1f}",
        )
    return table


def _device_table(memory: Sequence[ResidentRow], idle: Sequence[IdleRow]) -> Table:
    table = make_table(
        "A device as a program: the most resident, and a minute of idling",
        *("model", "program\nMB", "training\nalone MB", "more\nMB"),
        *("watched\ns", "bytes\na minute", "CPU ms\na minute"),
    )
    for most, minute in zip(memory, idle, strict=True):
        table.add_row(
            most.model,
            f"{most.device_mb:.1f}",
            f"{most.alone_mb:.1f}",
            f"{most.more_mb:.1f}",
            f"{minute.seconds:.0f}",
            f"{minute.bytes_per_minute:.0f}",
            f"{minute.cpu_ms_per_minute:.0f}",
        )
    return table


def _serving_table(rows: Sequence[ServingRow]) -> Table:
    table = make_table(
        "Anonymous memory of the coordinator, MB",
        *("model", "devices", "idle,\nsmall model", "most while\npublishing", "published"),
        *("most while\ndevices pull", "growth ÷\nmodel", "s"),
    )
    for row in rows:
        table.add_row(
            f"{row.model_mb:.1f}",
            str(row.devices),
            f"{row.small_mb:.1f}",
            f"{row.publishing_peak_mb:.1f}",
            f"{row.published_mb:.1f}",
            f"{row.serving_peak_mb:.1f}",
            f"{row.growth:.2f}",
            f"{row.seconds:.1f}",
        )
    return table


def _bids_table(rows: Sequence[BidsRow]) -> Table:
    table = make_table(
        "How long a bid is on its way",
        *("MB beside it", "s", "bids", "p50 ms", "p95 ms", "longest ms"),
    )
    for row in rows:
        table.add_row(
            f"{row.moved_mb:.0f}",
            f"{row.seconds:.1f}",
            str(row.bids),
            f"{row.p50_ms:.2f}",
            f"{row.p95_ms:.2f}",
            f"{row.longest_ms:.2f}",
        )
    return table
