"""`tessera-bench plot`: accuracy against rounds, simulated hours, joules and bytes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from benchmarks.report.command import Measured, add_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from benchmarks.fleet.sweep.curves import SeedCurve, XAxis, YAxis
    from benchmarks.fleet.sweep.rows import SweepRow

QUICK_SIZE = 0.6
"""Size of a plot with `--quick`, over the usual one."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "plot",
        _measure,
        help="draw the results of sweeps and simulated fleets",
        description=(
            "Draws accuracy or loss along rounds, simulated hours, joules and bytes; cases that "
            "differ in their seed alone are one line, the mean, with a band from the lowest to the "
            "highest seed. Reads the folder of a sweep, its rows.jsonl or rows.parquet, and files "
            "of `tessera-bench fleet --population … --json`."
        ),
        example="plot sweep-results --x hours --by rule.name --out accuracy.svg",
        quick="a smaller picture",
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE|DIR", help="the results")
    parser.add_argument(
        "--x",
        choices=("rounds", "hours", "joules", "bytes"),
        help="along what (default: a panel for each)",
    )
    parser.add_argument(
        "--y", choices=("accuracy", "loss"), default="accuracy", help="what (default accuracy)"
    )
    parser.add_argument(
        "--by",
        action="append",
        metavar="KEY",
        help="one line for each value of this setting (default: of all that vary); repeatable",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("plot.png"),
        metavar="FILE",
        help="the picture: .png, .svg or .pdf (default plot.png)",
    )


def _measure(arguments: argparse.Namespace) -> Measured:
    from benchmarks.fleet.sweep.curves import XAxis, curves_of, read_results
    from benchmarks.report.drawing import check_plot, save
    from benchmarks.report.figures import Figure
    from benchmarks.report.options import UsageError

    check_plot(arguments.out, "--out")
    rows: list[SweepRow] = [row for path in arguments.results for row in read_results(path)]
    axes: Sequence[XAxis] = get_args(XAxis) if arguments.x is None else (arguments.x,)
    drawn = {x: curves_of(rows, x, arguments.y, arguments.by) for x in axes}
    if not any(drawn.values()):
        raise UsageError(f"no row has a number for {arguments.y}: was anything trained?")
    count = max(map(len, drawn.values()))
    save(draw_curves(drawn, arguments.y, QUICK_SIZE if arguments.quick else 1.0), arguments.out)
    return Measured(
        figures=[Figure("plot.curves", count, "curves", better="higher")],
        shown=[f"{arguments.out}: {count} curves"],
        packages=("matplotlib", "numpy"),
        config={
            "results": [str(path) for path in arguments.results],
            "x": list(axes),
            "y": arguments.y,
            "by": arguments.by,
        },
        data={"curves": {x: [each.plain() for each in curves] for x, curves in drawn.items()}},
    )


def draw_curves(drawn: dict[XAxis, list[SeedCurve]], y: YAxis, size: float = 1.0) -> Drawing:
    """Draw a panel for each axis; every line has a band from its lowest to its highest seed."""
    from matplotlib.ticker import MaxNLocator

    from benchmarks.report.drawing import PALETTE, panels, share_legend

    figure, all_axes = panels(len(drawn), columns=2, wide=4.8 * size, high=3.2 * size)
    labels = list(dict.fromkeys(each.label for curves in drawn.values() for each in curves))
    for axes, (x, curves) in zip(all_axes, drawn.items(), strict=True):
        unit, words = _unit(x, curves)
        for curve in curves:
            colour = PALETTE[labels.index(curve.label) % len(PALETTE)]
            style = ("-", "--", ":", "-.")[labels.index(curve.label) // len(PALETTE) % 4]
            at, label = curve.x / unit, _legend(curve)
            axes.plot(at, curve.mean, style, color=colour, label=label, linewidth=1.4)
            if curve.seeds > 1:
                axes.fill_between(at, curve.low, curve.high, color=colour, alpha=0.18, lw=0)
        axes.set_xlabel(words)
        if x == "rounds":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel("accuracy" if y == "accuracy" else "training loss")
        axes.grid(alpha=0.3)
        if y == "accuracy":
            axes.set_ylim(0, 1)
    share_legend(figure, all_axes)
    return figure


def _unit(x: XAxis, curves: Sequence[SeedCurve]) -> tuple[float, str]:
    """Return the unit in which an axis has handy numbers, and words for the axis."""
    from benchmarks.fleet.sweep.curves import X_AXES

    words, most = X_AXES[x][0], max((float(each.x[-1]) for each in curves), default=0.0)
    if x in ("joules", "bytes"):
        for unit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if most >= 2 * unit:
                return unit, prefix + words
    return 1.0, words


def _legend(curve: SeedCurve) -> str:
    if curve.seeds == 1:
        return curve.label
    return f"{curve.label} ({curve.seeds} seeds: mean, lowest to highest)"
