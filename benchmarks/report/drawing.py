"""Common parts of plots: panels, bars by level, one legend, colours that everybody can tell apart.

Plots are drawn without pyplot, so there is no window, no global state and nothing to close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from benchmarks.report.options import UsageError, check_writable
from benchmarks.report.sheet import percent, printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999933")
"""Colours that people with any kind of colour vision can tell apart (after Okabe and Ito)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")

PLOT_FORMATS = (".png", ".svg", ".pdf")

T = TypeVar("T")


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """Raise `UsageError` for a plot that cannot be written, before minutes are spent."""
    check_writable(path)
    if path is not None and path.suffix not in PLOT_FORMATS:
        raise UsageError(f"{option} must end in one of {', '.join(PLOT_FORMATS)}")


def panels(
    count: int, *, columns: int = 3, wide: float = 4.2, high: float = 2.9
) -> tuple[Figure, list[Axes]]:
    """Make a figure with this many panels of `wide` × `high` inches, `columns` per row."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = math.ceil(count / columns)
    size = (max(6.4, wide * columns), high * rows + 0.9)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for spare in grid[count:]:
        spare.remove()
    for axes in grid[:count]:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[:count])


def bars_by_level(
    axes: Axes,
    by_level: Mapping[float, Mapping[str, T]],
    keys: Sequence[str],
    colours: Mapping[str, str],
    bar: Callable[[T, float, float, str], object],
) -> None:
    """Draw `bar(what, x, width, colour)` for each key of each level, small levels first.

    `keys` gives the order within a level; a missing one leaves a gap. Everything drawn in this
    panel gets an entry in the legend.
    """
    levels = sorted(by_level)
    present = [key for key in keys if any(key in by_level[level] for level in levels)]
    width = 0.8 / len(present)
    for place, level in enumerate(levels):
        for index, key in enumerate(present):
            if key in by_level[level]:
                x = place + (index - (len(present) - 1) / 2) * width
                bar(by_level[level][key], x, width * 0.92, colours[key])
    for key in present:
        axes.bar(0, 0, 0, color=colours[key], label=key)
    _level_axis(axes, levels)


def points_by_level(
    axes: Axes,
    by_level: Mapping[float, Mapping[str, float]],
    keys: Sequence[str],
    colours: Mapping[str, str],
    hollow: Collection[str] = (),
) -> None:
    """Draw values above 0 that are powers of ten apart: a line with a point for each level.

    Bars would need a zero, which a logarithmic axis does not have. The keys in `hollow` get
    unfilled points.
    """
    levels = sorted(by_level)
    for index, key in enumerate(keys):
        found = [
            (place, by_level[level][key])
            for place, level in enumerate(levels)
            if key in by_level[level]
        ]
        if found:
            axes.plot(
                [place for place, _ in found],
                [value for _, value in found],
                label=key,
                color=colours[key],
                marker=MARKERS[index % len(MARKERS)],
                markerfacecolor="white" if key in hollow else colours[key],
                markersize=5,
                linewidth=1.0,
            )
    _level_axis(axes, levels)
    axes.set_xlim(-0.5, len(levels) - 0.5)
    log_axis(axes, "y")


def _level_axis(axes: Axes, levels: Sequence[float]) -> None:
    axes.set_xticks(range(len(levels)), [percent(level) for level in levels])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def log_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make this axis logarithmic, with plain numbers at a few ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    # Less than two powers of ten would leave an axis with one number, or none.
    between: tuple[float, ...] = (1.0, 2.0, 5.0) if low <= 0 or high / low < 100 else (1.0,)
    if which == "y" and 0 < low < high < 4 * low:
        between = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    axis.set_major_locator(LogLocator(subs=between))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def set_title(figure: Figure, device: str, what: str) -> None:
    """Write the device above and the subject below it."""
    figure.suptitle(f"{printable(device)}\n{what}", fontsize="large")


def share_legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Draw one legend below all panels, with each name once."""
    named: dict[str, Artist] = {}
    for each in axes:
        handles, names = each.get_legend_handles_labels()
        named.update(
            {name: named.get(name, handle) for name, handle in zip(names, handles, strict=True)}
        )
    if named:
        # Long names, as of boards, need room: about 90 characters fit a row.
        columns = max(1, min(6, 90 // (6 + max(map(len, named)))))
        figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )


def shade(light: str, dark: str, at: int, of: int) -> str:
    """Return colour `at` of `of` between two, as `#rrggbb`; the dark one if alone."""
    share = at / (of - 1) if of > 1 else 1.0
    pairs = [(int(light[i : i + 2], 16), int(dark[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(first + share * (last - first)):02x}" for first, last in pairs)


def save(figure: Figure, path: Path) -> None:
    """Write it in the format that the file's name ends in. Raises `OSError`.

    The same figure gives the same bytes, whenever it is written.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a `$` in a board's name is a dollar sign
    undated = {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": "tessera"}):
        figure.savefig(path, dpi=120, metadata=undated)
