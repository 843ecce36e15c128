"""`tessera-bench aggregate`: the coordinator's cost of closing a round, and bytes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import make_table, or_dash, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.aggregate.closes import ClosesRow
    from benchmarks.aggregate.config import AggregateConfig
    from benchmarks.aggregate.members import MembersRow
    from benchmarks.aggregate.scale import ScaleRow
    from benchmarks.aggregate.throughput import ThroughputRow
    from benchmarks.aggregate.traffic import TrafficRow


def add_parser(commands: Any) -> None:
    """Add the command."""
    add_command(
        commands,
        "aggregate",
        _measure,
        help="the coordinator's cost of closing a round, and bytes on the wire",
        description=(
            "Rate at which ra-fed and ram-fed (memory on disk, page cache warm) take in movements "
            "of 32 devices at half level of a model of 25 million parameters, on two threads, "
            "beside numpy.copyto of the same bytes. Then memory of the whole close, from uploads "
            "on disk to the commit. Then time and anonymous memory of a round with 100, 1,000 and "
            "10,000 registered devices, and time with as many members of which 10 are there, or "
            "of which 10 are drawn, without training. Then bytes for a device and round, by level "
            "and encoding. Memories are made in the folder for temporary files (TMPDIR) and "
            "deleted. Takes a few minutes and asks for 11 GB of free disk; --quick, with 5 million "
            "parameters and up to 1,000 devices, under one and 3 GB."
        ),
        example="aggregate --quick --json aggregate.json",
        quick="smaller model, fewer devices",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.aggregate.config import FULL, QUICK

    return measure_aggregate(QUICK if arguments.quick else FULL)


def measure_aggregate(config: AggregateConfig) -> Measured:
    """Measure all parts; raises `FigureError` first if the disk has too little room."""
    from dataclasses import asdict
    from tempfile import gettempdir

    from benchmarks.aggregate import closes, members, scale, throughput, traffic
    from benchmarks.aggregate.config import check_disk

    check_disk(Path(gettempdir()), config.disk_bytes)

    with progress("aggregate", config.throughput.ticks) as part:
        rates = throughput.measure_throughput(config.throughput, part)
    closed: list[ClosesRow] = []
    if closes.MEASURABLE:
        with progress("closes", config.closes.ticks) as part:
            closed = closes.measure_closes(config.closes, part)
    fleets: list[ScaleRow] = []
    if scale.MEASURABLE:
        with progress("devices", config.scale.ticks) as part:
            fleets = scale.measure_scale(config.scale, part)
    with progress("members", config.members.ticks) as part:
        fleet = members.measure_members(config.members, part)
    with progress("bytes", len(traffic.encodings())) as part:
        messages = traffic.measure_traffic(config.traffic, part("by level and encoding"))

    return Measured(
        figures=[
            *throughput.throughput_figures(rates),
            *closes.closes_figures(closed),
            *scale.scale_figures(fleets),
            *members.members_figures(fleet),
            *traffic.traffic_figures(messages),
        ],
        shown=[
            _throughput_table(rates, config.throughput.threads),
            *([_closes_table(closed)] if closed else []),
            *([_scale_table(fleets)] if fleets else []),
            _members_table(fleet, config.members.participants),
            _traffic_table(messages),
        ],
        packages=("numpy", "zstandard"),
        config=asdict(config),
        data={
            "method": {
                "throughput": throughput.METHOD,
                "closes": closes.METHOD,
                "devices": scale.METHOD,
                "members": members.METHOD,
                "bytes": traffic.METHOD,
            },
            "throughput": [asdict(row) for row in rates],
            "closes": [asdict(row) for row in closed],
            "devices": [asdict(row) for row in fleets],
            "members": [asdict(row) for row in fleet],
            "bytes": [asdict(row) for row in messages],
        },
    )


def _throughput_table(rows: Sequence[ThroughputRow], threads: int) -> Table:
    def commit(row: ThroughputRow, number: float) -> str:
        return or_dash(None if row.dtype is None else number)

    return table_of(
        f"Taking in {rows[0].received_mb:.0f} MB of movements ({rows[0].plan} parameters, "
        f"{threads} threads), and numpy.copyto of them",
        rows,
        ("rule", lambda row: row.rule),
        ("memory", lambda row: row.dtype or "–"),
        ("copyto\nGB/s", lambda row: f"{row.copy_gb_s:.2f}"),
        ("rule\nGB/s", lambda row: f"{row.move_gb_s:.2f}"),
        ("rule ÷\ncopyto", lambda row: f"{row.over_copy:.3f}"),
        ("with\ncommit", lambda row: commit(row, row.over_copy_with_commit)),
        ("CPU s", lambda row: f"{row.move_cpu_s:.2f}"),
        ("commit\ns", lambda row: commit(row, row.commit_s)),
        ("longest\ns", lambda row: commit(row, row.longest_commit_s)),
        texts=1,
    )


def _closes_table(rows: Sequence[ClosesRow]) -> Table:
    return table_of(
        f"Memory over idle (model and memory open) while rounds of uploads close; "
        f"the model has {rows[0].model_mb:.0f} MB",
        rows,
        ("rule", lambda row: row.rule),
        ("memory", lambda row: row.dtype or "–"),
        ("movements", lambda row: row.encoding),
        ("received\nMB", lambda row: f"{row.received_mb:.0f}"),
        ("anonymous\nMB", lambda row: f"{row.anonymous_mb:.0f}"),
        ("in\nmodels", lambda row: f"{row.over_model:.2f}"),
        ("mapped\nMB", lambda row: f"{row.mapped_mb:.0f}"),
        ("receive\ns", lambda row: f"{row.receive_s:.2f}"),
        ("close\ns", lambda row: f"{row.close_s:.2f}"),
        ("close\nCPU s", lambda row: f"{row.close_cpu_s:.2f}"),
        ("commit\ns", lambda row: f"{row.commit_s:.2f}"),
        texts=1,
    )


def _scale_table(rows: Sequence[ScaleRow]) -> Table:
    return table_of(
        "A round of ram-fed by registered devices, each remembered in full on disk",
        rows,
        ("devices", lambda row: f"{row.devices:,}"),
        ("disk\nMB", lambda row: f"{row.disk_mb:.0f}"),
        ("rule\nms", lambda row: f"{row.move_ms:.1f}"),
        ("commit\nms", lambda row: f"{row.commit_ms:.1f}"),
        ("round\nms", lambda row: f"{row.round_ms:.1f}"),
        ("ratio", lambda row: f"{row.time_ratio:.3f}"),
        ("anonymous\nMB", lambda row: f"{row.anonymous_mb:.1f}"),
        ("ratio", lambda row: f"{row.memory_ratio:.3f}"),
    )


def _members_table(rows: Sequence[MembersRow], participants: int) -> Table:
    return table_of(
        f"A round without training by members, of which {participants} take part",
        rows,
        ("members", lambda row: f"{row.members:,}"),
        ("there", lambda row: f"{row.members if row.there else participants:,}"),
        ("machine\nms", lambda row: f"{row.machine_ms:.2f}"),
        ("ratio", lambda row: f"{row.machine_ratio:.3f}"),
        ("process\nms", lambda row: f"{row.process_ms:.2f}"),
        ("ratio", lambda row: f"{row.process_ratio:.3f}"),
    )


def _traffic_table(rows: Sequence[TrafficRow]) -> Table:
    levels = list(dict.fromkeys(row.level for row in rows))
    table = make_table(
        "Bytes for a device and round, of the whole model's in fp32 in that direction",
        "encoding",
        *(f"{level:.0%}\n{way}" for level in levels for way in ("up", "down")),
    )
    table.columns[0].justify = "left"
    for encoding in dict.fromkeys(row.encoding for row in rows):
        shares = [
            f"{share:.1%}"
            for row in rows
            if row.encoding == encoding
            for share in (row.up_share, row.down_share)
        ]
        table.add_row(encoding, *shares)
    return table
