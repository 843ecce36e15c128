"""Entries: results of boards that their owners submitted, checked and lined up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.device.results import Case, Results, ResultsError, read_results
from benchmarks.device.validity import QUALITY, objections, reached
from benchmarks.report.sheet import Sheet, number, percent

MARKER = "<!-- tessera-bench boards -->"
NOBODY = "Nobody has submitted a result yet."


def read_entries(folder: Path) -> list[tuple[str, Results]]:
    """Read the results in a folder, by the name of their file.

    Raises `ResultsError` for one that is no entry, which names the file and says why.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        results = read_results(path)
        if why := objections(results):
            raise ResultsError(f"{path} is no entry: {'; '.join(why)}. Measure again, without it")
        found.append((path.stem, results))
    return found


def entries_sheets(entries: Sequence[tuple[str, Results]]) -> list[Sheet]:
    """Return a sheet of the boards, and one per family with a row for each board and level."""
    boards = Sheet(
        title="Boards",
        columns=("entry", "board", "cores", "memory\nMB", "power mode", "onnxruntime", "measured"),
        rows=tuple(
            (
                name,
                results.machine.model or "–",
                number(results.machine.cores),
                number((results.machine.memory_bytes or 0) / 1e6 or None),
                results.machine.power_mode or "–",
                results.machine.versions.get("onnxruntime", "–"),
                results.started[:10],
            )
            for name, results in entries
        ),
        texts=2,
    )
    families = dict.fromkeys(case.family for _, results in entries for case in results.cases)
    return [boards, *(_family_sheet(family, entries) for family in families)]


def _family_sheet(family: str, entries: Sequence[tuple[str, Results]]) -> Sheet:
    """Return the fastest way of each board to train a family, at each level."""
    rows = []
    for name, results in entries:
        for level in sorted({c.level for c in results.cases if c.family == family}, reverse=True):
            case = fastest(results, family, level)
            there = next(
                (
                    point
                    for curve in results.curves
                    if (curve.family, curve.level) == (family, level)
                    and (point := reached(curve)) is not None
                ),
                None,
            )
            joules = None if case.joules is None else case.joules.gross
            modelled = case.joules is not None and case.joules.provenance == "modelled"
            rows.append(
                (
                    name,
                    percent(level),
                    f"{case.backend} × {case.threads}",
                    number(case.round_s.median),
                    "–" if case.spread is None else f"{case.spread:.0%}",
                    number(joules, modelled=modelled),
                    number(case.peak_bytes.value / 1e6),
                    number(None if there is None else there.seconds),
                    number(None if there is None else there.joules, modelled=modelled),
                )
            )
    return Sheet(
        title=f"{family}: the fastest way of each board",
        columns=(
            *("entry", "level", "backend,\nthreads", "s/round", "±", "J/round", "peak MB"),
            *("s to\nthe goal", "J to\nthe goal"),
        ),
        rows=tuple(rows),
        texts=3,
    )


def fastest(results: Results, family: str, level: float) -> Case:
    """Return the case with the shortest round."""
    cases = [c for c in results.cases if (c.family, c.level) == (family, level)]
    return min(cases, key=lambda case: case.round_s.median)


def entries_page(entries: Sequence[tuple[str, Results]]) -> str:
    """Return the tables as Markdown; the same for the same entries."""
    if not entries:
        return NOBODY
    goals = ", ".join(f"{name} {percent(goal)}" for name, goal in QUALITY.items())
    parts = [f"Goals, by data set: {goals}. `~`: modelled from watts of a profile; `–`: not known."]
    for sheet in entries_sheets(entries):
        parts += [f"## {sheet.title}", sheet.markdown()]
    return "\n\n".join(parts)
