"""Runs side by side: settings that differ, accuracies, and what they cost.

Accuracies at equal cost are those of the newest rounds by which no run had cost more than the
cheapest one did in all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.operate.results.record import COSTS, CostName, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#999933")
"""Colours that people with any kind of colour vision can tell apart (after Okabe and Ito)."""
LABELS: Mapping[CostName, str] = {
    "rounds": "rounds",
    "hours": "hours of rounds",
    "joules": "joules of all devices",
    "bytes": "bytes up and down",
}
NAMES: Mapping[CostName, str] = {
    "rounds": "rounds",
    "hours": "time",
    "joules": "joules",
    "bytes": "bytes",
}
HIDDEN = ("run.folder", "run.tensorboard", "task.source", "task.evaluation")
"""Settings that are places, and differ where nothing else does."""


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Return a short name for every run: its folder's, with as many parents as tell them apart."""
    parts = [each.folder.resolve().parts for each in records]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(each.folder) for each in records]


def differing(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the settings that differ, and each run's value; None: not set, or not known."""
    known = sorted({name for each in records for name in each.settings} - set(HIDDEN))
    values = {name: [each.settings.get(name) for each in records] for name in known}
    return {name: each for name, each in values.items() if any(one != each[0] for one in each)}


def total(record: RunRecord, cost: CostName) -> float | None:
    """Return what a run cost in all; None: not known."""
    last = record.last
    return None if last is None else last.spent(cost, len(record.costs))


def at_equal_cost(
    records: Sequence[RunRecord], cost: CostName
) -> tuple[float | None, list[float | None]]:
    """Return the cost that all runs reached, and each one's accuracy by then."""
    known = [total(each, cost) for each in records]
    if any(each is None for each in known):
        return None, [None] * len(records)
    least = min(each for each in known if each is not None)
    found = [each.within(cost, least) for each in records]
    return least, [None if each is None else each.accuracy for each in found]


def unknown_cost(records: Sequence[RunRecord], cost: CostName) -> str | None:
    """Tell which runs have no such cost in their history; None: all have."""
    names = zip(names_of(records), records, strict=True)
    without = [name for name, each in names if total(each, cost) is None]
    if not without:
        return None
    why = ": their devices measure none" if cost == "joules" else ""
    return f"{LABELS[cost]} are not known of {', '.join(without)}{why}"


def compare(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the comparison as JSON values."""
    equal = {}
    for cost in COSTS:
        least, accuracies = at_equal_cost(records, cost)
        equal[cost] = {"cost": least, "accuracies": accuracies}
    return {
        "runs": [
            {"name": name, **summary(each)}
            for name, each in zip(names_of(records), records, strict=True)
        ],
        "settings": differing(records),
        "equal_cost": equal,
    }


def summary(record: RunRecord) -> dict[str, Any]:
    """Return a run in a few numbers; all keys are always there."""
    best, last = record.best, record.last
    return {
        "folder": str(record.folder),
        "task": record.about.task,
        "run": record.about.run,
        "state": record.state,
        "rounds": len(record.costs),
        "round": 0 if last is None else last.round,
        "best": None if best is None else {"round": best.round, "accuracy": best.accuracy},
        "accuracy": None if last is None else last.accuracy,
        "hours": None if last is None else last.hours,
        "joules": None if last is None else last.joules,
        "bytes": None if last is None else last.bytes,
        "trained": record.trained,
        "skips": dict(record.skips.most_common()),
        "changed": record.changed,
    }


def table(records: Sequence[RunRecord]) -> list[list[str]]:
    """Return the comparison as rows of words, the first of which names the runs."""
    rows = [["", *names_of(records)]]

    def add(name: str, words: Sequence[str]) -> None:
        rows.append([name, *words])

    for name, values in differing(records).items():
        add(name, ["–" if each is None else _value(each) for each in values])
    found = [summary(each) for each in records]
    add("task", [each["task"] for each in found])
    add("state", [each["state"] for each in found])
    add("rounds", [str(each["rounds"]) for each in found])
    add("best accuracy", [_best(each["best"]) for each in found])
    add("last accuracy", [percent(each["accuracy"]) for each in found])
    for cost in COSTS:
        least, accuracies = at_equal_cost(records, cost)
        if least is not None:
            add(f"accuracy at {amount(least, cost)}", [percent(each) for each in accuracies])
    for cost in COSTS[1:]:
        add(NAMES[cost], [amount(total(each, cost), cost) for each in records])
    add("trainings", [str(each["trained"]) for each in found])
    add("skips", [_skips(each) for each in records])
    return rows


def _best(best: Mapping[str, Any] | None) -> str:
    return "–" if best is None else f"{percent(best['accuracy'])} (round {best['round']})"


def _skips(record: RunRecord) -> str:
    found = record.skips
    most = ", ".join(f"{kind} {count}" for kind, count in found.most_common(3))
    return f"{found.total()}" + (f": {most}" if most else "")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def percent(share: float | None) -> str:
    """Write a share; a dash if it is not known."""
    return "–" if share is None else f"{share:.2%}"


def amount(value: float | None, cost: CostName) -> str:
    """Write a cost with its unit; a dash if it is not known."""
    if value is None:
        return "–"
    if cost == "rounds":
        return f"{value:.0f} round{'s' * (value != 1)}"
    if cost == "hours":
        return f"{value:.2f} h" if value >= 0.1 else f"{value * 3600:.0f} s"
    unit = "J" if cost == "joules" else "B"
    size = min(max(int(math.log10(value) // 3), 0), 4) if value >= 1 else 0
    return f"{value / 1000**size:.{0 if not size else 1}f} {('', 'k', 'M', 'G', 'T')[size]}{unit}"


def lines_of(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows of words in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    found = []
    for row in rows:
        cells = [word.ljust(width) for word, width in zip(row, widths, strict=True)]
        found.append("  ".join(cells).rstrip())
    return found


def save_comparison(records: Sequence[RunRecord], path: Path, against: CostName) -> None:
    """Plot the accuracy of every run against a cost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes: Axes = figure.subplots()
    for number, (name, record) in enumerate(zip(names_of(records), records, strict=True)):
        points = [
            (spent, 100 * each.accuracy)
            for count, each in enumerate(record.costs, 1)
            if (spent := each.spent(against, count)) is not None and each.accuracy is not None
        ]
        axes.plot(
            [spent for spent, _ in points],
            [right for _, right in points],
            marker="o",
            markersize=3,
            color=PALETTE[number % len(PALETTE)],
            linestyle="-" if number < len(PALETTE) else "--",
            label=name if points else f"{name} (not known)",
        )
    axes.set_xlabel(LABELS[against])
    axes.set_ylabel("accuracy of the level to deploy, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
