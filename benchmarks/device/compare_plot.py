"""Boards side by side as a picture: time and energy of the same cases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.device.compare import Comparison, Cost
from benchmarks.device.drawing import (
    PALETTE,
    bars_by_level,
    log_axis,
    panels,
    save,
    set_title,
    share_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 30
"""Boards this many times apart are drawn on a logarithmic axis."""


def write_comparison_plot(comparison: Comparison, path: Path) -> None:
    """A row for each family and backend: seconds and, where known, joules. Raises `OSError`."""
    rows = list(dict.fromkeys((line.family, line.backend) for line in comparison.lines))
    with_joules = any(line.joules is not None for line in comparison.lines)
    columns = 2 if with_joules else 1
    figure, axes = panels(len(rows) * columns, columns=columns, wide=5.0)
    names = {
        board: f"{board} {results.title}" + (" (modelled)" * (results.provenance == "modelled"))
        for board, results in enumerate(comparison.boards, start=1)
    }
    colours = {name: PALETTE[(board - 1) % len(PALETTE)] for board, name in names.items()}
    for index, axis in enumerate(axes):
        family, backend = rows[index // columns]
        energy = index % columns == 1
        costs: dict[float, dict[str, Cost]] = {}
        for line in comparison.lines:
            cost = line.joules if energy else line.seconds
            if (line.family, line.backend) == (family, backend) and cost is not None:
                costs.setdefault(line.level, {})[names[line.board]] = cost
        _draw(axis, costs, list(names.values()), colours)
        axis.set(
            title=f"{family}, {backend}",
            xlabel="level",
            ylabel=f"{'gross J' if energy else 's'}/{comparison.work}",
        )
    modelled = any(
        cost is not None and cost.modelled
        for line in comparison.lines
        for cost in (line.seconds, line.joules)
    )
    set_title(figure, "Boards side by side", "hatched: modelled" if modelled else "measured")
    share_legend(figure, axes)
    save(figure, path)


def _draw(
    axis: Axes, costs: dict[float, dict[str, Cost]], names: list[str], colours: dict[str, str]
) -> None:
    def bar(cost: Cost, x: float, width: float, colour: str) -> None:
        axis.bar(
            x,
            cost.value,
            width,
            color=colour,
            edgecolor="white",
            linewidth=0,
            hatch="///" if cost.modelled else None,
        )

    if not costs:
        axis.text(0.5, 0.5, "not known", ha="center", va="center", transform=axis.transAxes)
        axis.set(xticks=[], yticks=[])
        return
    bars_by_level(axis, costs, names, colours, bar)
    values = [cost.value for by_name in costs.values() for cost in by_name.values()]
    if min(values) > 0 and max(values) / min(values) > FAR:
        log_axis(axis, "y")
