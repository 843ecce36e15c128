"""From the demo to a device: train, save, export, and infer where torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("safetensors")

from coordinator.cli import main
from coordinator.simulate.demo.config import DemoConfig
from coordinator.simulate.demo.digits import load_digits
from coordinator.simulate.demo.run import make_demo

DEVICE = """
import sys
for name in ("torch", "onnx", "safetensors", "coordinator"):
    sys.modules[name] = None
from edge_sdk.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short demo's model and its report."""
    at = tmp_path_factory.mktemp("run")
    command = ["demo", "--in-process", "--rounds", "2", "--devices", "2", "--seed", "3"]
    files = {"--save": "model", "--json": "run.json", "--plot": "run.png"}
    assert main([*command, *(part for o, n in files.items() for part in (o, str(at / n)))]) == 0
    return at


def test_exported_demo_infers_without_torch(run: Path) -> None:
    test = load_digits(3).test
    np.savez(run / "digits.npz", x=test.inputs[0], y=test.targets)
    exported = str(run / "m.onnx")
    assert main(["export", str(run / "model"), "--format", "onnx", "--out", exported]) == 0
    result = subprocess.run(
        [
            sys.executable, "-c", DEVICE, "infer", "--model", exported,
            "--data", run / "digits.npz", "--out", run / "scores.json", "--batch-size", "100",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    last = json.loads((run / "run.json").read_text())["rounds"][-1]
    [reported] = [each["accuracy"] for each in last["levels"] if each["level"] == last["deploy"]]
    assert f"{reported:.2%} of {len(test)}" in result.stdout
    scores = json.loads((run / "scores.json").read_text())
    assert scores["accuracy"] == pytest.approx(reported)
    assert np.shape(scores["outputs"]) == (len(test), 10)


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_demo_starts_from_exported_weights(run: Path, format: str) -> None:
    suffix = {"safetensors": ".safetensors", "torch": ".pt"}[format]
    out = run / f"weights{suffix}"
    assert (
        main(["export", str(run / "model"), "--format", format, "--level", "1", "--out", str(out)])
        == 0
    )
    demo = make_demo(DemoConfig(devices=2, seed=4, backend="torch", init=out))
    digest = json.loads((run / "run.json").read_text())["model_sha256"]
    assert demo.federation.model.digest == digest


def test_demo_does_not_train_what_it_cannot_save(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--rounds", "9999", "--save", str(run / "model")]) == 2
    assert "not empty" in capsys.readouterr().err
