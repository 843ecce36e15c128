"""The outcome of a sweep as a table and figures: one line for cases that differ in seed alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.fleet.sweep.curves import grouped
from benchmarks.fleet.sweep.rows import FAILED, FINISHED, SweepRow
from benchmarks.report.figures import Figure
from benchmarks.report.tables import table_of

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class SweepLine:
    """Ends of cases that differ in seed alone; None: nothing of the kind was measured."""

    label: str
    seeds: int
    failed: int
    accuracy: float | None
    """Accuracy of the whole model in the test, as the mean over seeds."""
    low: float | None
    high: float | None
    hours: float | None
    joules: float | None
    bytes: float | None


def sweep_lines(rows: Sequence[SweepRow]) -> list[SweepLine]:
    """Return a line for every label, of the cases that came to an end."""
    found = []
    for label, cases in grouped(rows).items():
        ends = [case[-1] for case in cases if case[-1]["state"] == FINISHED]
        failed = sum(case[-1]["state"] == FAILED for case in cases)
        tested = [row["test_100"] for row in ends if row.get("test_100") is not None]
        if not ends and not failed:
            continue
        found.append(
            SweepLine(
                label,
                len(ends),
                failed,
                fmean(tested) if tested else None,
                min(tested, default=None),
                max(tested, default=None),
                fmean(row["time_s"] / 3600 for row in ends) if ends else None,
                fmean(row["joules"] for row in ends) if ends else None,
                fmean(row["bytes_down"] + row["bytes_up"] for row in ends) if ends else None,
            )
        )
    return found


def sweep_table(lines: Sequence[SweepLine]) -> Table:
    """Show the lines to a person."""

    def accuracy(line: SweepLine) -> str:
        if line.accuracy is None or line.low is None or line.high is None:
            return "–"
        more = f" ({line.low:.1%} to {line.high:.1%})" if line.seeds > 1 else ""
        return f"{line.accuracy:.1%}{more}"

    def number(value: float | None, scale: float) -> str:
        return "–" if value is None else f"{value / scale:,.2f}"

    return table_of(
        "Accuracy of the whole model in the test: mean (lowest to highest) over seeds",
        lines,
        ("case", lambda line: line.label),
        ("seeds", lambda line: f"{line.seeds}" + (f", {line.failed} failed" * bool(line.failed))),
        ("accuracy", accuracy),
        ("hours", lambda line: number(line.hours, 1)),
        ("kJ", lambda line: number(line.joules, 1e3)),
        ("GB", lambda line: number(line.bytes, 1e9)),
        texts=1,
    )


def sweep_figures(lines: Sequence[SweepLine]) -> list[Figure]:
    """Return the accuracy and the hours of every line, and the number of failed cases."""
    figures = [Figure("sweep.failed", sum(line.failed for line in lines), "cases")]
    for number, line in enumerate(lines, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", line.label.lower()).strip("-") or "all"
        name = f"sweep.{number}-{slug}"
        if line.accuracy is not None:
            figures.append(Figure(f"{name}.accuracy", line.accuracy, "×", better="higher"))
        if line.hours is not None:
            figures.append(Figure(f"{name}.hours", line.hours, "h"))
    return figures
