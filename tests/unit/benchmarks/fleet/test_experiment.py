"""Simulated experiments from settings: who has which samples, levels and speeds; what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.data import DatasetError, load_data
from benchmarks.data.dealing import DataPartition, halves
from benchmarks.fleet.config import StudyConfig, make_study
from benchmarks.fleet.ideal import find_population
from benchmarks.fleet.study import Study, deal_rows, round_row
from coordinator.errors import ConfigError
from coordinator.rounds.fragments import FragmentsConfig

TINY: dict[str, Any] = {
    "data.samples": 80,
    "model.name": "mlp",
    "fleet.devices": 4,
    "run.steps": 2,
    "run.batch_size": 8,
}


def test_settings_are_those_of_a_run_and_plain() -> None:
    config = make_study(
        {**TINY, "run.recipe": "heterofl", "run.up": "int8", "run.levels": [1, 0.5]}
    )
    plain = config.plain()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["mask.name"], plain["mask.options.tied"]) == ("static", True)
    assert (plain["run.up"], plain["run.levels"]) == ("int8", [1.0, 0.5])
    assert make_study({key: it for key, it in plain.items() if it is not None}).plain() == plain
    with pytest.raises(ConfigError, match=r"recipe heterofl sets mask\.name = 'static'"):
        make_study({"run.recipe": "heterofl", "mask.name": "random"})


def test_ideal_devices_get_levels_shares_and_speeds_in_turn() -> None:
    fleet = make_study(
        {
            "fleet.devices": 5,
            "fleet.levels": [1.0, 0.5, 0.25],
            "fleet.participation": [1.0, 0.5],
            "fleet.speeds": [1.0, 0.1],
        }
    ).fleet
    kinds = [kind for _, kind in find_population(fleet).devices()]
    assert [kind.policy.level for kind in kinds] == [1.0, 0.5, 0.25, 1.0, 0.5]
    assert all(kind.policy.offered_levels() == (kind.policy.level,) for kind in kinds)
    assert [kind.policy.participation for kind in kinds] == [1.0, 0.5, 1.0, 0.5, 1.0]
    ratios = [kind.board.speed.speed_ratio for kind in kinds]
    values = [ratio.value for ratio in ratios if ratio is not None]
    assert values[1] == pytest.approx(0.1 * values[0])
    assert kinds[1].policy.compute == pytest.approx(0.1 * (kinds[0].policy.compute or 0))
    assert len(find_population(make_study({"fleet.devices": 1000}).fleet).kinds) == 1


def test_samples_are_dealt_once_and_those_of_the_test_never_train() -> None:
    data = load_data(None, 3)
    config = make_study({"data.partition": "labels", "data.samples": 500, "run.seed": 3})
    parts = deal_rows(config, data, 10)
    rows = np.concatenate(parts)
    assert len(rows) == len(np.unique(rows)) == 500
    assert all(len(np.unique(data.train.targets[part])) <= 2 for part in parts)
    validation, test = halves(data)
    assert len(validation) + len(test) == len(data.test)
    images = {each.tobytes() for each in data.train.inputs[0]}
    seen = {each.tobytes() for each in (*validation.inputs[0], *test.inputs[0])}
    assert not images & seen
    assert not {each.tobytes() for each in validation.inputs[0]} & {
        each.tobytes() for each in test.inputs[0]
    }


def test_people_are_devices_and_some_are_drawn() -> None:
    owners = np.repeat(np.arange(6), 3)
    by_person = DataPartition(partition="key")
    labels = np.zeros(18, np.int64)
    parts = by_person.deal(labels, 4, np.random.default_rng(0), owners)
    assert len(parts) == 4
    assert all(len(np.unique(owners[part])) == 1 for part in parts)
    with pytest.raises(DatasetError, match="7 devices are too many for the samples of 6 people"):
        by_person.deal(labels, 7, np.random.default_rng(0), owners)
    with pytest.raises(DatasetError, match="whose samples are whose"):
        by_person.deal(labels, 4, np.random.default_rng(0))


def run(config: StudyConfig) -> tuple[Study, list[dict[str, Any]]]:
    study = Study(config)
    return study, [round_row(each) for each in study.run()]


def test_rounds_are_evaluated_now_and_then_and_the_outcome_has_every_level() -> None:
    study, rows = run(
        make_study(
            {
                **TINY,
                "fleet.levels": [1.0, 0.5],
                "run.rounds": 5,
                "simulation.evaluate_every": 2,
                "data.check_samples": 60,
            }
        )
    )
    measured = [row["round"] for row in rows if row["accuracy"] is not None]
    assert measured == [2, 4, 5]
    outcome = study.outcome()
    assert set(outcome.test) == set(outcome.validation) == {1.0, 0.75, 0.5, 0.25}
    assert outcome.validation[1.0] == rows[-1]["accuracy"]
    assert outcome.validation[0.5] == rows[-1]["accuracy_50"]
    assert outcome.plain()["test"]["0.25"] == outcome.test[0.25]
    assert study.settings()["run.widths"] == "ordered-dropout"  # as the run chose


def test_asynchronous_experiment_tells_of_every_so_many_updates() -> None:
    config = make_study(
        {
            **TINY,
            "rule.name": "fed-raa",
            "run.updates": 9,
            "round.min_devices": 2,
            "fleet.speeds": [1.0, 0.05],
        }
    )
    study, rows = run(config)
    assert isinstance(study.machine, FragmentsConfig)
    assert len(rows) == config.reports == 5
    assert study.settings()["mask.name"] == "gre-raa"


def test_missing_data_and_model_are_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="data set 'mnist': not in"):
        Study(make_study({"data.name": "mnist"}), tmp_path)
    with pytest.raises(ConfigError, match="flowers has no usual model; name one"):
        Study(make_study({"data.name": "flowers"}), tmp_path)
    with pytest.raises(ValueError, match="iterate over run"):
        Study(make_study({"simulation.train": False, "model.name": "mlp"})).outcome()
