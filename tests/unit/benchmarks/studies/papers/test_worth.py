"""A week of a fleet: every way makes a run, and the table says what it took."""

from __future__ import annotations

import pytest

from benchmarks.fleet.config import make_study
from benchmarks.studies.papers.cell import CellOutcome, CellPlace, PaperCell
from benchmarks.studies.papers.tables.worth import (
    NOBODY,
    OWN_KEYS,
    PHONES,
    TABLES,
    WAYS,
    run_week,
    show_week,
    week_population,
)

TABLE = TABLES[0]


@pytest.mark.parametrize("cell", TABLE.cells, ids=lambda cell: "-".join(cell.place))
def test_every_way_makes_a_run_without_running_it(cell: PaperCell) -> None:
    settings = {key: value for key, value in cell.settings.items() if key not in OWN_KEYS}
    make_study({**settings, "run.learning_rate": 0.1})
    devices = len(week_population(cell.settings))
    assert devices == (30 if cell.place.part == PHONES else 100)


def test_week_without_training_drains_few_phones() -> None:
    cell = TABLE.cell(CellPlace(PHONES, NOBODY, ""))
    assert cell is not None
    values = run_week(cell, 0, None).values
    assert set(values) == {"low", "empty"}
    assert values["empty"] == 0
    assert values["low"] < 10


def test_table_has_a_line_for_each_way_that_was_run() -> None:
    way = next(iter(WAYS))
    place = CellPlace(PHONES, way, "")
    values = {"accuracy": 91.25, "level": 50.0, "hours": 168.4, "low": 3.0, "empty": 1.0}
    runs = [
        CellOutcome(table="worth", place=place, seed=seed, settings={}, values=values)
        for seed in (0, 1)
    ]
    shown = show_week(TABLE, {place: runs})
    assert shown.count("\n| ") == 3
    assert f"| {way} | 91.2 ± 0.0 | 50 | 168 | – | – | – | 3.0 | 1.0 |" in shown
