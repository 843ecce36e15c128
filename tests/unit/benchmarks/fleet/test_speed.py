"""`tessera-bench fleet`: both sides take the steps they are credited with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import benchmarks.fleet.speed as speed
import benchmarks.fleet.systems as systems
import benchmarks.fleet.training as training
from benchmarks.cli import main
from benchmarks.fleet.speed import TARGETS, SpeedConfig, SpeedRow, measure_speed, speed_figures
from benchmarks.report.progress import silent
from edge_sdk.train.onnx import OnnxBackend

SMALLEST = SpeedConfig(devices=2, steps=3, batch=4, turns=2, samples=8)


def test_both_sides_take_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, ours = [], []
    step, train = torch.optim.SGD.step, OnnxBackend.train

    def count_bare(self: torch.optim.SGD) -> None:
        step(self)
        bare.append(sum(p.numel() for group in self.param_groups for p in group["params"]))

    def count_ours(self, job, batches, **options):  # type: ignore[no-untyped-def]
        trained = train(self, job, batches, **options)
        ours.append((trained.metrics.steps, sum(array.size for array in job.weights.values())))
        return trained

    monkeypatch.setattr(torch.optim.SGD, "step", count_bare)
    monkeypatch.setattr(OnnxBackend, "train", count_ours)
    rows = measure_speed(SMALLEST, silent)
    assert [row.level for row in rows] == list(TARGETS)
    turns, devices = SMALLEST.turns, SMALLEST.devices
    assert len(bare) == len(TARGETS) * turns * devices * SMALLEST.steps
    assert [steps for steps, _ in ours] == [SMALLEST.steps] * len(TARGETS) * turns * devices
    # The bare loop's model is as large as the submodels, at both levels.
    assert sorted(set(bare)) == sorted({size for _, size in ours})


def test_figures_compare_steps_with_the_bare_loop() -> None:
    (figure,) = speed_figures([SpeedRow(0.25, 800.0, 1000.0, 0.79)])
    assert (figure.name, figure.value) == ("fleet.mlp.25.steps_over_bare", 0.79)
    assert (figure.target, figure.met) == (0.8, False)


def test_fleet_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SpeedRow(1.0, 950.0, 1000.0, 0.96)]
    rates = (
        [systems.SystemsRow("small", 2410, 5100.0, 5200.0)],
        systems.HeldFleet(100_000, 0.5, 2.0),
    )
    trained = [training.TrainingRow("mlp", 3000.0, 1500.0, 2.0, 1.2, 0.9, 1.1)]
    monkeypatch.setattr(speed, "measure_speed", lambda config, begin: rows)
    monkeypatch.setattr(systems, "measure_systems", lambda config, begin: rates)
    monkeypatch.setattr(training, "measure_training", lambda config, begin: trained)
    path = tmp_path / "fleet.json"
    assert main(["fleet", "--quick", "--json", str(path)]) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["command"] == "fleet"
    assert written["rows"][0]["ratio"] == 0.96
    figures = {each["name"]: each for each in written["figures"]}
    assert figures["fleet.mlp.100.steps_over_bare"]["target"] == 0.95
    assert figures["fleet.systems.small.device_rounds_per_s"]["target"] == 5000
    assert figures["fleet.systems.idle_device_kb"]["value"] == 0.5
    assert figures["fleet.training.mlp.steps_over_bare"]["target"] == 1.9
