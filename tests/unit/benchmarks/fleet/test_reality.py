"""`tessera-bench fleet --check`: programs and simulation, compared device by device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.fleet import reality
from benchmarks.fleet.reality import RealityConfig, RealityRow, compare_rounds, reality_figures
from coordinator.rounds.report import DeviceRound, RoundReport
from coordinator.simulate.demo.emulated import Lived
from coordinator.simulate.demo.run import DemoRound
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from edge_sdk.machine.board import find_board

PHONE = find_board("pixel_4")
POPULATION = DevicePopulation(
    kinds=(
        DeviceKind(board=PHONE, name="phone", battery_percent=(80, 80)),
        DeviceKind(board=find_board("raspberry_pi_4"), name="pi"),
    )
)
LINES = (
    DeviceRound("phone", 0.5, "fits", bytes_down=90, bytes_up=100, train_s=20.0),
    DeviceRound("pi", None, "skip: hours"),
)


def round_of(*lines: DeviceRound) -> DemoRound:
    power = PHONE.power
    assert power.train_w is not None
    # Two seconds more than the report says: the device calibrated itself.
    lived = [
        Lived(80.0, line.train_s + 2, power.train_w.value * (line.train_s + 2), None)
        if line.level is not None
        else Lived(None, 0.0, None, None)
        for line in lines
    ]
    report = RoundReport(7, lines, 0, 0.0, 0, 0, 0.0, 0, None, None, 0.0, 0.0, 1, 1.0)
    return DemoRound(report, tuple(lived), 0, 0.0, 0.0)


def test_round_is_compared_device_by_device() -> None:
    phone, pi = LINES
    other = replace(pi, level=0.25, bytes_up=30, bytes_down=40, train_s=5.0)
    row = compare_rounds(round_of(*LINES), (other, phone), POPULATION, (3.0, 0.1))
    assert (row.round, row.devices, row.alike) == (7, 2, 1)
    assert (row.bytes_up, row.bytes_down) == ((100, 130), (90, 130))
    assert (row.train_s, row.wall_s) == ((20.0, 25.0), (3.0, 0.1))
    power = PHONE.power
    assert power.train_w is not None
    assert power.idle_w is not None
    net_w = power.train_w.value - power.idle_w.value
    assert row.joules[0] == pytest.approx(22 * net_w)
    assert row.joules[1] > 20 * net_w  # the other device trained too


def test_figures_sum_over_rounds() -> None:
    rows = [
        RealityRow(1, 4, 4, (100, 100), (50, 50), (10.0, 10.0), (40.0, 30.0), (1.0, 0.1)),
        RealityRow(2, 4, 3, (100, 150), (50, 100), (10.0, 12.0), (40.0, 50.0), (1.0, 0.1)),
    ]
    assert {each.name: each.value for each in reality_figures(rows)} == {
        "fleet.check.equal_decisions": 7 / 8,
        "fleet.check.bytes_up_over_real": 1.25,
        "fleet.check.bytes_down_over_real": 1.5,
        "fleet.check.train_s_over_real": 1.1,
        "fleet.check.joules_over_real": 1.0,
    }


def test_check_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [RealityRow(1, 8, 8, (100, 100), (50, 50), (10.0, 10.0), (4.0, 4.0), (1.0, 0.1))]
    asked: list[RealityConfig] = []

    def measured(config: RealityConfig, _begin: object) -> list[RealityRow]:
        asked.append(config)
        return rows

    monkeypatch.setattr(reality, "measure_reality", measured)
    path = tmp_path / "check.json"
    assert main(["fleet", "--check", "--quick", "--json", str(path)]) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["rows"][0]["alike"] == 8
    assert written["config"]["rounds"] == asked[0].rounds == 3
