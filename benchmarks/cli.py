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

    from benchmarks.imports import ImportRow
    from benchmarks.step import StepRow

EXIT_INTERRUPTED = 130
STEP_FAMILIES = ("mlp", "mlp-2048", "cnn", "vit-small")


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
            "beside zero-masking: the full model with weights and gradients multiplied by 0 or 1. "
            "Variants take turns within the run. Then memory and CPU time of `import edge_sdk` in "
            "fresh interpreters. Takes a few minutes; --quick under one."
        ),
        epilog="example: tessera-bench step --quick --families cnn --json step.json",
    )
    step.add_argument("--quick", action="store_true", help="fewer and shorter turns, more noise")
    step.add_argument("--json", type=Path, metavar="FILE", help="write all rows and figures")
    step.add_argument(
        "--families",
        type=lambda text: tuple(text.split(",")),
        default=STEP_FAMILIES,
        metavar="A,B",
        help=f"which models, by name (default {','.join(STEP_FAMILIES)})",
    )
    step.add_argument("--batch", type=int, default=64, help="samples a step (default %(default)s)")
    step.add_argument(
        "--threads", type=int, default=1, help="torch's threads (default %(default)s)"
    )
    step.add_argument(
        "--reps", type=int, metavar="N", help="turns of each variant (default 15, quick 4)"
    )
    step.set_defaults(run=_step)
    return parser


def _step(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from rich.console import Console

    from benchmarks import imports
    from benchmarks.figures import environment, print_figures, write_json
    from benchmarks.models import FAMILIES
    from benchmarks.step import StepConfig, keep_freed_memory, measure_family, step_figures

    if unknown := [name for name in arguments.families if name not in FAMILIES]:
        raise UsageError(f"unknown family {unknown[0]!r}; known are {', '.join(FAMILIES)}")
    _check_writable(arguments.json)
    config = StepConfig(
        batch=arguments.batch,
        threads=arguments.threads,
        reps=arguments.reps if arguments.reps is not None else 4 if arguments.quick else 15,
        burst_s=0.06 if arguments.quick else 0.2,
    )
    import_reps = min(config.reps, 6) if arguments.quick else 2 * config.reps

    kept = keep_freed_memory()
    rows: list[StepRow] = []
    with _progress("step", len(arguments.families) * (config.reps + 1)) as part:
        for name in arguments.families:
            rows += measure_family(name, config, part(name))
    import_rows: list[ImportRow] = []
    if imports.MEASURABLE:
        with _progress("import", import_reps + 1) as part:
            import_rows = imports.measure_imports(import_reps, part("edge_sdk"))

    figures = step_figures(rows)
    console = Console()
    for name in arguments.families:
        console.print(_step_table(name, config.batch, [row for row in rows if row.family == name]))
    if import_rows:
        figures += imports.import_figures(import_rows)
        console.print(_import_table(import_rows))
    print_figures(figures, console)
    if arguments.json:
        data = {
            "command": "step",
            "environment": environment("torch", "numpy", "tessera-fl"),
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
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _step_table(name: str, batch: int, rows: Sequence[StepRow]) -> Table:
    table = _table(
        f"{name}: CPU time of a step of {batch} samples, and its ratio to the full model's",
        *("level", "params", "MACs", "step ms", "ratio", "÷ MACs", "zero-mask", "rescaled"),
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


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
