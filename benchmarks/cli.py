"""`tessera-bench`: the command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edge_sdk import TesseraError, __version__

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.aggregate.scale import ScaleRow
    from benchmarks.aggregate.throughput import ThroughputRow
    from benchmarks.aggregate.traffic import TrafficRow
    from benchmarks.footprint import DiskRow, MemoryRow
    from benchmarks.imports import ImportRow
    from benchmarks.step import StepRow

EXIT_INTERRUPTED = 130
QUICK_FAMILIES = ("mlp", "mlp-2048", "cnn", "vit-small")
STEP_FAMILIES = (*QUICK_FAMILIES, "lenet-28", "lenet-32", "text", "sensor-cnn")
FOOTPRINT_FAMILIES = ("mlp", "cnn", "vit-small")


class UsageError(TesseraError):
    """The command line asks for something that does not exist."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("tessera-bench: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except TesseraError as error:
        print(f"tessera-bench: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"tessera-bench: {error.name} is not installed; "
            "this command needs: pip install 'tessera-fl[bench]'",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        print(f"tessera-bench: {error}", file=sys.stderr)
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-bench",
        description="What federated learning costs a device, measured on this machine.",
        epilog=(
            "Every command prints tables and the targets that are not met, and exits 0 either way; "
            "--json writes the same as data. Compare ratios within a run, not seconds of two runs."
        ),
    )
    parser.add_argument("--version", action="version", version=f"tessera-fl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    step = commands.add_parser(
        "step",
        help="one training step at each level, and the cost of importing the SDK",
        description=(
            "CPU time of one training step of the torch backend at 100, 75, 50 and 25 % of every "
            "width, against the full model, against the share of multiply-accumulates (MACs), and "
            "beside zero-masking: the full model with weights and gradients multiplied by 0 or 1; "
            "and the onnx backend's, with the same jobs. "
            "Variants take turns within the run. Then memory and CPU time of `import edge_sdk` in "
            "fresh interpreters. Takes a few minutes; --quick under one."
        ),
        epilog="example: tessera-bench step --quick --families cnn --json step.json",
    )
    step.add_argument("--quick", action="store_true", help="fewer and shorter turns, more noise")
    step.add_argument("--json", type=Path, metavar="FILE", help="write all rows and figures")
    step.add_argument(
        "--families",
        type=_names,
        metavar="A,B",
        help=(
            f"which models, by name (default {','.join(STEP_FAMILIES)}; "
            f"quick {','.join(QUICK_FAMILIES)})"
        ),
    )
    step.add_argument("--batch", type=int, default=64, help="samples a step (default %(default)s)")
    step.add_argument(
        "--threads", type=int, default=1, help="a backend's threads (default %(default)s)"
    )
    step.add_argument(
        "--reps", type=int, metavar="N", help="turns of each variant (default 15, quick 3)"
    )
    step.set_defaults(run=_step)
    footprint = commands.add_parser(
        "footprint",
        help="memory of a training process and disk of a device's environment",
        description=(
            "Peak resident memory (VmHWM) of a fresh process that trains the full model for 20 "
            "steps of 32 samples on one thread: on the onnx backend, which imports only the SDK, "
            "numpy and onnxruntime, and on torch. Then the disk that tessera-fl[onnx] and "
            "tessera-fl[torch] take: sizes of the files in the RECORD of every distribution they "
            "require, as installed in the environment that runs this, pip and setuptools not "
            "counted. MB are 10⁶ bytes. Takes about a minute; --quick half of it."
        ),
        epilog="example: tessera-bench footprint --quick --json footprint.json",
    )
    footprint.add_argument("--quick", action="store_true", help="one process of each kind, not 3")
    footprint.add_argument("--json", type=Path, metavar="FILE", help="write all rows and figures")
    footprint.add_argument(
        "--families",
        type=_names,
        default=FOOTPRINT_FAMILIES,
        metavar="A,B",
        help=f"which models, by name (default {','.join(FOOTPRINT_FAMILIES)})",
    )
    footprint.set_defaults(run=_footprint)
    aggregate = commands.add_parser(
        "aggregate",
        help="what closing a round costs the coordinator, and bytes on the wire",
        description=(
            "How fast ra-fed and ram-fed (memory on disk, page cache warm) take in the movements "
            "of 32 devices at half level of a model of 25 million parameters, on two threads, "
            "beside numpy.copyto of the same bytes. Then time and anonymous memory of a round with "
            "100, 1,000 and 10,000 registered devices. Then bytes for a device and round, by level "
            "and encoding. Memories are made in the folder for temporary files (TMPDIR) and "
            "deleted. Takes a few minutes and asks for 11 GB of free disk; --quick, with 5 million "
            "parameters and up to 1,000 devices, under one and 3 GB."
        ),
        epilog="example: tessera-bench aggregate --quick --json aggregate.json",
    )
    aggregate.add_argument("--quick", action="store_true", help="smaller model, fewer devices")
    aggregate.add_argument("--json", type=Path, metavar="FILE", help="write all rows and figures")
    aggregate.set_defaults(run=_aggregate)
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


