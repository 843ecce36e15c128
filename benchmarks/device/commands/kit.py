"""`tessera-bench kit`: the files needed to measure boards without torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.report.options import (
    add_common,
    check_families,
    check_writable,
    count,
    level_words,
    levels,
    names,
)
from benchmarks.report.progress import progress
from edge_sdk.protocol.plan import LEVELS

KIT_FAMILIES = ("mlp", "cnn", "sensor-cnn", "text", "vit-small")
QUICK_FAMILIES = ("mlp", "cnn", "sensor-cnn")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "kit",
        help="compile models here, for `device --kit` on boards without torch",
        description=(
            "Compiles model families with torch into a folder. Copy it to a board with only "
            "tessera-fl[measure] (onnxruntime, no torch), and run `tessera-bench device --kit DIR` "
            "there. Takes half a minute."
        ),
        epilog="example: tessera-bench kit --out kit && scp -r kit pi@board:",
    )
    add_common(parser, f"only {', '.join(QUICK_FAMILIES)}")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder; replaces a kit there"
    )
    parser.add_argument(
        "--families",
        type=names,
        metavar="A,B",
        help=f"models by name (default {','.join(KIT_FAMILIES)})",
    )
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
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from benchmarks.device.kit import write_kit
    from benchmarks.report.figures import Figure, environment, write_json

    families = arguments.families or (QUICK_FAMILIES if arguments.quick else KIT_FAMILIES)
    check_families(families)
    check_writable(arguments.json)
    with progress("kit", len(families)) as part:
        kit = write_kit(
            arguments.out, families, levels=arguments.levels, batch=arguments.batch, begin=part
        )
    files = [path for path in arguments.out.rglob("*") if path.is_file()]
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    console = Console(highlight=False)
    console.print(f"{arguments.out}: {', '.join(kit.families)}; {size_mb:.1f} MB. On the board:")
    console.print(f"  tessera-bench device --kit {arguments.out.name}")
    if arguments.json:
        data = {
            "command": "kit",
            "environment": environment("torch", "onnx", "numpy", "tessera-fl"),
            "families": list(kit.families),
            "levels": list(kit.levels),
            "batch": kit.batch,
        }
        write_json(arguments.json, [Figure("kit.size", size_mb, "MB")], data)
    return 0
