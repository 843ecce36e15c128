"""The file of finished runs: a line of JSON each, so that a table can be run in parts.

A line belongs to a cell only as long as the cell has the settings that the line was run with: a
line of other settings is left in the file, and neither shown nor counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.record import append_line, read_lines
from benchmarks.studies.papers.cell import CellOutcome, CellPlace, Outcomes, PaperCell, PaperTable


def read_outcomes(paths: Iterable[Path]) -> list[CellOutcome]:
    """Read all lines of some files; a file that does not exist has none. Raises `UsageError`."""
    return [each for path in paths for each in read_lines(path, _parse)]


def append_outcome(path: Path, outcome: CellOutcome) -> None:
    """Add a finished run to a file."""
    append_line(path, outcome.plain())


def outcomes_of(
    table: PaperTable, found: Iterable[CellOutcome], *, quick: bool = False
) -> dict[CellPlace, list[CellOutcome]]:
    """Return the runs of a table's cells as they are now; of two of a seed, the later counts."""
    cells = {each.place: each for each in (table.quick_cells() if quick else table.cells)}
    kept: dict[CellPlace, dict[int, CellOutcome]] = {}
    for each in found:
        cell = cells.get(each.place)
        if each.table == table.name and cell is not None and fits(cell, each):
            kept.setdefault(each.place, {})[each.seed] = each
    return {
        place: [kept[place][seed] for seed in sorted(kept[place])]
        for place in cells
        if place in kept
    }


def fits(cell: PaperCell, outcome: CellOutcome) -> bool:
    """Return True if a run had the settings that its cell has now."""
    return bool(plain(cell.settings) == plain(outcome.settings))


def plain(settings: Mapping[str, Any]) -> Any:
    """Return settings as they come back from JSON."""
    return json.loads(json.dumps(settings))


def open_runs(
    table: PaperTable, done: Outcomes, seeds: int, *, quick: bool = False
) -> list[tuple[PaperCell, int]]:
    """Return the runs that are still to do: all cells with the first seed, then the next seed."""
    cells = table.quick_cells() if quick else table.cells
    return [
        (cell, seed)
        for seed in range(seeds)
        for cell in cells
        if not cell.missing and seed not in {each.seed for each in done.get(cell.place, ())}
    ]


def _parse(fields: dict[str, Any]) -> CellOutcome:
    return CellOutcome(**{**fields, "place": CellPlace(*fields["place"])})
