"""Boards side by side as a picture: time and energy of the same cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.device.report.comparison import UNITS, BoardComparison, BoardCost, shown_scale
from benchmarks.report.drawing import (
    PALETTE,
    bars_by_level,
    panels,
    points_by_level,
    save,
    set_title,
    share_legend,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 30
"""Ratio between numbers of a panel from which all panels have a logarithmic axis."""
BoardCosts = dict[float, dict[str, BoardCost]]
"""Costs by level and board."""


def write_comparison_plot(comparison: BoardComparison, path: Path) -> None:
    """Draw a row for each family and backend: seconds and, if known, joules. Raises `OSError`."""
    names = [
        name + (" (modelled)" * (results.provenance == "modelled"))
        for name, results in zip(comparison.names, comparison.boards, strict=True)
    ]
    colours = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    shown: dict[tuple[str, str, bool], BoardCosts] = {}
    with_joules = any(line.joules is not None for line in comparison.lines)
    for line in comparison.lines:
        for energy in (False, True) if with_joules else (False,):
            costs = shown.setdefault((line.family, line.backend, energy), {})
            cost = line.joules if energy else line.seconds
            if cost is not None:
                shown_cost = replace(cost, value=cost.value * shown_scale(comparison.work))
                costs.setdefault(line.level, {})[names[line.board - 1]] = shown_cost
    far = any(map(_far_apart, shown.values()))
    figure, axes = panels(len(shown), columns=2 if with_joules else 1, wide=5.0)
    for ((family, backend, energy), costs), axis in zip(shown.items(), axes, strict=True):
        _draw(axis, costs, names, colours, far)
        unit = ("gross " if energy else "") + UNITS[comparison.work][energy]
        axis.set(title=f"{family}, {backend}", xlabel="level", ylabel=unit)
    modelled = any(
        cost.modelled
        for costs in shown.values()
        for by_name in costs.values()
        for cost in by_name.values()
    )
    mark = "hollow" if far else "hatched"
    set_title(figure, "Boards side by side", f"{mark}: modelled" if modelled else "measured")
    share_legend(figure, axes)
    save(figure, path)


def _far_apart(costs: BoardCosts) -> bool:
    values = [cost.value for by_name in costs.values() for cost in by_name.values() if cost.value]
    return bool(values) and max(values) / min(values) > FAR


def _draw(
    axis: Axes, costs: BoardCosts, names: list[str], colours: dict[str, str], far: bool
) -> None:
    """Draw points if numbers are `far` apart, otherwise bars from 0."""

    def bar(cost: BoardCost, x: float, width: float, colour: str) -> None:
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
    elif far:
        values = {
            level: {name: cost.value for name, cost in by_name.items() if cost.value}
            for level, by_name in costs.items()
        }
        hollow = {
            name for by_name in costs.values() for name, cost in by_name.items() if cost.modelled
        }
        points_by_level(axis, values, names, colours, hollow)
    else:
        bars_by_level(axis, costs, names, colours, bar)
