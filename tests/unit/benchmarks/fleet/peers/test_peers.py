"""`tessera-bench peers`: one job, its drivers, and the ratios."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cli import main
from benchmarks.fleet.peers import measure
from benchmarks.fleet.peers.job import PeerJob
from benchmarks.fleet.peers.measure import (
    ALL,
    BARE,
    OURS,
    PEERS,
    PeerError,
    PeerRow,
    PeerTurn,
    RunningPeer,
    Simulator,
    measure_peers,
    peers_figures,
    rows_of,
)
from benchmarks.report.options import UsageError
from benchmarks.report.progress import silent
from edge_sdk.program.processes import Children

SMALL = PeerJob(
    widths=(784, 200, 200, 10), devices=4, participants=2, steps=4, batch=4, samples=8, processes=1
)


def test_job_is_files_that_any_python_reads(tmp_path: Path) -> None:
    job = json.loads(SMALL.write(tmp_path).read_text(encoding="utf-8"))
    assert (job["devices"], job["steps"], job["widths"]) == (4, 4, [784, 200, 200, 10])
    inputs = np.load(Path(job["folder"]) / "inputs.npy")
    targets = np.load(Path(job["folder"]) / "targets.npy")
    assert (inputs.shape, inputs.dtype) == ((32, 784), np.float32)
    assert targets.shape == (32,)
    assert set(targets) <= set(range(10))
    again = tmp_path / "again"
    again.mkdir()
    SMALL.write(again)
    assert (again / "inputs.npy").read_bytes() == (tmp_path / "inputs.npy").read_bytes()


def test_job_whose_steps_are_no_whole_passes_is_refused() -> None:
    with pytest.raises(UsageError, match="no whole passes"):
        PeerJob(steps=21)
    with pytest.raises(UsageError, match="no whole passes"):
        PeerJob(samples=50)


def test_ratios_are_medians_within_turns() -> None:
    found = {
        BARE: [PeerTurn(100, 1.0, 1.0), PeerTurn(100, 2.0, 1.0), PeerTurn(100, 4.0, 1.0)],
        OURS: [PeerTurn(300, 1.0, 2.0), PeerTurn(400, 4.0, 2.0), PeerTurn(100, 1.0, 2.0)],
        "pfl": [PeerTurn(100, 1.0, 4.0)] * 3,
    }
    rows = {row.name: row for row in rows_of(found, {"pfl": "0.6.0"})}
    assert [*rows] == [each.name for each in ALL]
    # 300 to 100, 100 to 50, 100 to 25 a second; 150, 200 and 50 to 100 a CPU second.
    assert rows[OURS] == PeerRow(OURS, "", 100.0, 3.0, 1.5)
    assert (rows["pfl"].version, rows["pfl"].over_bare) == ("0.6.0", 2.0)
    assert rows[BARE].over_bare == 1.0
    assert rows["flower"].steps_per_s is None
    assert "pip install" in rows["flower"].install

    figures = {each.name: each.value for each in peers_figures([*rows.values()])}
    assert figures == {
        "peers.tessera.steps_over_bare": 3.0,
        "peers.pfl.steps_over_bare": 2.0,
        "peers.tessera_over_pfl": 1.5,
    }


@pytest.mark.parametrize("simulator", [each for each in ALL if each not in PEERS])
def test_driver_does_rounds_on_demand_and_ends_with_its_input(
    simulator: Simulator, tmp_path: Path
) -> None:
    path = SMALL.write(tmp_path)
    with Children() as children:
        peer = RunningPeer(children, simulator, sys.executable, path)
        found = [peer.turn(), peer.turn()]
        (child,) = children.started
        peer.end()
        assert child.process.returncode == 0, child.last_words()
    # The bare loop takes a share of the steps, but at least those of a device.
    devices = 1 if simulator.name == BARE else SMALL.participants
    assert [each.steps for each in found] == [devices * SMALL.steps] * 2
    assert all(each.seconds > 0 for each in found)


def test_peer_that_fails_is_quoted(tmp_path: Path) -> None:
    job = tmp_path / "job.json"
    job.write_text("{}", encoding="utf-8")
    with Children() as children, pytest.raises(PeerError, match="KeyError"):
        RunningPeer(children, ALL[0], sys.executable, job)


def test_peer_that_is_not_there_gets_a_row_and_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = tuple(
        Simulator(each.name, "no_such_peer", each.driver, each.install) for each in PEERS
    )
    monkeypatch.setattr(measure, "PEERS", absent)
    monkeypatch.setattr(measure, "ALL", (ALL[0], *absent))
    rows = measure_peers(SMALL, 1, {}, silent)
    assert [row.steps_per_s is None for row in rows] == [False, True, True]

    monkeypatch.setattr(measure, "measure_peers", lambda *_: rows)
    path = tmp_path / "peers.json"
    assert main(["peers", "--quick", "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "not installed" in shown
    assert "pip install 'flwr[simulation]'" in shown
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["command"], written["config"]["turns"]) == ("peers", 2)
    assert written["rows"][1]["install"]


def test_python_that_does_not_exist_is_named() -> None:
    with pytest.raises(PeerError, match="no/such/python"):
        measure_peers(SMALL, 1, {"flower": "/no/such/python"}, silent)
