"""`tessera-bench footprint`: memory of a training process, disk of an environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import add_families, chosen_families
from benchmarks.report.progress import progress
from benchmarks.report.tables import make_table, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.training.footprint import DiskRow, FootprintRow

FOOTPRINT_FAMILIES = ("mlp", "cnn", "vit-small")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "footprint",
        _measure,
        help="memory of a training process and disk of a device's environment",
        description=(
            "Peak resident memory (VmHWM) of a fresh process that trains the full model for 20 "
            "steps of 32 samples on one thread: on the onnx backend, which imports only the SDK, "
            "numpy and onnxruntime, and on torch. Then the disk that tessera-fl[onnx] and "
            "tessera-fl[torch] take: sizes of the files in the RECORD of every distribution they "
            "require, as installed in the environment that runs this, pip and setuptools not "
            "counted. MB are 10⁶ bytes. Takes about a minute; --quick half of it."
        ),
        example="footprint --quick --json footprint.json",
        quick="one process of each kind, not 3",
    )
    add_families(parser, FOOTPRINT_FAMILIES)


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.report.imports import MEASURABLE
    from benchmarks.training.footprint import (
        DISK_METHOD,
        MEMORY_METHOD,
        FootprintConfig,
        footprint_figures,
        measure_disk,
        measure_memory,
    )
    from benchmarks.training.process import BACKENDS

    families = chosen_families(arguments, FOOTPRINT_FAMILIES)
    config = FootprintConfig(reps=1 if arguments.quick else 3)

    memory: list[FootprintRow] = []
    if MEASURABLE:
        with progress("memory", len(families) * (config.reps + 1)) as part:
            memory = measure_memory(families, config, part)
    disk: list[DiskRow] = []
    with progress("disk", len(BACKENDS)) as part:
        for extra in BACKENDS:
            tick = part(extra)
            disk.append(measure_disk(extra))
            tick()

    return Measured(
        figures=footprint_figures(memory, disk),
        shown=[*([_memory_table(memory)] if memory else []), _disk_table(disk)],
        packages=("torch", "onnxruntime", "numpy"),
        config=asdict(config),
        data={
            "method": {"memory": MEMORY_METHOD, "disk": DISK_METHOD},
            "memory": [asdict(row) for row in memory],
            "disk": [asdict(row) for row in disk],
        },
    )


def _memory_table(rows: Sequence[FootprintRow]) -> Table:
    return table_of(
        "Memory of a fresh process that trains the full model",
        rows,
        ("family", lambda row: row.family),
        ("backend", lambda row: row.backend),
        ("imported MB", lambda row: f"{row.imported_mb:.1f}"),
        ("peak MB", lambda row: f"{row.peak_mb:.1f}"),
    )


def _disk_table(rows: Sequence[DiskRow]) -> Table:
    table = make_table("Disk of a device's environment", "extra", "MB", "largest")
    table.columns[2].justify = "left"
    for row in rows:
        largest = list(row.distributions.items())[:3]
        table.add_row(
            row.extra,
            f"{row.size_mb:.1f}",
            ", ".join(f"{name} {size:.0f}" for name, size in largest),
        )
    return table
