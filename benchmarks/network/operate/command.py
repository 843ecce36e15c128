"""`tessera-bench operate`: the cost of the page, of metrics and of `status`."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

LEAST, MOST = 10, 100_000


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "operate",
        _measure,
        help="the cost of the operator's page, of metrics and of status",
        description=(
            "Serves the page of a run with 2,000 devices, of which 5 % answer in a second, and "
            "then all: the CPU that one viewer costs, who gets an update every second, and that "
            "of one status, devices and /metrics. Takes about four minutes; --quick under one."
        ),
        example="operate --quick --json operate.json",
        quick="shorter measurements, once each",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="number of devices (2000)")


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict, replace

    from benchmarks.network.operate.measure import (
        FULL,
        METHOD,
        QUICK,
        measure_operate,
        operate_figures,
    )

    config = QUICK if arguments.quick else FULL
    if arguments.devices is not None:
        if not LEAST <= arguments.devices <= MOST:
            raise UsageError(f"--devices {arguments.devices}: from {LEAST} to {MOST}")
        config = replace(config, devices=arguments.devices)
    with progress("operate", 2 * config.repeats + 1) as part:
        rows = measure_operate(config, part)
    return Measured(
        figures=operate_figures(config, rows),
        shown=[
            table_of(
                f"One viewer of {config.devices} devices",
                rows.watched,
                ("devices that\nchange a second", lambda row: str(row.changing)),
                ("without it\n% of a core", lambda row: f"{row.alone_percent:.2f}"),
                ("with it\n% of a core", lambda row: f"{row.watched_percent:.2f}"),
                ("it costs\n% of a core", lambda row: f"{row.cost_percent:.2f}"),
                ("kB/s", lambda row: f"{row.kb_per_s:.0f}"),
            ),
            table_of(
                "One question",
                rows.questions,
                ("", lambda row: row.name),
                ("CPU ms", lambda row: f"{row.cpu_ms:.1f}"),
                ("kB", lambda row: f"{row.kb:.0f}"),
            ),
        ],
        packages=("starlette", "uvicorn", "prometheus-client"),
        config=asdict(config),
        data={
            "method": METHOD,
            "watched": [{**asdict(row), "cost_percent": row.cost_percent} for row in rows.watched],
            "questions": [asdict(row) for row in rows.questions],
        },
    )
