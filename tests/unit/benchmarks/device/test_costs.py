"""The costs benchmark predicts and measures in fresh processes, and its figures say how well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.device.costs.comparison import CostsConfig, PredictionRow, TimeRow, cost_figures
from edge_sdk.protocol.plan import LEVELS

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc"
)


def test_costs_bound_the_memory_of_real_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert main(["costs", "--quick", "--families", "mlp", "--json", str(path)]) == 0
    run = json.loads(path.read_text(encoding="utf-8"))
    assert run["command"] == "costs"
    assert [row["level"] for row in run["times"]] == list(LEVELS)
    assert all(row["predicted_s"] > 0 < row["measured_s"] for row in run["times"])
    for row in run["memory"]:
        # A process that trains needs megabytes for the runtime alone.
        assert 5e6 < row["grown_bytes"] <= row["predicted_bytes"]
    figures = {figure["name"]: figure for figure in run["figures"]}
    assert figures["costs.memory_under"]["value"] == 0
    assert figures["costs.time_error"]["target"] == 0.20
    out = capsys.readouterr().out
    assert "predicted" in out
    assert "momentum" in out


def test_costs_refuse_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["costs", "--families", "mpl"]) == 2
    assert "unknown family 'mpl'" in capsys.readouterr().err


def test_full_comparison_has_rules_encodings_and_held_memory() -> None:
    cases = CostsConfig().cases()
    assert len(cases) == len(set(cases)) == CostsConfig().ticks - 2
    assert {level for level, *_ in cases} == set(LEVELS)
    assert {rule for _, rule, *_ in cases} == {"momentum", "sam"}
    assert {encoding for *_, encoding, _ in cases} == {"fp32", "top-k:0.1"}
    assert any(before is not None for *_, before in cases)


def _time(family: str, predicted_s: float) -> TimeRow:
    return TimeRow(
        family=family,
        level=1.0,
        steps=1,
        predicted_s=predicted_s,
        measured_s=2.0,
        calibration_s=1.0,
    )


def _memory(family: str, predicted: float, grown: float) -> PredictionRow:
    return PredictionRow(
        family=family,
        level=1.0,
        rule="momentum",
        encoding="fp32",
        before=None,
        predicted_bytes=predicted,
        grown_bytes=grown,
    )


def test_figures_are_medians_and_shares() -> None:
    times = [_time("mlp", 1.0), _time("mlp", 2.2), _time("cnn", 2.4)]
    memory = [_memory("mlp", 3e7, 2e7), _memory("cnn", 1e7, 2e7), _memory("cnn", 5e5, 0)]
    figures = {figure.name: figure for figure in cost_figures(times, memory)}
    assert figures["costs.time_error"].value == pytest.approx(0.2)
    assert figures["costs.time_error"].met
    assert figures["costs.memory_under"].value == pytest.approx(1 / 3)
    assert figures["costs.memory_under"].met is False
    assert figures["costs.memory_over"].value == pytest.approx(0.5)
    assert figures["costs.mlp.time_error"].value == pytest.approx(0.3)
