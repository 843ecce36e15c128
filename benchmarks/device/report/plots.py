"""Results as pictures: time, energy, memory and bytes by level, predictions, accuracy.

A plot without data is not drawn, and `why_not` says why. Blue is onnx, orange is torch, darker
means more threads; everything shown by colour is also in the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.device.report.lines import (
    families,
    foretold,
    how,
    is_modelled,
    no_accuracy,
    no_joules,
    one_per_level,
)
from benchmarks.device.results import Case, Curve, Results
from benchmarks.report.drawing import (
    MARKERS,
    PALETTE,
    bars_by_level,
    log_axis,
    panels,
    points_by_level,
    save,
    set_title,
    shade,
    share_legend,
)
from benchmarks.report.sheet import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND = 0.2
"""Predictions within this share of the measurement count as good."""
_RAMPS = {"onnx": ("#b3d1ea", "#0b3c6f"), "torch": ("#fbcf9d", "#a63a00")}


def write_plots(results: Results, folder: Path) -> dict[str, Path]:
    """Draw the plots that have data; returns the PNG files by name. Raises `OSError`."""
    paths = {}
    for name, (draw, _) in PLOTS.items():
        if why_not(results, name) is None:
            paths[name] = folder / f"{name}.png"
            draw(results, paths[name])
    return paths


def why_not(results: Results, name: str) -> str | None:
    """Explain why there is nothing to draw; None: there is."""
    return PLOTS[name][1](results)


def _draw_time(results: Results, path: Path) -> None:
    def draw(axes: Axes, cases: Sequence[Case]) -> None:
        def bar(case: Case, x: float, width: float, colour: str) -> None:
            spread = case.round_s
            axes.bar(x, spread.median, width, color=colour)
            if spread.p90 > spread.median:
                above = [[0.0], [spread.p90 - spread.median]]
                axes.errorbar(
                    x, spread.median, above, fmt="none", color="0.25", capsize=2, linewidth=0.8
                )

        bars_by_level(axes, _by_level(cases), _keys(results), _colours(results), bar)

    whiskers = any(case.round_s.p90 > case.round_s.median for case in results.cases)
    figure = _draw_families(
        *(results, draw, "s/round"),
        title=f"time of a round (median{', whisker to p90' if whiskers else ''})",
        modelled=[is_modelled(case.round_s) for case in results.cases],
    )
    save(figure, path)


def _draw_energy(results: Results, path: Path) -> None:
    known = replace(results, cases=tuple(case for case in results.cases if _joules_known(case)))
    joules = [case.joules for case in known.cases if case.joules is not None]
    with_net = any(each.net is not None for each in joules)
    words = "outline: gross, filled: net of idle" if with_net else "gross"

    def draw(axes: Axes, cases: Sequence[Case]) -> None:
        def bar(case: Case, x: float, width: float, colour: str) -> None:
            if case.joules is None:
                return
            gross, net = case.joules.gross, case.joules.net
            if gross is not None:
                inside = "white" if with_net else colour
                axes.bar(x, gross, width, color=inside, edgecolor=colour, linewidth=1.1)
            if net is not None:
                axes.bar(x, net, width, color=colour, edgecolor=colour, linewidth=1.1)

        bars_by_level(axes, _by_level(cases), _keys(results), _colours(results), bar)

    figure = _draw_families(
        *(known, draw, "J/round"),
        title=f"energy of a round ({words})",
        modelled=[is_modelled(each) for each in joules],
    )
    save(figure, path)


def _draw_memory(results: Results, path: Path) -> None:
    def draw(axes: Axes, cases: Sequence[Case]) -> None:
        def bar(case: Case, x: float, width: float, colour: str) -> None:
            peak, grown = case.peak_bytes.value, case.grown_bytes.value
            axes.bar(x, peak / 1e6, width, color=colour)
            if case.predicted is not None:
                predicted = (peak - grown + case.predicted.grown_bytes) / 1e6
                axes.hlines(
                    *(predicted, x - width / 2, x + width / 2), colors="black", linewidth=1.6
                )

        bars_by_level(axes, _by_level(cases), _keys(results), _colours(results), bar)

    predicted = any(case.predicted for case in results.cases)
    figure = _draw_families(
        *(results, draw, "peak, MB"),
        title=f"memory of the process{' (line: predicted)' if predicted else ''}",
        modelled=[is_modelled(case.peak_bytes) for case in results.cases],
    )
    save(figure, path)


def _draw_bytes(results: Results, path: Path) -> None:
    cases = list(one_per_level(results))
    encodings = list(dict.fromkeys(each.encoding for case in cases for each in case.bytes))
    names = list(dict.fromkeys(case.family for case in cases))
    figure, axes = panels(len(names))
    colours = {each: PALETTE[index % len(PALETTE)] for index, each in enumerate(encodings)}
    for name, axis in zip(names, axes, strict=True):
        by_level = {
            case.level: {each.encoding: each.up / 1e3 for each in case.bytes if each.up}
            for case in cases
            if case.family == name
        }
        points_by_level(axis, by_level, encodings, colours)
        axis.set(title=name, xlabel="level", ylabel="kB up in a round")
    modelled = [is_modelled(each) for case in cases for each in case.bytes]
    counted = "" if any(modelled) else ", counted"
    _title(figure, results, f"what is sent in a round, by encoding{counted}", modelled)
    share_legend(figure, axes)
    save(figure, path)


def _draw_predicted(results: Results, path: Path) -> None:
    cases = foretold(results)
    points: dict[str, list[tuple[str, float, float]]] = {
        "seconds of training": [
            (case.family, case.train_s.median, case.predicted.seconds)
            for case in cases
            if case.predicted is not None and case.train_s is not None
        ],
        "MB that a round adds": [
            (case.family, case.grown_bytes.value / 1e6, case.predicted.grown_bytes / 1e6)
            for case in cases
            if case.predicted is not None
        ],
        "J of a round, net": [
            (case.family, case.joules.net, case.predicted.joules)
            for case in cases
            if case.joules is not None and case.joules.net is not None
            if case.predicted is not None and case.predicted.joules is not None
        ],
    }
    positive = {
        what: [each for each in found if min(each[1:]) > 0] for what, found in points.items()
    }
    shown = {what: found for what, found in positive.items() if found}
    figure, axes = panels(len(shown), high=3.4)
    for (what, found), axis in zip(shown.items(), axes, strict=True):
        _draw_ratios(axis, found, list(families(results)))
        axis.set(title=what, xlabel="measured", ylabel="predicted ÷ measured")
    _title(figure, results, f"predicted against measured (grey: within {BAND:.0%})", [])
    share_legend(figure, axes)
    save(figure, path)


def _draw_ratios(
    axis: Axes, points: Sequence[tuple[str, float, float]], names: Sequence[str]
) -> None:
    for index, name in enumerate(names):
        found = [(measured, said) for family, measured, said in points if family == name]
        if found:
            axis.scatter(
                [measured for measured, _ in found],
                [said / measured for measured, said in found],
                label=name,
                s=26,
                alpha=0.8,
                linewidths=0,
                marker=MARKERS[index % len(MARKERS)],
                color=PALETTE[index % len(PALETTE)],
            )
    axis.axhline(1, color="0.3", linewidth=0.8, zorder=0)
    axis.axhspan(1 - BAND, 1 + BAND, color="0.92", zorder=-1, linewidth=0)
    ratios = [said / measured for _, measured, said in points]
    axis.set_ylim(
        min(0.45, *(each / 1.1 for each in ratios)), max(2.2, *(1.1 * each for each in ratios))
    )
    log_axis(axis, "x")
    log_axis(axis, "y")


def _draw_accuracy(results: Results, path: Path) -> None:
    by_family: dict[str, list[Curve]] = {}
    for curve in sorted(results.curves, key=lambda curve: curve.level):
        if curve.points:
            by_family.setdefault(curve.family, []).append(curve)
    levels = sorted({curve.level for curves in by_family.values() for curve in curves})
    figure, axes = panels(len(by_family), wide=4.6, high=3.6)
    for (name, curves), axis in zip(by_family.items(), axes, strict=True):
        joules = all(point.joules is not None for curve in curves for point in curve.points)
        for curve in curves:
            at = levels.index(curve.level)
            axis.plot(
                [(point.joules if joules else point.seconds) or 0.0 for point in curve.points],
                [100 * point.accuracy for point in curve.points],
                label=percent(curve.level),
                markersize=3.5,
                markevery=max(1, len(curve.points) // 12),
                linewidth=1.4,
                color=shade("#9fb8d8", "#0b2545", at, len(levels)),
                marker=MARKERS[at % len(MARKERS)],
            )
        modelled = _mark(
            [
                (curve.joules_provenance if joules else curve.provenance) == "modelled"
                for curve in curves
            ]
        )
        unit = "J" if joules else "s (joules are not known)"
        axis.set(title=f"{name} on {curves[0].data}", ylabel="accuracy, %")
        axis.set_xlabel(f"spent in training{modelled}, {unit}")
        axis.grid(alpha=0.3)
    _title(figure, results, "accuracy against what it costs, by level", [])
    share_legend(figure, axes)
    save(figure, path)


def _draw_families(
    results: Results,
    draw: Callable[[Axes, Sequence[Case]], None],
    unit: str,
    *,
    title: str,
    modelled: Sequence[bool],
) -> Figure:
    by_family = families(results)
    figure, axes = panels(len(by_family))
    for (name, cases), axis in zip(by_family.items(), axes, strict=True):
        draw(axis, cases)
        axis.set(title=name, xlabel="level", ylabel=unit)
    _title(figure, results, title, modelled)
    share_legend(figure, axes)
    return figure


def _title(figure: Figure, results: Results, what: str, modelled: Sequence[bool]) -> None:
    set_title(figure, results.title, what + _mark(modelled))


def _mark(modelled: Sequence[bool]) -> str:
    return "" if not any(modelled) else ", modelled" if all(modelled) else ", partly modelled"


def _by_level(cases: Sequence[Case]) -> dict[float, dict[str, Case]]:
    found: dict[float, dict[str, Case]] = {}
    for case in cases:
        found.setdefault(case.level, {})[how(case)] = case
    return found


def _keys(results: Results) -> list[str]:
    """Return backends and threads, in one order for all panels."""
    cases = sorted(results.cases, key=lambda case: (case.backend, case.threads))
    return list(dict.fromkeys(how(case) for case in cases))


def _colours(results: Results) -> dict[str, str]:
    colours = {}
    for backend, (light, dark) in _RAMPS.items():
        threads = sorted({case.threads for case in results.cases if case.backend == backend})
        for at, count in enumerate(threads):
            colours[f"{backend} × {count}"] = shade(light, dark, at, len(threads))
    return colours


def _no_cases(results: Results) -> str | None:
    return None if results.cases else "no case was measured"


def _no_joules(results: Results) -> str | None:
    if any(map(_joules_known, results.cases)):
        return None
    return f"no joules are known: {no_joules(results)}"


def _joules_known(case: Case) -> bool:
    return case.joules is not None and not (case.joules.gross is None and case.joules.net is None)


def _no_bytes(results: Results) -> str | None:
    return None if any(case.bytes for case in results.cases) else "no bytes were counted"


def _no_predictions(results: Results) -> str | None:
    return None if foretold(results) else "nothing was both predicted and measured"


def _no_curves(results: Results) -> str | None:
    return None if any(curve.points for curve in results.curves) else no_accuracy(results)


PLOTS: dict[str, tuple[Callable[[Results, Path], None], Callable[[Results], str | None]]] = {
    "time": (_draw_time, _no_cases),
    "energy": (_draw_energy, _no_joules),
    "memory": (_draw_memory, _no_cases),
    "bytes": (_draw_bytes, _no_bytes),
    "predicted": (_draw_predicted, _no_predictions),
    "accuracy": (_draw_accuracy, _no_curves),
}
"""For each plot, the function that draws it, and one that says why it is missing."""
