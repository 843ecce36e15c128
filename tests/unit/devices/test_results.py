"""Measured results that people contribute: read, complete, and said what they hold for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.device.results import (
    Machine,
    Results,
    ResultsError,
    read_results,
    write_results,
)
from edge_sdk.machine.board import shipped_boards
from tests.unit.benchmarks.device.sample_results import make_case, make_config

FOLDER = Path(__file__).resolve().parents[3] / "devices" / "results"


def complaints(path: Path) -> list[str]:
    """What is wrong with a file of `devices/results`. Raises `ResultsError` if it is no results."""
    results, found = read_results(path), []
    if path.stem not in shipped_boards():
        found.append(f"{path.name} is not named as a profile of devices/ is: write one first")
    if results.provenance != "measured":
        found.append(f"{path.name} is modelled: only what was measured belongs here")
    if not results.complete:
        found.append(f"{path.name} is not complete: go on with tessera-bench device --resume")
    if results.config.quick:
        found.append(f"{path.name} is of a --quick run: measure without it")
    if not results.machine.cooling:
        found.append(f"{path.name} does not say how the device was cooled: give --cooling")
    if missing := {"tessera-fl", "onnxruntime"} - set(results.machine.versions):
        found.append(f"{path.name} does not say which {' and '.join(sorted(missing))} was run")
    if not any(case.level == 1.0 and case.backend == "onnx" for case in results.cases):
        found.append(f"{path.name} has no case of a full model on the onnx backend")
    return found


def test_contributed_results_are_sound() -> None:
    for path in sorted(FOLDER.glob("*")):
        assert path.suffix == ".json", f"{path}: results are .json files"
        assert complaints(path) == []


# -- what is found wrong -------------------------------------------------------------------------

SOUND = Results(
    title="Raspberry Pi 4",
    provenance="measured",
    started="2026-01-02T03:04:05Z",
    seconds=600.0,
    complete=True,
    machine=Machine(
        system="Linux 6.6 aarch64",
        python="3.11",
        cooling="heat sink, no fan",
        versions={"tessera-fl": "0.1.0", "onnxruntime": "1.23.0"},
    ),
    config=make_config(families=("mlp",), levels=(1.0,), threads=(4,)),
    cases=(make_case("mlp", threads=4),),
)


def written(folder: Path, results: Results, name: str = "raspberry_pi_4") -> Path:
    path = folder / f"{name}.json"
    write_results(path, results, [])
    return path


def test_sound_results_have_no_complaints(tmp_path: Path) -> None:
    assert complaints(written(tmp_path, SOUND)) == []


@pytest.mark.parametrize(
    ("results", "why"),
    [
        (replace(SOUND, provenance="modelled", cases=()), "modelled"),
        (replace(SOUND, complete=False), "--resume"),
        (replace(SOUND, config=replace(SOUND.config, quick=True)), "--quick"),
        (replace(SOUND, machine=replace(SOUND.machine, cooling=None)), "--cooling"),
        (replace(SOUND, machine=replace(SOUND.machine, versions={})), "onnxruntime"),
        (replace(SOUND, cases=()), "full model"),
    ],
)
def test_unsound_results_are_refused(tmp_path: Path, results: Results, why: str) -> None:
    assert any(why in complaint for complaint in complaints(written(tmp_path, results)))


def test_results_of_an_unknown_device_are_refused(tmp_path: Path) -> None:
    (complaint,) = complaints(written(tmp_path, SOUND, "toaster"))
    assert "toaster.json" in complaint


def test_files_that_are_no_results_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "raspberry_pi_4.json"
    path.write_text('{"command": "step"}')
    with pytest.raises(ResultsError, match=r"raspberry_pi_4\.json"):
        complaints(path)
