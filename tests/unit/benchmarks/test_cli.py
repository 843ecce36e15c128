"""`tessera-bench`: what its commands write, and how they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.report.imports
from benchmarks.cli import main
from benchmarks.report.figures import FigureError
from benchmarks.report.imports import measure_imports
from tests.unit.benchmarks.interruption import interrupted

SMALLEST = ["step", "--quick", "--families", "mlp", "--batch", "4", "--reps", "1"]


def test_step_writes_every_level_and_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    assert main([*SMALLEST, "--json", str(path)]) == 0
    run = json.loads(path.read_text(encoding="utf-8"))
    assert run["schema"] == 1
    assert run["command"] == "step"
    assert run["environment"]["versions"]["torch"] == torch.__version__
    assert run["environment"]["cpus"] == os.cpu_count()
    assert run["config"]["batch"] == 4
    assert run["config"]["threads"] == 1

    rows = {row["level"]: row for row in run["rows"]}
    assert list(rows) == [1.0, 0.75, 0.5, 0.25]
    # A 784-w-w-10 perceptron, by hand: products 784·w + w·w + w·10, parameters with biases.
    macs = {level: 784 * w + w * w + 10 * w for level in rows for w in [int(200 * level)]}
    params = {level: macs[level] + 2 * int(200 * level) + 10 for level in rows}
    for level, row in rows.items():
        assert row["macs_ratio"] == pytest.approx(macs[level] / macs[1.0])
        assert row["parameter_share"] == pytest.approx(params[level] / params[1.0])
        assert row["ratio"] == pytest.approx(row["step_ms"] / rows[1.0]["step_ms"])
        assert row["over_macs"] == pytest.approx(row["ratio"] / row["macs_ratio"])
        assert (row["zero_mask_ratio"] is None) == (level == 1.0)
        assert (row["rescaled_ratio"] is None) == (level != 0.5)
        assert row["onnx_over_torch"] == pytest.approx(row["onnx_ms"] / row["step_ms"])
        onnx_ratio = row["onnx_ms"] / rows[1.0]["onnx_ms"]
        assert row["onnx_over_macs"] == pytest.approx(onnx_ratio / row["macs_ratio"])

    figures = {figure["name"]: figure for figure in run["figures"]}
    assert figures["step.mlp.50.over_macs"]["value"] == rows[0.5]["over_macs"]
    assert figures["step.mlp.50.over_macs"]["target"] is None
    for level, row in rows.items():
        figure = figures[f"step.mlp.{level * 100:.0f}.onnx_over_torch"]
        assert figure["value"] == row["onnx_over_torch"]
        assert (figure["target"], figure["better"]) == (1.0, "lower")
    assert "step.mlp.50.onnx_over_macs" not in figures
    assert figures["import.rss"]["target"] == 30
    assert figures["import.cpu_over_numpy"]["target"] == 1.3
    printed = capsys.readouterr()
    assert "targets met" in printed.out
    assert "step mlp" in printed.err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--families", "mlp,mpl"], "unknown family 'mpl'; choose from mlp, "),
        (["--reps", "0"], "reps must be at least 1"),
    ],
)
def test_step_refuses_nonsense_before_it_measures(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALLEST, *arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "step mlp" not in printed.err


MEASURING = (
    *("step", "footprint", "costs", "aggregate", "wire", "load", "runs", "fleet", "zoo", "attack"),
    "operate",
)


@pytest.mark.parametrize("name", MEASURING)
def test_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--json", f"no/such/directory/{name}.json"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "directory that exists" in said


def test_help_of_every_command_is_cheap() -> None:
    code = (
        "import sys; from benchmarks.cli import main\n"
        f"for name in {(*MEASURING, 'device', 'kit', 'compare', 'profile', 'learn')}:\n"
        "    try: main([name, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print(sorted({'torch', 'onnxruntime', 'rich', 'paho'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--devices N" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_interrupted_step_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    arguments = [*SMALLEST, "--reps", "100000"]
    assert interrupted(arguments, "step mlp", tmp_path) == ["tessera-bench: interrupted"]


def test_imports_report_the_child_not_the_parent() -> None:
    resident = bytearray(200_000_000)
    resident[::4096] = b"x" * len(resident[::4096])  # this process is far larger than any child
    ticks: list[None] = []
    numpy, sdk, names = measure_imports(1, lambda: ticks.append(None))
    assert len(ticks) == 2
    assert numpy.cpu_ratio == 1
    assert 5 < sdk.rss_mb <= names.rss_mb < 200
    assert numpy.rss_mb <= names.rss_mb


def test_import_that_fails_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benchmarks.report.imports.STATEMENTS, "numpy", "import no_such_module")
    with pytest.raises(FigureError, match="No module named 'no_such_module'"):
        measure_imports(1)
