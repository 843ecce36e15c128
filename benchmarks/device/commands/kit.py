"""`tessera-bench kit`: the files needed to measure boards without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import add_families, chosen_families, count, level_words, levels
from benchmarks.report.progress import progress
from edge_sdk.protocol.plan import LEVELS

KIT_FAMILIES = ("mlp", "cnn", "sensor-cnn", "text", "vit-small")
QUICK_FAMILIES = ("mlp", "cnn", "sensor-cnn")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "kit",
        _measure,
        help="compile models here, for `device --kit` on boards without torch",
        description=(
            "Compiles model families with torch into a folder. Copy it to a board with only "
            "tessera-fl[measure] (onnxruntime, no torch), and run `tessera-bench device --kit DIR` "
            "there. Takes half a minute."
        ),
        example="kit --out kit && scp -r kit pi@board:",
        quick=f"only {', '.join(QUICK_FAMILIES)}",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder; replaces a kit there"
    )
    add_families(parser, KIT_FAMILIES, QUICK_FAMILIES)
    parser.add_argument(
        "--levels",
        type=levels,
        default=LEVELS,
        metavar="L,M",
        help=f"shares of every width (default {level_words(LEVELS)})",
    )
    parser.add_argument(
        "--batch", type=count, default=32, help="samples per step (default %(default)s)"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.device.kit import write_kit
    from benchmarks.report.figures import Figure

    families = chosen_families(arguments, KIT_FAMILIES, QUICK_FAMILIES)
    with progress("kit", len(families)) as part:
        kit = write_kit(
            arguments.out, families, levels=arguments.levels, batch=arguments.batch, begin=part
        )
    files = [path for path in arguments.out.rglob("*") if path.is_file()]
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    return Measured(
        figures=[Figure("kit.size", size_mb, "MB")],
        shown=[
            f"{arguments.out}: {', '.join(kit.families)}; {size_mb:.1f} MB. On the board:",
            f"  tessera-bench device --kit {arguments.out.name}",
        ],
        packages=("torch", "onnx", "numpy"),
        data={"families": kit.families, "levels": kit.levels, "batch": kit.batch},
    )
