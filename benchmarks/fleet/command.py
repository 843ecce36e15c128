"""`tessera-bench fleet`: training speed of a federation in one process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.fleet.speed import SpeedRow


def add_parser(commands: Any) -> None:
    """Add the command."""
    add_command(
        commands,
        "fleet",
        _measure,
        help="training steps per second of a fleet in one process, beside a bare torch loop",
        description=(
            "Trains an MLP 784-200-200-10 with 20 devices in one process, all at full and then all "
            "at quarter level, and beside it the same number of steps in a bare torch loop on a "
            "model of that width. Both run on one thread and take turns. The ratio is what a "
            "federation costs besides training. Takes a minute; --quick under half of one."
        ),
        example="fleet --quick --json fleet.json",
        quick="fewer turns, more noise",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.fleet.speed import METHOD, SpeedConfig, measure_speed, speed_figures

    config = SpeedConfig(turns=6) if arguments.quick else SpeedConfig()
    with progress("fleet", config.ticks) as part:
        rows = measure_speed(config, part)
    return Measured(
        figures=speed_figures(rows),
        shown=[_speed_table(rows)],
        packages=("torch", "onnxruntime", "numpy"),
        config=asdict(config),
        data={"method": METHOD, "rows": [asdict(row) for row in rows]},
    )


def _speed_table(rows: Sequence[SpeedRow]) -> Table:
    return table_of(
        "Device-steps per CPU second, one thread",
        rows,
        ("level", lambda row: f"{row.level:.0%}"),
        ("federation", lambda row: f"{row.steps_per_s:,.0f}"),
        ("bare torch", lambda row: f"{row.bare_steps_per_s:,.0f}"),
        ("ratio", lambda row: f"{row.ratio:.3f}"),
    )
