"""The study of memory: rates by validation, differences by seed, aims by the numbers."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.studies.papers.cell import CellOutcome, CellPlace
from benchmarks.studies.papers.tables.memory import (
    ADAPTIVE,
    MEMORY,
    RA_FED,
    aims,
    best_rate,
    gains,
    run_memory_cell,
    show,
)

PART = "2 of 10 devices, L"
UNDAMPED = "ram-fed, ρ = 1"


def outcome(rule: str, rate: str, seed: int, last: float, validation: float = 0.0) -> CellOutcome:
    return CellOutcome(
        table="memory",
        place=CellPlace(PART, rule, rate),
        seed=seed,
        settings={},
        values={"last": last, "validation": validation},
    )


def runs(rule: str, rate: str, *lasts: float, validation: float = 0.0) -> list[CellOutcome]:
    return [outcome(rule, rate, seed, last, validation) for seed, last in enumerate(lasts)]


def test_rate_is_chosen_on_validation_data_and_not_by_the_test() -> None:
    chosen = runs(RA_FED, "rate 0.1", 50.0, 52.0, validation=60.0)
    tempting = runs(RA_FED, "rate 0.2", 90.0, 92.0, validation=40.0)
    assert best_rate({"rate 0.1": chosen, "rate 0.2": tempting, "rate 0.05": ()}) == "rate 0.1"
    assert best_rate({"rate 0.1": ()}) is None


def test_differences_are_of_the_same_seed() -> None:
    base = runs(RA_FED, "rate 0.1", 50.0, 60.0)
    assert gains([outcome(ADAPTIVE, "rate 0.1", 1, 61.0)], base) == [1.0]
    assert gains([outcome(ADAPTIVE, "rate 0.1", 7, 61.0)], base) == []


def test_aims_say_what_is_below_and_what_keeps_too_little_of_a_gain() -> None:
    found = [
        *(runs(RA_FED, "rate 0.05", 50.0, 52.0), runs(UNDAMPED, "rate 0.05", 60.0, 62.0)),
        *(runs(ADAPTIVE, "rate 0.05", 59.0, 61.0), runs(RA_FED, "rate 0.1", 50.0, 52.0)),
        *(runs(UNDAMPED, "rate 0.1", 20.0, 22.0), runs(ADAPTIVE, "rate 0.1", 48.0, 50.0)),
        *(runs(RA_FED, "rate 0.2", 30.0, 31.0), runs(UNDAMPED, "rate 0.2", 34.0, 35.0)),
        runs(ADAPTIVE, "rate 0.2", 33.0, 34.0),
    ]
    text = aims({each[0].place: each for each in found})
    assert f"in 1 of 3 settings and rates ({PART}, rate 0.1). At 2 of them" in text
    assert f"gain at 1 ({PART}, rate 0.2, where ra-fed has 30.5 ± 0.7 %)." in text


def test_cell_runs_and_reports_trust_and_both_accuracies() -> None:
    quick = next(cell for cell in MEMORY.quick_cells() if cell.place.row == ADAPTIVE)
    small = {"data.name": "digits", "data.samples": 400, "data.alpha": 1.0, "run.rounds": 6}
    cell = replace(quick, settings={**quick.settings, **small})
    ran = run_memory_cell(cell, 0, None)
    assert ran.values.keys() == {"trust", "alone", "ratio", "validation", "last"}
    assert 0 <= ran.values["trust"] <= 1
    base = runs(RA_FED, quick.place.column, ran.values["last"] - 1)
    run = outcome(ADAPTIVE, quick.place.column, 0, ran.values["last"])
    sheets = show(MEMORY, {base[0].place: base, quick.place: [run]})
    assert f"| {PART} | " in sheets
    assert "| +1.0 " in sheets
