"""The study of mixed levels: which runs it asks for, what it concludes, and one real run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from benchmarks.device.report.page import update_page
from benchmarks.report.options import UsageError
from benchmarks.studies.levels.fleets import FLEETS, WAYS
from benchmarks.studies.levels.page import BEGIN, render_tables
from benchmarks.studies.levels.record import append_outcome, read_record
from benchmarks.studies.levels.settings import SETTINGS, data_of
from benchmarks.studies.levels.study import Wanted, aims_of, standings, study_figures
from benchmarks.studies.levels.trial import Trial, TrialOutcome, budget_j, run_case

SETTING, FLEET = "har-cnn", "thirds"


def outcome(way: str, rate: float = 0.06, seed: int = 0, **accuracies: float) -> TrialOutcome:
    """An outcome whose levels 25 %, 50 %, 100 % have these accuracies: q, h, f."""
    scores = {
        name: accuracies.get(key, 0.0) for name, key in (("0.25", "q"), ("0.5", "h"), ("1", "f"))
    }
    return TrialOutcome(Trial(SETTING, FLEET, way, rate, seed), scores, scores, 10, 100.0, 1.0)


WANTED = Wanted(settings=(SETTING,), fleets=(FLEET,), ways=("all-full", "sandwich"), seeds=2)


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("devices", [10, 12, 30])
def test_fleet_has_as_many_devices_as_asked_and_a_strong_one(fleet: str, devices: int) -> None:
    levels = FLEETS[fleet].levels(devices)
    assert len(levels) == devices
    assert set(levels) == {1.0, 0.5, 0.25}
    if fleet == "one-full":
        assert levels.count(1.0) == 1


def test_alternatives_are_models_of_one_size() -> None:
    own = FLEETS["thirds"].levels(6)
    assert own == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert WAYS["all-smallest"].level_of(own) == [0.25] * 6
    assert WAYS["all-median"].level_of(own) == [0.5] * 4 + [None] * 2
    assert WAYS["only-strong"].level_of(own) == [1.0] * 2 + [None] * 4
    assert WAYS["all-full"].level_of(own) == [1.0] * 6
    assert WAYS["only-strong"].delivers(own) == (1.0,)


def test_rates_come_first_and_further_seeds_use_the_best() -> None:
    done: dict[Trial, TrialOutcome] = {}
    asked = []
    while (case := WANTED.next_case(done)) is not None:
        asked.append(case)
        done[case] = outcome(case.way, case.rate, case.seed, f=1 - abs(case.rate - 0.2))
    rates = list(SETTINGS[SETTING].rates)
    assert [(c.way, c.seed) for c in asked] == [
        *[("all-full", 0)] * 3,
        *[("sandwich", 0)] * 3,
        ("all-full", 1),
        ("sandwich", 1),
    ]
    assert sorted(c.rate for c in asked[:3]) == rates
    assert [c.rate for c in asked[6:]] == [0.2, 0.2]
    assert len(asked) == WANTED.count()


def test_standing_is_that_of_the_best_rate_and_level_and_aims_compare_it() -> None:
    outcomes = [
        outcome("all-full", f=0.9),
        outcome("all-smallest", q=0.7),
        outcome("all-median", h=0.8),
        outcome("only-strong", f=0.6),
        outcome("only-strong-momentum", f=0.79),
        outcome("all-full-momentum", f=0.7),
        outcome("all-smallest-momentum", q=0.6),
        outcome("all-median-momentum", h=0.7),
        outcome("growing", 0.02, f=0.5, h=0.5, q=0.5),
        outcome("growing", 0.06, f=0.80, h=0.88, q=0.75),
        outcome("growing", 0.06, 1, f=0.80, h=0.86, q=0.75),
    ]
    found = {each.way: each for each in standings(outcomes, SETTING, FLEET)}
    assert (found["growing"].rate, found["growing"].deploy) == (0.06, "0.5")
    assert found["growing"].accuracy == pytest.approx(87)
    assert found["growing"].seeds == 2
    assert found["all-smallest"].by_level == {"0.25": pytest.approx(70)}
    aims = aims_of(list(found.values()))
    assert aims.over == pytest.approx({"all-smallest": 17, "all-median": 7, "only-strong": 8})
    assert aims.under_full == pytest.approx(3)
    assert aims.smallest_over == pytest.approx(5)
    found["all-median-momentum"] = replace(found["all-median-momentum"], accuracy=84)
    assert aims_of(list(found.values())).over["all-median"] == pytest.approx(3)
    for missing in ("all-median-momentum", "all-full-momentum"):
        del found[missing]  # nothing to compare with fairly
    assert aims_of(list(found.values())).over["all-median"] is None
    assert aims_of(list(found.values())).under_full is None
    figures = {figure.name: figure.value for figure in study_figures(outcomes)}
    assert figures["levels.over_all_median"] == pytest.approx(7)
    assert figures["levels.smallest_over"] == pytest.approx(5)
    text = render_tables(outcomes)
    assert "| **growing** | 75.0 | 87.0 | 80.0 | 50 % | 87.0 (86.0–88.0) |" in text
    assert f"| har-cnn | 9 of {len(WAYS)}, 2 | – | – | – |" in text
    assert "Never run: coverage," in text


def test_record_goes_on_behind_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "levels.jsonl"
    assert read_record(path) == {}
    first, second = outcome("nested", f=0.5), outcome("sandwich", f=0.6)
    append_outcome(path, first)
    with path.open("a") as file:
        file.write('{"case": {"sett')
    assert list(read_record(path).values()) == [first]
    path.write_text('{"other": 1}\n{"other": 2}\n')
    with pytest.raises(UsageError, match="line 1"):
        read_record(path)
    path.unlink()
    append_outcome(path, first)
    append_outcome(path, second)
    assert list(read_record(path).values()) == [first, second]


def test_page_of_the_study_agrees_with_its_record(tmp_path: Path) -> None:
    docs = Path(__file__).parents[5] / "docs"
    page = tmp_path / "levels.md"
    page.write_text((docs / "levels.md").read_text(encoding="utf-8"), encoding="utf-8")
    update_page(page, render_tables([*read_record(docs / "levels.jsonl").values()]), BEGIN)
    assert page.read_text(encoding="utf-8") == (docs / "levels.md").read_text(encoding="utf-8")


def test_run_spends_the_energy_of_its_fleet_and_repeats_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SETTINGS, "digits-mlp", replace(SETTINGS["digits-mlp"], rounds=2, steps=2))
    runs = {
        way: run_case(Trial("digits-mlp", "thirds", way, 0.06), None)
        for way in ("all-full", "nested", "sandwich")
    }
    again = run_case(Trial("digits-mlp", "thirds", "sandwich", 0.06), None)
    assert replace(again, seconds=0) == replace(runs["sandwich"], seconds=0)
    assert runs["all-full"].rounds == runs["nested"].rounds == 2
    assert set(runs["nested"].test) == {"1", "0.5", "0.25"}
    # A step of sandwich does more work, so equal energy is fewer or as many rounds, a little over.
    assert runs["sandwich"].rounds <= 2
    assert runs["sandwich"].joules >= runs["nested"].joules
    assert runs["all-full"].joules > runs["nested"].joules


@pytest.mark.parametrize("way", ["growing", "growing-sandwich", "all-median-growing"])
def test_growing_model_gets_the_rounds_of_the_same_energy(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = replace(SETTINGS["digits-mlp"], rounds=8, steps=3)
    monkeypatch.setitem(SETTINGS, "digits-mlp", setting)
    growing = run_case(Trial("digits-mlp", "thirds", way, 0.06), None)
    plan = setting.task(data_of(setting, None), 0).plan
    assert growing.rounds > setting.rounds
    fleet = FLEETS["thirds"].levels(setting.devices)
    assert growing.joules == pytest.approx(budget_j(plan, setting, fleet), rel=0.1)


def test_growing_model_saves_energy_at_equal_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "digits-mlp", replace(SETTINGS["digits-mlp"], rounds=6, steps=3))
    plain, saving = (
        run_case(Trial("digits-mlp", "thirds", each, 0.06), None)
        for each in ("dropout-momentum", "growing-half-saves")
    )
    assert saving.rounds == pytest.approx(plain.rounds, abs=1)
    assert saving.joules < 0.9 * plain.joules


def test_decoupled_norms_and_masked_scores_run_in_the_study(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = replace(
        SETTINGS["digits-mlp"],
        make=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)
        ),
        rounds=2,
        steps=2,
    )
    monkeypatch.setitem(SETTINGS, "digits-mlp", setting)
    ways = ("nested", "nefl", "sandwich", "masked-logits")
    nested, nefl, sandwich, masked = (
        run_case(Trial("digits-mlp", "thirds", way, 0.06), None) for way in ways
    )
    assert not any(run.failed for run in (nefl, masked))
    for one, other in ((nested, nefl), (sandwich, masked)):
        assert one.joules == pytest.approx(other.joules)
        assert set(one.test) == set(other.test)
        assert one.test != other.test


def test_norms_are_decoupled_where_there_are_any() -> None:
    setting = SETTINGS["digits-mlp"]
    plan = setting.task(data_of(setting, None), 0, decoupled=True).plan
    assert not plan.has_alternatives


def test_levels_of_a_changing_fleet_change_from_round_to_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SETTINGS, "digits-mlp", replace(SETTINGS["digits-mlp"], rounds=3, steps=1))
    fixed, changing = (
        run_case(Trial("digits-mlp", fleet, "nested", 0.06), None)
        for fleet in ("thirds", "changing")
    )
    assert changing.joules != pytest.approx(fixed.joules)
    assert not changing.failed
