"""A job deployed on Flower, from what its programs wrote; and ours, really, without Flower."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cli import main
from benchmarks.fleet.peers.measure import BARE, OURS, PeerError, Simulator
from benchmarks.network.deployed.job import SMALL
from benchmarks.network.peers import beside
from benchmarks.network.peers.beside import Beside, SystemRow, beside_figures, measure_beside
from benchmarks.network.peers.flower import (
    cpu_s,
    lasting,
    programs_of,
    resident_bytes,
    row_of,
    write_app,
)
from benchmarks.network.stage.processes import MEASURABLE
from benchmarks.report.progress import silent
from edge_sdk.program.settings.reader import read_toml

PAIR = replace(SMALL, devices=2)
TINY = replace(SMALL, widths=(8, 8, 4), devices=2, steps=4, rounds=2, warm=1, bare_devices=2)


def ended(number: int, time: float, answers: int = 2, errors: int = 0) -> dict[str, float]:
    return {"round": number, "time": time, "answers": answers, "errors": errors}


def trained(number: int, cpu_s: float, peak_bytes: int = 10) -> dict[str, float]:
    return {"round": number, "cpu_s": cpu_s, "peak_bytes": peak_bytes}


def test_first_round_is_left_out() -> None:
    row = row_of(
        PAIR,
        [ended(1, 100.0), ended(2, 110.0), ended(3, 130.0), ended(4, 141.0)],
        [trained(1, 50.0, 99), *(trained(n, 3.0, 6_000_000 + n) for n in (2, 3, 4) for _ in "ab")],
        [(20.0, 5.0), (26.0, 8.0)],
        4_000_000,
    )
    assert (row.rounds, row.devices, row.wall_s) == (3, 2, 11.0)
    # 6 s of the SuperNodes and six processes with 3 s each, in three rounds of two devices.
    assert row.cpu_s == pytest.approx((6 + 18) / 6)
    assert row.server_cpu_s == pytest.approx(1.0)
    assert row.peak_mb == pytest.approx(10.000004)


def test_interpreter_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python9.9"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs_of("python9.9") == tmp_path
    assert programs_of(str(python)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert programs_of("./python9.9") == tmp_path
    assert programs_of("other/python9.9") == tmp_path / "other"


def test_process_that_trained_is_not_counted_again() -> None:
    """It tells its own CPU and memory, and may live on for a while."""
    child = "import time; sum(range(10**7)); print('here', flush=True); time.sleep(60)"
    code = (
        f"import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}], "
        "stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); "
        "sys.stdin.read(); p.kill(); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as node:
        assert node.stdout is not None
        trainer = int(node.stdout.readline())
        assert {each.pid for each in lasting(node.pid)} == {node.pid, trainer}
        assert {each.pid for each in lasting(node.pid, {trainer})} == {node.pid}
        alone, both = lasting(node.pid, {trainer}), lasting(node.pid)
        assert 0 < resident_bytes(alone) < resident_bytes(both)
        assert 0 < cpu_s(alone) < cpu_s(both)


@pytest.mark.parametrize("line", [ended(2, 110.0, answers=1), ended(2, 110.0, errors=1)])
def test_round_without_a_device_is_no_round(line: dict[str, float]) -> None:
    with pytest.raises(PeerError, match="in round 2"):
        row_of(PAIR, [ended(1, 100.0), line], [trained(2, 1.0)], [(0.0, 0.0), (1.0, 1.0)], 1)


def test_app_has_what_flower_looks_for(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    app = write_app(PAIR, 5, tmp_path, "127.0.0.1:20001")
    settings = read_toml(app / "pyproject.toml")["tool"]["flwr"]
    assert settings["app"]["config"]["rounds"] == 5
    job = json.loads(Path(settings["app"]["config"]["job"]).read_text(encoding="utf-8"))
    assert (job["devices"], job["participants"], job["steps"]) == (2, 2, SMALL.steps)
    # Flower reads the module without running it: each object is assigned to by itself.
    for component in settings["app"]["components"].values():
        module, _, name = component.partition(":")
        tree = ast.parse((app / f"{module}.py").read_text(encoding="utf-8"))
        names = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        ]
        assert name in names
    home = read_toml(tmp_path / "home" / "config.toml")
    assert home["superlink"][home["superlink"]["default"]]["address"] == "127.0.0.1:20001"


def test_figures_compare_with_flower_if_it_was_there() -> None:
    bare = SystemRow(name=BARE, wall_s=0.2, cpu_s=0.02, over_bare=1.0)
    ours = SystemRow(name=OURS, wall_s=0.5, cpu_s=0.04, over_bare=2.0, peak_mb=80.0)
    flower = SystemRow(name="flower", version="1", wall_s=25.0, cpu_s=3.2, over_bare=160.0)
    alone = {
        each.name: each.value
        for each in beside_figures(Beside(job="j", devices=2, systems=(bare, ours)))
    }
    assert alone == {"peers.deployed.j.tessera.cpu_over_bare": 2.0}
    found = list(beside_figures(Beside(job="j", devices=2, systems=(bare, ours, flower))))
    values = {each.name: each.value for each in found}
    assert values == {
        **alone,
        "peers.deployed.j.flower.cpu_over_bare": 160.0,
        "peers.deployed.j.wall_over_flower": pytest.approx(0.02),
        "peers.deployed.j.cpu_over_flower": pytest.approx(0.0125),
    }


@pytest.mark.skipif(not MEASURABLE, reason="there is no /proc")
def test_our_half_is_measured_where_flower_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beside, "FLOWER", Simulator("flower", "no_such_peer", "", "pip install it"))
    found = measure_beside(TINY, sys.executable, 1, silent)
    assert [row.name for row in found.systems] == [BARE, OURS]
    assert found.systems[1].cpu_s > 0
    assert found.install == "pip install it"


def test_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--parts", "deployd"]) == 2
    assert "simulated, deployed" in capsys.readouterr().err
