"""One plot: accuracy against the joules and against the bytes spent so far."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.studies.learn.run import StudyRun
from benchmarks.studies.learn.study import Spent, accuracy_at

COLOURS = {"ra-fed": "C0", "ram-fed": "C1", "ccfl-2": "C2", "fedavg": "C3"}
"""Colours of rules, the same in every plot; other rules take the following ones."""
PANELS: tuple[tuple[Spent, float, str], ...] = (
    ("joules", 1e3, "energy of training, all phones together, kJ (modelled)"),
    ("bytes", 1e6, "bytes down and up, all phones together, MB"),
)
STEPS = 200
SHOWN = 0.25
"""Range shown below the best accuracy; further down, all rules rise alike and steeply."""
FEW = 12
"""Rounds up to which a run is shown completely, with a mark for each: it does not rank rules."""


def save_plot(runs: Sequence[StudyRun], path: Path, title: str) -> None:
    """Draw means over seeds as lines and their ranges as bands; needs at least one run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(11, 4.6), layout="constrained")
    rules = list(dict.fromkeys(run.rule for run in runs))
    few = max(len(run.points) for run in runs) <= FEW  # the first point is before any round
    for axis, (what, unit, label) in zip(axes, PANELS, strict=True):
        for number, rule in enumerate(rules):
            grid, curves = curves_of([run for run in runs if run.rule == rule], what)
            colour = COLOURS.get(rule, f"C{4 + number}")
            axis.plot(grid / unit, 100 * curves.mean(axis=0), color=colour, label=rule)
            if few:
                for run in runs:
                    if run.rule == rule:
                        spent = [getattr(point, what) / unit for point in run.points]
                        right = [100 * point.accuracy for point in run.points]
                        axis.plot(spent, right, "o", color=colour, markersize=4)
            low, high = 100 * curves.min(axis=0), 100 * curves.max(axis=0)
            axis.fill_between(grid / unit, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    best = max(run.best for run in runs)
    lowest = 0.0 if few else max(0.0, best - SHOWN)
    axes[0].set_ylim(100 * lowest, min(100.0, 100 * best + 1))
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(loc="lower right")
    figure.suptitle(title, parse_math=False)  # a `$` in a folder's name is a dollar sign
    figure.savefig(path, dpi=120)
    plt.close(figure)


def curves_of(
    runs: Sequence[StudyRun], what: Spent
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return amounts spent, as far as all of a rule's runs went, and each run's accuracy there."""
    end = min(float(getattr(run.last, what)) for run in runs)
    grid = np.linspace(0.0, end, STEPS)
    return grid, np.array([[accuracy_at(run, spent, what) for spent in grid] for run in runs])
