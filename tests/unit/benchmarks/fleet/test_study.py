"""`tessera-bench fleet --population`: a question, answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cli import main, make_parser
from benchmarks.fleet.command import study_settings
from benchmarks.fleet.config import make_study
from benchmarks.fleet.study import Study
from benchmarks.fleet.systems import SystemsConfig, measure_systems
from benchmarks.fleet.training import TrainingConfig, TrainingJob
from benchmarks.report.progress import silent
from coordinator.aggregate.rules import ASYNC_RULES, RULES
from tests.unit.coordinator.run.test_tensorboard import events

NIGHT = """
starts = "22:00"
price_per_gb = 4.0
work = 50

[[kinds]]
board = "redmi_7a"
count = 12
battery_percent = [60, 90]
network = "mobile"
policy.limits.allow_metered = true

[[kinds]]
board = "raspberry_pi_5"
count = 3
"""


def study(folder: Path, *more: str) -> dict[str, Any]:
    (folder / "night.toml").write_text(NIGHT)
    path = folder / "study.json"
    arguments = ["--population", str(folder / "night.toml"), "--participants", "5", *more]
    assert main(["fleet", *arguments, "--json", str(path)]) == 0
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return written


def test_study_without_training_tells_hours_joules_bytes_and_money(tmp_path: Path) -> None:
    written = study(tmp_path, "--rounds", "4", "--model", "mlp")
    figures = {each["name"]: each["value"] for each in written["figures"]}
    assert len(written["rounds"]) == 4
    last = written["rounds"][-1]
    assert figures["fleet.study.hours"] == last["time_s"] / 3600 > 0
    assert figures["fleet.study.joules"] > 0
    assert last["money"] == pytest.approx(4 * last["metered_bytes"] / 1e9)
    assert 0 < last["metered_bytes"] < last["bytes_up"] + last["bytes_down"]
    assert "fleet.study.accuracy" not in figures


def test_study_that_trains_tells_the_accuracy(tmp_path: Path) -> None:
    written = study(tmp_path, "--rounds", "2", "--train", "--tensorboard", str(tmp_path / "board"))
    last = written["rounds"][-1]
    assert 0 < last["accuracy"] <= 1
    found = {
        (event.step, value.tag): value.simple_value
        for event in events(tmp_path / "board")
        for value in event.summary.value
    }
    assert found[2, "accuracy/level_100"] == pytest.approx(last["accuracy"])
    assert found[2, "spent/joules"] == pytest.approx(last["joules"])
    assert {step for step, _ in found} == {1, 2}


RAY = ["--train", "--engine", "ray"]


@pytest.mark.parametrize("rule", [*RULES, *ASYNC_RULES])
def test_study_of_every_rule_can_be_made(rule: str) -> None:
    arguments = make_parser().parse_args(["fleet", "--population", "phones", "--rule", rule])
    study = Study(make_study(study_settings(arguments)))
    assert len(study.population) > 0


def test_study_says_which_data_set_was_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mnist").mkdir()
    assert main(["fleet", "--population", "phones", "--train", "--data", str(tmp_path)]) == 2
    assert f"did you mean {tmp_path / 'mnist'}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "mpl"], "model.name = 'mpl': no such model"),
        (["--rule", "fed-evg"], "there is no rule 'fed-evg'"),
        (["--devices", "7"], "its own counts"),
        (["--ray-address", "auto"], 'only with engine = "ray"'),
        ([*RAY, "--ray-address", "ray://head:10001"], "auto or HOST:PORT"),
        ([*RAY, "--ray-address", "auto", "--processes", "2"], "has its own"),
        (["--engine", "ray"], "nothing to train without --train"),
        (["--rule", "fedbuff", "--participants", "3"], "for rounds, and fedbuff has none"),
        (["--train", "--data", "nowhere"], "--data nowhere is not a data set: give a folder"),
    ],
)
def test_study_refuses_nonsense(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "night.toml").write_text(NIGHT)
    path = str(tmp_path / "night.toml")
    assert main(["fleet", "--population", path, "--rounds", "1", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_systems_count_what_devices_did() -> None:
    rows, held = measure_systems(
        SystemsConfig(devices=40, participants=10, rounds=2, held=400), silent
    )
    assert [row.model for row in rows] == ["small", "mlp"]
    assert all(row.per_s > 0 for row in rows)
    assert held.devices == 400


def test_training_takes_every_step() -> None:
    config = TrainingConfig(devices=8, participants=4, steps=2, batch=4, samples=6, cohort=3)
    job = TrainingJob("sensor-cnn", config)
    assert list(job.rounds(1, 3)) == [4, 8, 12]
    assert next(job.bare()) == 2
