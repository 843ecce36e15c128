"""Plots of finished runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.report.drawing import MARKERS, PALETTE, panels, save, share_legend
from benchmarks.studies.papers.cell import CellOutcome, CellPlace, Outcomes, PaperTable


def save_curves(
    table: PaperTable,
    done: Outcomes,
    path: Path,
    *,
    against: int = 0,
    label: str = "round",
    line: Callable[[CellPlace], str] = lambda place: place.row,
    panel: Callable[[CellPlace], str] = lambda place: ", ".join(filter(None, place[::2])),
) -> None:
    """Draw accuracy against round (`against` 0) or simulated seconds (1), means over seeds.

    `panel` and `line` name the panel and the line of a cell.
    """
    shown = [cell.place for cell in table.cells if done.get(cell.place)]
    titles = list(dict.fromkeys(map(panel, shown)))
    lines = list(dict.fromkeys(map(line, shown)))
    figure, axes = panels(len(titles))
    for axis, title in zip(axes, titles, strict=True):
        for place in shown:
            if panel(place) == title:
                number = lines.index(line(place))
                points = _mean_curve(done[place])
                axis.plot(
                    [each[against] for each in points],
                    [each[2] for each in points],
                    label=line(place),
                    color=PALETTE[number % len(PALETTE)],
                    linestyle="-" if number < len(PALETTE) else "--",
                    linewidth=1.2,
                )
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(label)
        axis.set_ylabel("test accuracy, %")
        axis.grid(alpha=0.3)
    share_legend(figure, axes)
    save(figure, path)


def save_scatter(
    table: PaperTable,
    done: Outcomes,
    path: Path,
    *,
    x: tuple[str, str],
    y: tuple[str, str],
) -> None:
    """Draw a point for each cell, by two of its values (name, words); its colour is accuracy."""
    columns = list(dict.fromkeys(place.column for place in done))
    rows = list(dict.fromkeys(cell.place.row for cell in table.cells))
    figure, axes = panels(len(columns), columns=2, wide=5.2, high=3.4)
    for axis, column in zip(axes, columns, strict=True):
        places = [place for place in done if place.column == column]
        shares = [_mean(done[place], "last") for place in places]
        for place in places:
            axis.scatter(
                _mean(done[place], x[0]),
                _mean(done[place], y[0]),
                c=[_mean(done[place], "last")],
                vmin=min(shares),
                vmax=max(shares),
                cmap="viridis",
                marker=MARKERS[rows.index(place.row) % len(MARKERS)],
                s=50,
                label=place.row,
            )
        figure.colorbar(axis.collections[0], ax=axis, label="accuracy, %")
        axis.set_title(column, fontsize=9)
        axis.set_xlabel(x[1])
        axis.set_ylabel(y[1])
        axis.grid(alpha=0.3)
    share_legend(figure, axes)
    save(figure, path)


def save_by_value(
    table: PaperTable,
    done: Outcomes,
    path: Path,
    *,
    value: str = "last",
    words: str = "test accuracy, %",
) -> None:
    """Draw a line for each row, over the columns, which stand for a quantity that grows."""
    columns = list(dict.fromkeys(cell.place.column for cell in table.cells))
    figure, (axis,) = panels(1)
    for number, row in enumerate(dict.fromkeys(cell.place.row for cell in table.cells)):
        places = [place for place in done if place.row == row]
        if places:
            axis.plot(
                [columns.index(place.column) for place in places],
                [_mean(done[place], value) for place in places],
                marker=MARKERS[number % len(MARKERS)],
                color=PALETTE[number % len(PALETTE)],
                label=row,
            )
    axis.set_xticks(range(len(columns)), columns)
    axis.set_ylabel(words)
    axis.grid(alpha=0.3)
    share_legend(figure, [axis])
    save(figure, path)


def save_grids(grids: Mapping[str, Sequence[str]], path: Path, *, x: str, y: str) -> None:
    """Draw a panel for each grid: rows of `0` and `1`, a dark point for each `1`."""
    figure, axes = panels(len(grids))
    for axis, (title, rows) in zip(axes, grids.items(), strict=True):
        marks = [[int(each) for each in row] for row in rows]
        axis.imshow(marks, aspect="auto", cmap="Greys", interpolation="nearest", vmin=0, vmax=1)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
    save(figure, path)


def _mean(runs: Sequence[CellOutcome], name: str) -> float:
    return fmean([each.values[name] for each in runs if name in each.values] or [float("nan")])


def _mean_curve(runs: Sequence[CellOutcome]) -> list[tuple[float, ...]]:
    """Return the mean of curves point by point, as far as the shortest goes."""
    return [
        tuple(fmean(each) for each in zip(*points, strict=True))
        for points in zip(*(each.curve for each in runs), strict=False)
    ]
