"""`tessera-bench aggregate`: the coordinator's cost of closing a round, and bytes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import make_table, or_dash

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
    table = make_table(
        f"Taking in {rows[0].received_mb:.0f} MB of movements ({rows[0].plan} parameters, "
        f"{threads} threads), and numpy.copyto of them",
        *("rule", "memory", "copyto\nGB/s", "rule\nGB/s", "rule ÷\ncopyto", "with\ncommit"),
        *("CPU s", "commit\ns", "longest\ns"),
    )
    table.columns[0].justify = "left"
    for row in rows:
        commits = (row.over_copy_with_commit, row.commit_s, row.longest_commit_s)
        ratio, usual, longest = (None,) * 3 if row.dtype is None else commits
        table.add_row(
            row.rule,
            row.dtype or "–",
            f"{row.copy_gb_s:.2f}",
            f"{row.move_gb_s:.2f}",
            f"{row.over_copy:.3f}",
            or_dash(ratio),
            f"{row.move_cpu_s:.2f}",
            or_dash(usual),
            or_dash(longest),
        )
    return table


def _closes_table(rows: Sequence[ClosesRow]) -> Table:
    table = make_table(
        f"Memory over idle (model and memory open) while rounds of uploads close; "
        f"the model has {rows[0].model_mb:.0f} MB",
        *("rule", "memory", "movements", "received\nMB", "anonymous\nMB", "in\nmodels"),
        *("mapped\nMB", "receive\ns", "close\ns", "close\nCPU s", "commit\ns"),
    )
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(
            row.rule,
            row.dtype or "–",
            row.encoding,
            *(f"{size:.0f}" for size in (row.received_mb, row.anonymous_mb)),
            f"{row.over_model:.2f}",
            f"{row.mapped_mb:.0f}",
            *(f"{each:.2f}" for each in (row.receive_s, row.close_s, row.close_cpu_s)),
            f"{row.commit_s:.2f}",
        )
    return table


def _scale_table(rows: Sequence[ScaleRow]) -> Table:
    table = make_table(
        "A round of ram-fed by registered devices, each remembered in full on disk",
        *("devices", "disk\nMB", "rule\nms", "commit\nms", "round\nms", "ratio"),
        *("anonymous\nMB", "ratio"),
    )
    for row in rows:
        table.add_row(
            f"{row.devices:,}",
            f"{row.disk_mb:.0f}",
            f"{row.move_ms:.1f}",
            f"{row.commit_ms:.1f}",
            f"{row.round_ms:.1f}",
            f"{row.time_ratio:.3f}",
            f"{row.anonymous_mb:.1f}",
            f"{row.memory_ratio:.3f}",
        )
    return table


def _members_table(rows: Sequence[MembersRow], participants: int) -> Table:
    table = make_table(
        f"A round without training by members, of which {participants} take part",
        *("members", "there", "machine\nms", "ratio", "process\nms", "ratio"),
    )
    for row in rows:
        table.add_row(
            f"{row.members:,}",
            f"{row.members if row.there else participants:,}",
            f"{row.machine_ms:.2f}",
            f"{row.machine_ratio:.3f}",
            f"{row.process_ms:.2f}",
            f"{row.process_ratio:.3f}",
        )
    return table


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