def _step(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks import imports
    from benchmarks.figures import environment, print_figures, write_json
    from benchmarks.step import StepConfig, keep_freed_memory, measure_family, step_figures

    families = arguments.families or (QUICK_FAMILIES if arguments.quick else STEP_FAMILIES)
    _check_families(families)
    _check_writable(arguments.json)
    config = StepConfig(
        batch=arguments.batch,
        threads=arguments.threads,
        reps=arguments.reps if arguments.reps is not None else 3 if arguments.quick else 15,
        burst_s=0.06 if arguments.quick else 0.2,
    )
    import_reps = min(config.reps, 6) if arguments.quick else 2 * config.reps

    kept = keep_freed_memory()
    rows: list[StepRow] = []
    with _progress("step", len(families) * (config.reps + 1)) as part:
        for name in families:
            rows += measure_family(name, config, part(name))
    import_rows: list[ImportRow] = []
    if imports.MEASURABLE:
        with _progress("import", import_reps + 1) as part:
            import_rows = imports.measure_imports(import_reps, part("edge_sdk"))

    figures = step_figures(rows)
    console = Console()
    for name in families:
        console.print(_step_table(name, config.batch, [row for row in rows if row.family == name]))
    if import_rows:
        figures += imports.import_figures(import_rows)
        console.print(_import_table(import_rows))
    print_figures(figures, console)
    if arguments.json:
        data = {
            "command": "step",
            "environment": environment("torch", "onnxruntime", "onnx", "numpy", "tessera-fl"),
            "config": {
                **asdict(config),
                "quick": arguments.quick,
                "import_reps": import_reps,
                "freed_memory_kept": kept,
            },
            "rows": [asdict(row) for row in rows],
            "imports": [asdict(row) for row in import_rows],
        }
        write_json(arguments.json, figures, data)
    return 0


def _footprint(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks.figures import environment, print_figures, write_json
    from benchmarks.footprint import (
        DISK_METHOD,
        MEMORY_METHOD,
        FootprintConfig,
        footprint_figures,
        measure_disk,
        measure_memory,
    )
    from benchmarks.imports import MEASURABLE
    from benchmarks.training_process import BACKENDS

    families = arguments.families
    _check_families(families)
    _check_writable(arguments.json)
    config = FootprintConfig(reps=1 if arguments.quick else 3)

    memory: list[MemoryRow] = []
    if MEASURABLE:
        with _progress("memory", len(families) * (config.reps + 1)) as part:
            memory = measure_memory(families, config, part)
    disk: list[DiskRow] = []
    with _progress("disk", len(BACKENDS)) as part:
        for extra in BACKENDS:
            tick = part(extra)
            disk.append(measure_disk(extra))
            tick()

    figures = footprint_figures(memory, disk)
    console = Console()
    if memory:
        console.print(_memory_table(memory))
    console.print(_disk_table(disk))
    print_figures(figures, console)
    if arguments.json:
        data = {
            "command": "footprint",
            "environment": environment("torch", "onnxruntime", "numpy", "tessera-fl"),
            "config": {**asdict(config), "quick": arguments.quick},
            "method": {"memory": MEMORY_METHOD, "disk": DISK_METHOD},
            "memory": [asdict(row) for row in memory],
            "disk": [asdict(row) for row in disk],
        }
        write_json(arguments.json, figures, data)
    return 0


def _aggregate(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict
    from tempfile import gettempdir

    from rich.console import Console

    from benchmarks.aggregate import config as configs
    from benchmarks.aggregate import scale, throughput, traffic
    from benchmarks.figures import environment, print_figures, write_json

    _check_writable(arguments.json)
    config = configs.QUICK if arguments.quick else configs.FULL
    configs.check_disk(Path(gettempdir()), config.disk_bytes)

    with _progress("aggregate", config.throughput.ticks) as part:
        rates = throughput.measure_throughput(config.throughput, part)
    fleets: list[ScaleRow] = []
    if scale.MEASURABLE:
        with _progress("devices", config.scale.ticks) as part:
            fleets = scale.measure_scale(config.scale, part)
    with _progress("bytes", len(traffic.encodings())) as part:
        messages = traffic.measure_traffic(config.traffic, part("by level and encoding"))

    figures = [
        *throughput.throughput_figures(rates),
        *scale.scale_figures(fleets),
        *traffic.traffic_figures(messages),
    ]
    console = Console()
    console.print(_throughput_table(rates, config.throughput.threads))
    if fleets:
        console.print(_scale_table(fleets))
    console.print(_traffic_table(messages))
    print_figures(figures, console)
    if arguments.json:
        data = {
            "command": "aggregate",
            "environment": environment("numpy", "zstandard", "tessera-fl"),
            "config": {**asdict(config), "quick": arguments.quick},
            "method": {
                "throughput": throughput.METHOD,
                "devices": scale.METHOD,
                "bytes": traffic.METHOD,
            },
            "throughput": [asdict(row) for row in rates],
            "devices": [asdict(row) for row in fleets],
            "bytes": [asdict(row) for row in messages],
        }
        write_json(arguments.json, figures, data)
    return 0


def _check_families(names: Sequence[str]) -> None:
    from benchmarks.models import FAMILIES

    if unknown := [name for name in names if name not in FAMILIES]:
        raise UsageError(f"unknown family {unknown[0]!r}; known are {', '.join(FAMILIES)}")


def _check_writable(path: Path | None) -> None:
    """Say so before the minutes are spent."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(f"cannot write {path}: name a file in a directory that exists")


@contextmanager
def _progress(what: str, ticks: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """A bar on a terminal's stderr, a line per part elsewhere.

    Yields a function that begins a named part and returns what to call at each of its ticks.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=ticks)

        def begin(name: str) -> Callable[[], None]:
            progress.update(task, description=f"{what} {name}")
            if not console.is_terminal:
                console.print(f"{what} {name} …", highlight=False)
            return lambda: progress.advance(task)

        yield begin


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    # Ten columns of numbers fit a terminal of 80, if nothing is spent on lines between them.
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _step_table(name: str, batch: int, rows: Sequence[StepRow]) -> Table:
    table = _table(
        f"{name}: CPU time of a step of {batch} samples, and its ratio to the full model's",
        *("level", "params", "MACs", "step\nms", "ratio", "÷\nMACs", "zero\nmask", "rescaled"),
        *("onnx\nms", "onnx ÷\ntorch"),
    )
    for row in rows:
        table.add_row(
            f"{row.level:.0%}",
            f"{row.parameter_share:.1%}",
            f"{row.macs_ratio:.3f}",
            f"{row.step_ms:.2f}",
            f"{row.ratio:.3f}",
            f"{row.over_macs:.2f}",
            _or_dash(row.zero_mask_ratio),
            _or_dash(row.rescaled_ratio),
            f"{row.onnx_ms:.2f}",
            f"{row.onnx_over_torch:.3f}",
        )
    return table


def _import_table(rows: Sequence[ImportRow]) -> Table:
    table = _table(
        "Import in a fresh interpreter, one BLAS thread",
        *("statement", "peak MB", "CPU ms", "÷ numpy"),
    )
    table.columns[0].justify = "left"
    for row in rows:
        table.add_row(
            row.statement, f"{row.rss_mb:.1f}", f"{row.cpu_ms:.1f}", f"{row.cpu_ratio:.2f}"
        )
    return table


def _memory_table(rows: Sequence[MemoryRow]) -> Table:
    table = _table(
        "Memory of a fresh process that trains the full model",
        *("family", "backend", "imported MB", "peak MB"),
    )
    for row in rows:
        table.add_row(row.family, row.backend, f"{row.imported_mb:.1f}", f"{row.peak_mb:.1f}")
    return table


def _disk_table(rows: Sequence[DiskRow]) -> Table:
    table = _table("Disk of a device's environment", "extra", "MB", "largest")
    table.columns[2].justify = "left"
    for row in rows:
        largest = list(row.distributions.items())[:3]
        table.add_row(
            row.extra,
            f"{row.size_mb:.1f}",
            ", ".join(f"{name} {size:.0f}" for name, size in largest),
        )
    return table


def _throughput_table(rows: Sequence[ThroughputRow], threads: int) -> Table:
    table = _table(
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
            _or_dash(ratio),
            f"{row.move_cpu_s:.2f}",
            _or_dash(usual),
            _or_dash(longest),
        )
    return table


def _scale_table(rows: Sequence[ScaleRow]) -> Table:
    table = _table(
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


def _traffic_table(rows: Sequence[TrafficRow]) -> Table:
    levels = list(dict.fromkeys(row.level for row in rows))
    table = _table(
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


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
