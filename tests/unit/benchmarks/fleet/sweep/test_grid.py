"""A sweep's file: every combination of what is a list, and cases known by their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.sweep.grid import SweepCase, check_data, combinations, read_cases
from benchmarks.report.options import UsageError
from coordinator.errors import ConfigError

POPULATION = """
[[kinds]]
board = "raspberry_pi_5"
count = 4
"""


def cases(folder: Path, text: str, *, quick: bool = False) -> list[SweepCase]:
    path = folder / "sweep.toml"
    path.write_text(text)
    return read_cases(path, quick=quick)


def test_values_and_tables_that_are_lists_are_combined() -> None:
    content: dict[str, Any] = {
        "run": {"rounds": 5, "seed": [0, 1]},
        "rule": [{"name": "ra-fed"}, {"name": "ram-fed", "options": {"damping": [0.8, 0.9]}}],
        "fleet": {"levels": [1.0, 0.5]},
    }
    rules: list[dict[str, Any]] = [
        {"rule.name": "ra-fed"},
        {"rule.name": "ram-fed", "rule.options.damping": 0.8},
        {"rule.name": "ram-fed", "rule.options.damping": 0.9},
    ]
    assert combinations(content) == [
        {"run.rounds": 5, "run.seed": seed, **rule, "fleet.levels": [1.0, 0.5]}
        for seed in (0, 1)
        for rule in rules
    ]


def test_list_of_lists_sweeps_a_setting_that_is_a_list() -> None:
    found = combinations({"fleet": {"levels": [[1.0], [1.0, 0.5]]}})
    assert found == [{"fleet.levels": [1.0]}, {"fleet.levels": [1.0, 0.5]}]


def test_cases_are_laid_over_the_file_and_the_first_seed_comes_first(tmp_path: Path) -> None:
    text = """
    run.seed = [3, 4]
    run.steps = 7
    rule.name = ["ra-fed", "fedavg"]
    [[cases]]
    name = "plain"
    [[cases]]
    name = "hetero"
    run.recipe = "heterofl"
    rule.name = "ra-fed"
    """
    found = cases(tmp_path, text)
    assert [(case.name, case.config.run.seed, case.config.rule.name) for case in found] == [
        ("plain", 3, "ra-fed"),
        ("plain", 3, "fedavg"),
        ("hetero", 3, "ra-fed"),
        ("plain", 4, "ra-fed"),
        ("plain", 4, "fedavg"),
        ("hetero", 4, "ra-fed"),
    ]
    assert {case.config.run.steps for case in found} == {7}
    assert [case.config.mask.name for case in found if case.name == "hetero"] == ["static"] * 2
    assert str(found[1]) == "plain, rule.name fedavg, seed 3"


def test_case_is_known_by_its_settings_alone(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    for folder in (tmp_path, tmp_path / "moved"):
        (folder / "night.toml").write_text(POPULATION)
    text = 'fleet.population = "night.toml"\nrun.rounds = 3\n'
    (first,) = cases(tmp_path, text)
    (moved,) = cases(tmp_path / "moved", text + "simulation.processes = 2\n")
    assert first.id == moved.id
    assert (first.row["run.rounds"], first.row["model.name"]) == (3, "digits-cnn")
    (other,) = cases(tmp_path, text + "run.momentum = 0.5\n")
    (tmp_path / "night.toml").write_text(POPULATION.replace("4", "5"))
    (larger,) = cases(tmp_path, text)
    assert len({first.id, other.id, larger.id}) == 3


def test_quick_cases_are_short(tmp_path: Path) -> None:
    found = cases(tmp_path, 'run.rounds = [2, 30]\nrule.name = "ra-fed"', quick=True)
    assert [case.config.run.rounds for case in found] == [2, 3]
    (found_one,) = cases(tmp_path, 'rule.name = "fed-raa"\nround.min_devices = 4', quick=True)
    assert found_one.config.run.updates == 12
    assert found_one.config.reports == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run.round = 3", "run.round is not a known key; did you mean 'rounds'?"),
        ("[[cases]]\nname = 'a'\nrun.sed = 3", "case a: run.sed is not a known key"),
        ("run.seed = []", "run.seed = []: give at least one value"),
        ("cases = 3", r"cases must be tables \[\[cases\]\]"),
        ("rule.name = ['fedavg', 'fedevg']", "there is no rule 'fedevg'"),
        ("run.robust = 'root'", "no data"),
        ("fleet.population = 'phones'\nfleet.levels = [0.5]", "for an ideal fleet"),
        ("model.name = 'lenet'", "did you mean 'lenet-"),
    ],
)
def test_nonsense_is_refused_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?").replace("[]", r"\[\]")):
        cases(tmp_path, text)


def test_missing_data_is_noticed_at_once(tmp_path: Path) -> None:
    found = cases(tmp_path, "data.name = 'mnist'")
    for folder in (None, tmp_path):
        with pytest.raises(UsageError, match="the folder with mnist/"):
            check_data(found, folder)
    (tmp_path / "mnist").mkdir()
    check_data(found, tmp_path)
