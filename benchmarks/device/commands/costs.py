"""`tessera-bench costs`: predicted against measured seconds and memory, at every level."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import UsageError, add_families, chosen_families
from benchmarks.report.progress import progress
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.device.costs.comparison import PredictionRow, TimeRow

QUICK_FAMILIES = ("mlp", "cnn", "text", "sensor-cnn")
COSTS_FAMILIES = (
    *("mlp", "mlp-2048", "lenet-28", "lenet-32", "cnn", "depthwise-cnn"),
    *("text", "sensor-cnn", "resnet-bn", "resnet-gn", "resnet18-gn", "vit-small"),
)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "costs",
        _measure,
        help="compare predicted with measured seconds and memory of a round, at every level",
        description=(
            "Compares the SDK's prediction for a round at 100, 75, 50 and 25 % of every width, "
            "from a calibration of a few seconds, with measurements: CPU seconds of training in "
            "the same process, and the peak growth of a fresh process in a whole round, with "
            "several rules and encodings. Linux only. Takes a few minutes; --quick, with four "
            "small models, under one."
        ),
        example="costs --families cnn,vit-small --json costs.json",
        quick="four small models, fewer memory cases",
    )
    add_families(parser, COSTS_FAMILIES, QUICK_FAMILIES)


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.device.costs.comparison import METHOD, CostsConfig, compare_costs, cost_figures
    from benchmarks.report.imports import MEASURABLE

    families = chosen_families(arguments, COSTS_FAMILIES, QUICK_FAMILIES)
    if not MEASURABLE:
        raise UsageError("peak memory cannot be measured here: this command needs Linux")
    config = CostsConfig(reps=3, burst_s=0.1, variants=False) if arguments.quick else CostsConfig()

    with progress("costs", len(families) * config.ticks) as part:
        times, memory = compare_costs(families, config, part)

    return Measured(
        figures=cost_figures(times, memory),
        shown=[_time_table(times, config.batch), _memory_table(memory)],
        packages=("onnxruntime", "numpy", "torch"),
        config=asdict(config),
        data={
            "method": METHOD,
            "times": [{**asdict(row), "error": row.error} for row in times],
            "memory": [{**asdict(row), "over": row.over} for row in memory],
        },
    )


def _time_table(rows: Sequence[TimeRow], batch: int) -> Table:
    return table_of(
        f"CPU time of a step of {batch} samples, predicted and measured",
        rows,
        ("family", lambda row: row.family),
        ("calibrated\nin s", lambda row: f"{row.calibration_s:.1f}"),
        ("level", lambda row: f"{row.level:.0%}"),
        ("predicted\nms", lambda row: f"{row.predicted_s / row.steps * 1e3:.2f}"),
        ("measured\nms", lambda row: f"{row.measured_s / row.steps * 1e3:.2f}"),
        ("ratio", lambda row: f"{row.predicted_s / row.measured_s:.2f}"),
        texts=1,
    )


def _memory_table(rows: Sequence[PredictionRow]) -> Table:
    return table_of(
        "Memory that a round takes, predicted and measured",
        rows,
        ("family", lambda row: row.family),
        ("level", lambda row: f"{row.level:.0%}"),
        ("rule", lambda row: row.rule),
        ("encoding", lambda row: row.encoding),
        ("after", lambda row: "–" if row.before is None else f"{row.before:.0%}"),
        ("predicted\nMB", lambda row: f"{row.predicted_bytes / 1e6:.1f}"),
        ("measured\nMB", lambda row: f"{row.grown_bytes / 1e6:.1f}"),
        ("ratio", lambda row: f"{row.over:.2f}" + (" under" if row.under else "")),
        texts=4,
    )
