"""The papers' terms over a whole run."""

from __future__ import annotations

from typing import Any

from coordinator.rounds.report import RunTerms, run_terms


def line(round: int, coverage: int, blocks: int, regions: int | None, age: int | None) -> Any:
    found = {
        "round": round,
        "trained_coverage_min": coverage,
        "trained_blocks": blocks,
        "trained_regions": regions,
        "oldest_memory": age,
    }
    return {key: value for key, value in found.items() if key != "trained_regions" or value}


def test_terms_are_the_least_coverage_and_regions_and_the_oldest_memory() -> None:
    lines = [line(1, 3, 20, 8, None), line(2, 2, 12, 6, 4), line(3, 5, 16, 7, 1)]
    terms = run_terms(lines)
    assert terms == RunTerms(coverage=2, blocks=12, regions=6, staleness=4)
    assert str(terms) == (
        "least coverage of a trained block 2 (Γ*), least trained in a round 6 regions, "
        "12 blocks (S*), oldest memory 4 rounds (τ)"
    )
    assert str(run_terms([])) == ""


def test_round_in_which_nobody_trains_has_no_coverage_but_no_regions_either() -> None:
    terms = run_terms([line(1, 3, 20, 8, 0), {**line(2, 0, 0, 1, 1), "trained_regions": 0}])
    assert terms == RunTerms(coverage=3, blocks=0, regions=0, staleness=1)


def test_rounds_that_were_undone_do_not_count() -> None:
    lines = [
        line(1, 3, 20, 8, 0),
        line(2, 1, 4, 2, 9),
        {"rolled_back": {"from": 2, "to": 1}},
        {"forgotten": {"device": "a"}},
        line(2, 2, 12, 6, 1),
    ]
    assert run_terms(lines) == RunTerms(coverage=2, blocks=12, regions=6, staleness=1)


def test_lines_of_an_older_version_have_no_regions() -> None:
    assert run_terms([line(1, 3, 20, None, None)]) == RunTerms(coverage=3, blocks=20)
