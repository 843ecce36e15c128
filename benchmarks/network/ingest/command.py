"""`tessera-bench ingest`: many large movements that arrive at once."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "ingest",
        _measure,
        help="the coordinator's cost of many large movements that arrive at once",
        description=(
            "Lets 32 devices upload a movement of 20 MB each at the same time, over a real "
            "Mosquitto: the coordinator's CPU time for each megabyte until all are on its disk, "
            "and its largest anonymous memory. Needs Linux. Takes two minutes; --quick, with 16 "
            "devices, under one."
        ),
        example="ingest --quick --json ingest.json",
        quick="16 devices, once",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices (32; quick 16)")


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict, replace

    from benchmarks.network.ingest.measure import (
        FULL,
        METHOD,
        QUICK,
        ingest_figures,
        measure_ingest,
    )
    from benchmarks.network.stage.processes import MEASURABLE

    config = QUICK if arguments.quick else FULL
    if arguments.devices is not None:
        if arguments.devices < 1:
            raise UsageError("--devices must be at least 1")
        config = replace(config, devices=arguments.devices)
    if not MEASURABLE:
        raise UsageError("CPU and memory of programs are read from /proc, which is not here")
    with progress("ingest", config.repeats + 1) as part:
        rows = measure_ingest(config, part)
    return Measured(
        figures=ingest_figures(rows),
        shown=[
            table_of(
                f"{config.devices} movements of {rows[0].movement_mb:.0f} MB at once",
                rows,
                ("CPU\nms/MB", lambda row: f"{row.cpu_ms_per_mb:.2f}"),
                ("memory\nbefore, MB", lambda row: f"{row.before_mb:.0f}"),
                ("at most,\nMB", lambda row: f"{row.peak_mb:.0f}"),
                ("s", lambda row: f"{row.seconds:.1f}"),
            )
        ],
        packages=("numpy", "paho-mqtt", "msgpack"),
        config=asdict(config),
        data={
            "method": METHOD,
            "rows": [{**asdict(r), "cpu_ms_per_mb": r.cpu_ms_per_mb} for r in rows],
        },
    )
