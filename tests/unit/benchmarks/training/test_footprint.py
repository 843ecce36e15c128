"""The footprint benchmark measures the processes and files it says it measures."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cli import main
from benchmarks.models import FAMILIES
from benchmarks.report.figures import FigureError
from benchmarks.training.footprint import (
    FootprintConfig,
    FootprintRow,
    footprint_figures,
    measure_disk,
    measure_memory,
    required,
    write_files,
)
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.task.codec import decode_manifest
from tests.unit.benchmarks.interruption import interrupted

DEVICE_PACKAGES = {
    *("benchmarks", "edge_sdk", "numpy", "msgpack", "onnxruntime"),
    *("psutil", "packaging", "flatbuffers", "google"),
}
"""What the onnx extra installs, and this benchmark's own module."""


def test_footprint_writes_both_backends_and_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "footprint.json"
    assert main(["footprint", "--quick", "--families", "mlp", "--json", str(path)]) == 0
    run = json.loads(path.read_text(encoding="utf-8"))
    assert run["schema"] == 1
    assert run["command"] == "footprint"
    assert run["config"] == {"reps": 1, "steps": 20, "batch": 32, "quick": True}
    assert "VmHWM" in run["method"]["memory"]
    assert "RECORD" in run["method"]["disk"]

    onnx, torch = run["memory"]
    assert [(row["family"], row["backend"]) for row in (onnx, torch)] == [
        ("mlp", "onnx"),
        ("mlp", "torch"),
    ]
    for row in (onnx, torch):
        assert row["steps"] == 20
        assert 10 < row["imported_mb"] <= row["peak_mb"]
    assert {"edge_sdk", "numpy", "onnxruntime"} <= set(onnx["packages"]) <= DEVICE_PACKAGES
    assert "torch" in torch["packages"]
    # torch's libraries alone are larger than the whole process without it.
    assert onnx["peak_mb"] < torch["imported_mb"]

    figures = {figure["name"]: figure for figure in run["figures"]}
    sizes = {row["extra"]: row for row in run["disk"]}
    assert list(sizes) == ["onnx", "torch"]
    wanted = {
        "footprint.mlp.onnx.rss": (onnx["peak_mb"], 65),
        "footprint.mlp.torch.rss": (torch["peak_mb"], None),
        "footprint.environment.onnx.disk": (sizes["onnx"]["size_mb"], 165),
        "footprint.environment.torch.disk": (sizes["torch"]["size_mb"], None),
    }
    assert {name: (f["value"], f["target"]) for name, f in figures.items()} == wanted
    assert {figure["unit"] for figure in figures.values()} == {"MB"}
    printed = capsys.readouterr()
    assert "targets met" in printed.out
    # Once something is done, lines also say how much time is left.
    said = [line.partition(" about ")[0] for line in printed.err.splitlines()]
    assert said == ["memory mlp …", "disk onnx …", "disk torch …"]


def test_targets_belong_to_the_onnx_backend() -> None:
    rows = [
        FootprintRow(family, backend, 20, 50.0, 40.0, ())
        for family in ("mlp", "cnn", "vit-small", "text")
        for backend in ("onnx", "torch")
    ]
    targets = {figure.name: figure.target for figure in footprint_figures(rows, [])}
    aimed = {name: target for name, target in targets.items() if target is not None}
    assert len(targets) == len(rows)
    assert aimed == {
        "footprint.mlp.onnx.rss": 65,
        "footprint.cnn.onnx.rss": 100,
        "footprint.vit-small.onnx.rss": 190,
    }


def test_files_are_what_a_device_is_sent(tmp_path: Path) -> None:
    write_files("mlp", 5, tmp_path)
    plan = decode_plan((tmp_path / "plan").read_bytes())
    manifest = decode_manifest((tmp_path / "manifest").read_bytes())
    assert manifest.plan_hash == plan.hash
    assert {entry.sha256 for entry in manifest.graphs} == {p.stem for p in tmp_path.glob("*.onnx")}
    with np.load(tmp_path / "weights.npz") as weights:
        shapes = {name: array.shape for name, array in weights.items()}
    state = FAMILIES["mlp"].model().state_dict()
    assert shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    with np.load(tmp_path / "batch.npz") as batch:
        assert batch["x0"].shape == (5, 1, 28, 28)
        assert batch["targets"].shape == (5,)


def test_training_that_fails_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "onnxruntime"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no runtime on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(FigureError, match="no runtime on this machine"):
        measure_memory(["mlp"], FootprintConfig(reps=1, steps=1, batch=2))


def test_disk_is_the_sum_of_the_recorded_files() -> None:
    row = measure_disk("onnx")
    assert row.size_mb == pytest.approx(sum(row.distributions.values()))
    assert list(row.distributions.values()) == sorted(row.distributions.values(), reverse=True)
    for name in ("numpy", "onnxruntime", "msgpack"):
        record = distribution(name).read_text("RECORD")
        assert record is not None
        site = Path(str(distribution(name).locate_file("")))
        paths = [site / line.rsplit(",", 2)[0].strip('"') for line in record.splitlines()]
        size = sum(path.stat().st_size for path in paths if path.exists())
        assert row.distributions[name] * 1e6 == pytest.approx(size)


def test_disk_counts_this_project_however_it_is_installed() -> None:
    import edge_sdk

    sources = Path(edge_sdk.__file__).parent.rglob("*.py")
    size = sum(path.stat().st_size for path in sources)
    assert measure_disk("onnx").distributions["tessera-fl"] * 1e6 >= size


@pytest.mark.parametrize(
    ("extras", "present", "absent"),
    [
        (set(), {"numpy", "psutil", "paho-mqtt"}, {"onnxruntime", "torch"}),
        ({"onnx"}, {"numpy", "onnxruntime", "protobuf"}, {"torch", "rich", "pip", "setuptools"}),
        ({"torch"}, {"numpy", "torch", "sympy", "mpmath"}, {"onnxruntime", "setuptools"}),
        ({"bench"}, {"torch", "onnxruntime", "rich", "pygments"}, {"pytest"}),
    ],
)
def test_required_distributions_follow_the_extras(
    extras: set[str], present: set[str], absent: set[str]
) -> None:
    found = set(required("tessera-fl", extras))
    assert "tessera-fl" in found
    assert present <= found
    assert not absent & found


def test_environment_that_is_not_installed_is_refused() -> None:
    with pytest.raises(FigureError, match="no-such-distribution is not installed"):
        required("no_such.distribution", set())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--families", "mpl"], "unknown family 'mpl'; choose from mlp, "),
    ],
)
def test_footprint_refuses_nonsense_before_it_measures(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["footprint", *arguments]) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert "memory" not in printed.err


def test_interrupted_footprint_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    said = interrupted(["footprint"], "memory mlp", tmp_path)
    assert said == ["tessera-bench: interrupted"]
