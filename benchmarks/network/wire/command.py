"""`tessera-bench wire`: costs of a round besides its training, over a real broker."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

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
    return table_of(
        f"{rows[0].model}: kB on the socket of a device in a round; the whole model in fp32 has "
        f"{rows[0].full_bytes / 1e3:.0f}",
        rows,
        ("up", lambda row: row.up_encoding),
        ("down", lambda row: row.down_encoding),
        ("level", lambda row: f"{row.level:.0%}"),
        ("kB up", lambda row: f"{row.up_bytes / 1e3:.1f}"),
        ("kB down", lambda row: f"{row.down_bytes / 1e3:.1f}"),
        ("÷ 2 ×\nmodel", lambda row: f"{row.share:.1%}"),
        ("pulled ÷\nneeded", lambda row: f"{row.pulled_over_needed:.4f}"),
        texts=2,
    )


def _fan_out_table(rows: Sequence[FanOutRow]) -> Table:
    return table_of(
        "Bytes that the coordinator sends in a round",
        rows,
        ("devices", lambda row: str(row.devices)),
        ("model", lambda row: f"{row.model_bytes:,.0f}"),
        (f"÷ {rows[0].devices} device", lambda row: f"{row.model_ratio:.4f}"),
        ("control", lambda row: f"{row.control_bytes:,.0f}"),
    )


def _overhead_table(rows: Sequence[OverheadRow]) -> Table:
    def ms(seconds: float | None) -> str:
        return "–" if seconds is None else f"{seconds * 1e3:.1f}"

    return table_of(
        "A round of programs besides its training; CPU for each device",
        rows,
        ("devices", lambda row: str(row.devices)),
        ("round\ns", lambda row: f"{row.wall_s:.2f}"),
        ("training\ns", lambda row: f"{row.slowest_training_s:.2f}"),
        ("overhead\ns", lambda row: f"{row.overhead_s:.2f}"),
        ("longest\ns", lambda row: f"{row.longest_overhead_s:.2f}"),
        ("coordinator\nCPU ms", lambda row: ms(row.coordinator_cpu_s)),
        ("broker\nCPU ms", lambda row: ms(row.broker_cpu_s)),
        ("device\nCPU ms", lambda row: ms(row.device_cpu_s)),
        ("of it\ntraining", lambda row: ms(row.training_cpu_s)),
        ("overhead\nCPU ms", lambda row: ms(row.overhead_cpu_s)),
    )


def _device_table(memory: Sequence[ResidentRow], idle: Sequence[IdleRow]) -> Table:
    return table_of(
        "A device as a program: the most resident, and a minute of idling",
        zip(memory, idle, strict=True),
        ("model", lambda row: row[0].model),
        ("program\nMB", lambda row: f"{row[0].device_mb:.1f}"),
        ("training\nalone MB", lambda row: f"{row[0].alone_mb:.1f}"),
        ("more\nMB", lambda row: f"{row[0].more_mb:.1f}"),
        ("watched\ns", lambda row: f"{row[1].seconds:.0f}"),
        ("bytes\na minute", lambda row: f"{row[1].bytes_per_minute:.0f}"),
        ("CPU ms\na minute", lambda row: f"{row[1].cpu_ms_per_minute:.0f}"),
    )


def _serving_table(rows: Sequence[ServingRow]) -> Table:
    return table_of(
        "Anonymous memory of the coordinator, MB",
        rows,
        ("model", lambda row: f"{row.model_mb:.1f}"),
        ("devices", lambda row: str(row.devices)),
        ("idle,\nsmall model", lambda row: f"{row.small_mb:.1f}"),
        ("most while\npublishing", lambda row: f"{row.publishing_peak_mb:.1f}"),
        ("published", lambda row: f"{row.published_mb:.1f}"),
        ("most while\ndevices pull", lambda row: f"{row.serving_peak_mb:.1f}"),
        ("growth ÷\nmodel", lambda row: f"{row.growth:.2f}"),
        ("s", lambda row: f"{row.seconds:.1f}"),
    )


def _bids_table(rows: Sequence[BidsRow]) -> Table:
    return table_of(
        "How long a bid is on its way",
        rows,
        ("MB beside it", lambda row: f"{row.moved_mb:.0f}"),
        ("s", lambda row: f"{row.seconds:.1f}"),
        ("bids", lambda row: str(row.bids)),
        ("p50 ms", lambda row: f"{row.p50_ms:.2f}"),
        ("p95 ms", lambda row: f"{row.p95_ms:.2f}"),
        ("longest ms", lambda row: f"{row.longest_ms:.2f}"),
    )
