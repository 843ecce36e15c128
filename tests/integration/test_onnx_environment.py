"""A device trains without torch: in an environment that has only what the `onnx` extra installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import Batch
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.layout import Array
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Job
from edge_sdk.train.torch import TorchBackend
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import sys
sys.meta_path.insert(0, Absent())
"""
DEVICE = """
import importlib, sys
from pathlib import Path

for absent, cause in (("torch", "torch"), ("onnx", "onnx"), ("coordinator.task.task", "torch")):
    try:
        importlib.import_module(absent)
    except ModuleNotFoundError as error:
        assert error.name == cause, error
    else:
        raise AssertionError(f"{absent} can be imported")

import numpy as np
from edge_sdk.protocol.task.codec import decode_manifest
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.plan.codec import decode_plan
from edge_sdk.protocol.streams import stream
from edge_sdk.train.backend import Batch, Job
from edge_sdk.train.onnx import OnnxBackend

folder = Path(sys.argv[1])
plan = decode_plan((folder / "plan").read_bytes())
manifest = decode_manifest((folder / "manifest").read_bytes())
files = {path.stem: path.read_bytes() for path in folder.glob("*.onnx")}
data = np.load(folder / "data.npz")
job = Job(
    groups={axis.name: (0, 2) for axis in plan.axes},
    weights={tensor.name: data["w:" + tensor.name] for tensor in plan.tensors},
    buffers={buffer.name: data["b:" + buffer.name] for buffer in plan.buffers},
    rule=LocalRule(learning_rate=0.1, momentum=0.5, rescale=0.5),
    mask_stream=stream(1, "masks"),
)
batches = [Batch((x,), y) for x, y in zip(data["x"], data["y"])]
trained = OnnxBackend(plan, manifest, files).train(job, batches)
np.savez(folder / "movement.npz", **trained.movement)
np.savez(folder / "statistics.npz", **trained.statistics)
"""
RULE = LocalRule(learning_rate=0.1, momentum=0.5, rescale=0.5)


@pytest.fixture(scope="module")
def task() -> Task:
    """A convolution, batch statistics and dropout; no kinks, so that rounding stays rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Dropout(0.3), nn.Linear(72, 8), nn.Tanh(), nn.Linear(8, 3),
        )  # fmt: skip
        return make_task(model, torch.randn(4, 2, 6, 6), groups=4)


def job_of(task: Task) -> Job:
    """What `DEVICE` trains."""
    groups = {axis.name: (0, 2) for axis in task.plan.axes}
    return Job(
        groups=groups,
        weights=task.plan.cut(task.weights, groups),
        buffers=task.plan.cut_buffers(task.buffers, groups),
        rule=RULE,
        mask_stream=stream(1, "masks"),
    )


@pytest.fixture(scope="module")
def data() -> tuple[Array, Array]:
    random = np.random.default_rng(4)
    return random.normal(size=(5, 8, 2, 6, 6)).astype(np.float32), random.integers(0, 3, (5, 8))


@pytest.fixture(scope="module")
def sent(task: Task, data: tuple[Array, Array], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a device has: plan, manifest, graphs and weights as bytes, and its own data."""
    folder = tmp_path_factory.mktemp("sent")
    graphs, job = compile_graphs(task), job_of(task)
    (folder / "plan").write_bytes(task.plan.encoded)
    (folder / "manifest").write_bytes(graphs.manifest.encoded)
    for name, content in graphs.files.items():
        (folder / f"{name}.onnx").write_bytes(content)
    arrays = {f"w:{name}": array for name, array in job.weights.items()}
    arrays |= {f"b:{name}": array for name, array in job.buffers.items()}
    np.savez(folder / "data.npz", **arrays, x=data[0], y=data[1])  # type: ignore[arg-type]
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment, made as a device's owner makes it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    constraints = f"--constraint={ROOT / 'scripts' / 'constraints.txt'}"
    # What builds the project is asked for first and alone: that it is not to be had says that
    # there is no package index here, and nothing about the project.
    reached = pip(python, "--retries=0", "--timeout=15", constraints, "setuptools")
    if reached.returncode:
        said = reached.stderr.strip()[-500:]
        reason = f"pip cannot install setuptools, so no index is in reach: {said}"
        pytest.skip(reason)
    # From a copy: a build leaves files beside the sources.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("edge_sdk", "coordinator", "benchmarks", "devices"):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    done = pip(python, constraints, "--no-build-isolation", f"{source}[onnx]")
    assert done.returncode == 0, done.stderr
    return python


def clean_environ() -> dict[str, str]:
    """Without what would lend a child this process's packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the pip of this interpreter: the environment then has nothing but what it needs."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    return subprocess.run(
        [*command, "--disable-pip-version-check", *arguments],
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )


def assert_trained_as_torch(sent: Path, task: Task, data: tuple[Array, Array]) -> None:
    batches = [Batch((inputs,), targets) for inputs, targets in zip(*data, strict=True)]
    wanted = TorchBackend(task).train(job_of(task), batches)
    largest = max(np.abs(array).max() for array in wanted.movement.values())
    assert largest > 0.01
    for file, arrays, bound in (
        ("movement.npz", wanted.movement, 1e-5 * largest),
        ("statistics.npz", wanted.statistics, 1e-5),
    ):
        with np.load(sent / file) as got:
            assert set(got) == set(arrays)
            for name, array in arrays.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=bound, err_msg=name)
        (sent / file).unlink()


def test_environment_of_the_onnx_extra_trains_as_torch_does(
    environment: Path, sent: Path, task: Task, data: tuple[Array, Array]
) -> None:
    subprocess.run(
        [environment, "-I", "-W", "error", "-c", DEVICE, sent],
        cwd=sent,
        env=clean_environ(),
        check=True,
        timeout=HANGS_S,
    )
    assert_trained_as_torch(sent, task, data)


def test_device_that_cannot_import_torch_trains_as_torch_does(
    sent: Path, task: Task, data: tuple[Array, Array]
) -> None:
    """The same without a new environment, so that it is shown where no package index is."""
    subprocess.run(
        [sys.executable, "-c", BLOCKED + DEVICE, sent], cwd=ROOT, check=True, timeout=HANGS_S
    )
    assert_trained_as_torch(sent, task, data)
