"""`tessera-bench step`: one training step at each level, and the cost of importing the SDK."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report.command import Measured, add_command
from benchmarks.report.options import add_families, chosen_families
from benchmarks.report.progress import progress
from benchmarks.report.tables import or_dash, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.report.imports import ImportRow
    from benchmarks.training.step import StepRow

QUICK_FAMILIES = ("mlp", "mlp-2048", "cnn", "separable-cnn", "vit-small")
STEP_FAMILIES = (
    *("mlp", "mlp-2048", "cnn", "cnn-5x5", "separable-cnn", "mobilenet", "resnet18-gn"),
    *("vit-small", "vit-subdismo", "lenet-28", "lenet-32", "text", "sensor-cnn"),
)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "step",
        _measure,
        help="one training step at each level, and the cost of importing the SDK",
        description=(
            "CPU time of one training step of the torch backend at 100, 75, 50 and 25 % of every "
            "width (or of the blocks in a chain: --regions), against the full model, against the "
            "share of multiply-accumulates (MACs), and beside zero-masking: the full model with "
            "weights and gradients multiplied by 0 or 1; and the onnx backend's, with the same "
            "jobs; convolutions in the ways that a device's calibration finds to be the fastest. "
            "Variants take turns within the run. Then memory and CPU time of `import edge_sdk` in "
            "fresh interpreters. Takes a quarter of an hour; --quick under a minute."
        ),
        example="step --quick --families cnn --json step.json",
        quick="fewer and shorter turns, more noise",
    )
    add_families(parser, STEP_FAMILIES, QUICK_FAMILIES)
    parser.add_argument(
        "--batch", type=int, default=64, help="samples a step (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="a backend's threads (default %(default)s)"
    )
    parser.add_argument(
        "--regions",
        choices=["width", "depth", "both"],
        default="width",
        help="parts that levels leave out: of widths, whole residual blocks of a family that has "
        "them in chains (vit-small, vit-subdismo, resnet18-gn), or both (default %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "fp16"],
        default="fp32",
        help="that of the onnx backend's products (default %(default)s)",
    )
    parser.add_argument(
        "--reps", type=int, metavar="N", help="turns of each variant (default 15, quick 3)"
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from dataclasses import asdict

    from benchmarks.report import imports
    from benchmarks.training.step import StepConfig, keep_freed_memory, measure_family, step_figures

    families = chosen_families(arguments, STEP_FAMILIES, QUICK_FAMILIES)
    config = StepConfig(
        batch=arguments.batch,
        threads=arguments.threads,
        reps=arguments.reps if arguments.reps is not None else 3 if arguments.quick else 15,
        burst_s=0.05 if arguments.quick else 0.2,
        family_s=4.0 if arguments.quick else 90.0,
        tuning_s=3.0 if arguments.quick else 20.0,
        regions=arguments.regions,
        precision=arguments.precision,
    )
    import_reps = min(config.reps, 6) if arguments.quick else 2 * config.reps

    kept = keep_freed_memory()
    rows: list[StepRow] = []
    with progress("step", len(families) * (config.reps + 1)) as part:
        for name in families:
            rows += measure_family(name, config, part(name))
    import_rows: list[ImportRow] = []
    if imports.MEASURABLE:
        with progress("import", import_reps + 1) as part:
            import_rows = imports.measure_imports(import_reps, part("edge_sdk"))

    figures = step_figures(rows)
    shown = [
        _step_table(name, config.batch, [row for row in rows if row.family == name])
        for name in families
    ]
    if import_rows:
        figures += imports.import_figures(import_rows)
        shown.append(_import_table(import_rows))
    return Measured(
        figures=figures,
        shown=shown,
        packages=("torch", "onnxruntime", "onnx", "numpy"),
        config={**asdict(config), "import_reps": import_reps, "freed_memory_kept": kept},
        data={
            "rows": [asdict(row) for row in rows],
            "imports": [asdict(row) for row in import_rows],
        },
    )


def _step_table(name: str, batch: int, rows: Sequence[StepRow]) -> Table:
    return table_of(
        f"{name}: CPU time of a step of {batch} samples, and its ratio to the full model's",
        rows,
        ("level", lambda row: f"{row.level:.0%}"),
        ("params", lambda row: f"{row.parameter_share:.1%}"),
        ("MACs", lambda row: f"{row.macs_ratio:.3f}"),
        ("step\nms", lambda row: f"{row.step_ms:.2f}"),
        ("ratio", lambda row: f"{row.ratio:.3f}"),
        ("÷\nMACs", lambda row: f"{row.over_macs:.2f}"),
        ("zero\nmask", lambda row: or_dash(row.zero_mask_ratio)),
        ("rescaled", lambda row: or_dash(row.rescaled_ratio)),
        ("onnx\nms", lambda row: f"{row.onnx_ms:.2f}"),
        ("onnx ÷\ntorch", lambda row: f"{row.onnx_over_torch:.3f}"),
    )


def _import_table(rows: Sequence[ImportRow]) -> Table:
    return table_of(
        "Import in a fresh interpreter, one BLAS thread",
        rows,
        ("statement", lambda row: row.statement),
        ("peak MB", lambda row: f"{row.rss_mb:.1f}"),
        ("CPU ms", lambda row: f"{row.cpu_ms:.1f}"),
        ("÷ numpy", lambda row: f"{row.cpu_ratio:.2f}"),
        texts=1,
    )
