"""A federation whose devices train shipped graphs, and a device that could not import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

from coordinator.federation import Federation, Member
from coordinator.graphs import CompiledGraphs, compile_graphs
from coordinator.masks import MASKS
from coordinator.model import GlobalModel
from coordinator.rounds import RoundsConfig
from coordinator.rules import RULES
from coordinator.tasks import Task, make_task
from edge_sdk.decide import Policy
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.streams import stream
from edge_sdk.train.backend import Backend, Batch, Job
from edge_sdk.train.data import ArrayData
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend

RULE = LocalRule(learning_rate=0.1, momentum=0.5, rescale=0.5)


@pytest.fixture(scope="module")
def task() -> Task:
    """Batch statistics and dropout; no kinks, so that rounding stays rounding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 8),
            nn.Tanh(), nn.Linear(8, 3),
        )  # fmt: skip
        return make_task(model, torch.randn(4, 6), groups=4)


@pytest.fixture(scope="module")
def graphs(task: Task) -> CompiledGraphs:
    return compile_graphs(task)


def federation(task: Task, backend: Backend) -> Federation:
    """Three devices at three levels, one of them with less data than a batch."""
    random = np.random.default_rng(3)
    members = [
        Member(
            f"device-{number}",
            Policy(level=level),
            ArrayData(
                (random.normal(size=(samples, 6)).astype(np.float32),),
                random.integers(0, 3, size=samples),
            ),
        )
        for number, (level, samples) in enumerate([(1, 40), (0.5, 40), (0.25, 5)])
    ]
    config = RoundsConfig(
        plan=task.plan,
        masks=MASKS["random"],
        rule=RULE,
        rounds=4,
        steps=3,
        batch_size=8,
        min_devices=3,
        seed=3,
    )
    model = GlobalModel(task.plan, task.weights, task.buffers)
    return Federation(config, model, RULES["ra-fed"], backend, members)


def test_federation_on_graphs_equals_federation_on_torch(
    task: Task, graphs: CompiledGraphs
) -> None:
    """Twelve steps of float32: some 1e-6 of the movement; another mask or batch would be 1e-2."""
    runs = [
        federation(task, backend)
        for backend in (
            TorchBackend(task),
            OnnxBackend(task.plan, graphs.manifest, graphs.files),
        )
    ]
    start = runs[0].model.theta.copy()
    reports = [list(run.run()) for run in runs]
    assert [len(each) for each in reports] == [4, 4]
    for there, here in zip(*reports, strict=True):
        for wanted, got in zip(there.devices, here.devices, strict=True):
            assert (got.device, got.level, got.bytes_up) == (
                wanted.device, wanted.level, wanted.bytes_up,
            )  # fmt: skip
            assert got.loss == pytest.approx(wanted.loss, rel=1e-4)
    wanted_model, got_model = (run.model for run in runs)
    largest = np.abs(wanted_model.theta - start).max()
    assert largest > 0.01
    np.testing.assert_allclose(got_model.theta, wanted_model.theta, rtol=0, atol=1e-4 * largest)
    for name, array in wanted_model.buffers.items():
        np.testing.assert_allclose(got_model.buffers[name], array, rtol=1e-4, atol=1e-5)


DEVICE = """
import sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx", "coordinator"):
            raise ImportError(f"{name} is not on this device")

sys.meta_path.insert(0, Absent())

import numpy as np
from edge_sdk.protocol.graph_codec import decode_manifest
from edge_sdk.protocol.local_rule import LocalRule
from edge_sdk.protocol.plan_codec import decode_plan
from edge_sdk.streams import stream
from edge_sdk.train.backend import Batch, Job
from edge_sdk.train.onnx import OnnxBackend

folder = Path(sys.argv[1])
plan = decode_plan((folder / "plan").read_bytes())
manifest = decode_manifest((folder / "manifest").read_bytes())
files = {path.stem: path.read_bytes() for path in folder.glob("*.onnx")}
data = np.load(folder / "data.npz")
groups = {axis.name: (0, 2) for axis in plan.axes}
job = Job(
    groups=groups,
    weights={tensor.name: data["w:" + tensor.name] for tensor in plan.tensors},
    buffers={buffer.name: data["b:" + buffer.name] for buffer in plan.buffers},
    rule=LocalRule(learning_rate=0.1, momentum=0.5, rescale=0.5),
    mask_stream=stream(1, "masks"),
)
batches = [Batch((x,), y) for x, y in zip(data["x"], data["y"])]
np.savez(folder / "movement.npz", **OnnxBackend(plan, manifest, files).train(job, batches).movement)
assert not {"torch", "onnx"} & set(sys.modules)
"""


def test_device_without_torch_trains_the_same(
    task: Task, graphs: CompiledGraphs, tmp_path: Path
) -> None:
    """All it gets are bytes: plan, manifest, graphs, weights and its own data."""
    groups = {axis.name: (0, 2) for axis in task.plan.axes}
    job = Job(
        groups=groups,
        weights=task.plan.cut(task.weights, groups),
        buffers=task.plan.cut_buffers(task.buffers, groups),
        rule=RULE,
        mask_stream=stream(1, "masks"),
    )
    random = np.random.default_rng(4)
    x = random.normal(size=(5, 8, 6)).astype(np.float32)
    y = random.integers(0, 3, size=(5, 8))
    (tmp_path / "plan").write_bytes(task.plan.encoded)
    (tmp_path / "manifest").write_bytes(graphs.manifest.encoded)
    for name, data in graphs.files.items():
        (tmp_path / f"{name}.onnx").write_bytes(data)
    arrays = {f"w:{name}": array for name, array in job.weights.items()}
    arrays |= {f"b:{name}": array for name, array in job.buffers.items()}
    np.savez(tmp_path / "data.npz", **arrays, x=x, y=y)  # type: ignore[arg-type]

    subprocess.run([sys.executable, "-c", DEVICE, tmp_path], check=True, timeout=120)

    batches = [Batch((inputs,), targets) for inputs, targets in zip(x, y, strict=True)]
    wanted = TorchBackend(task).train(job, batches).movement
    got = np.load(tmp_path / "movement.npz")
    largest = max(np.abs(array).max() for array in wanted.values())
    assert set(got) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-5 * largest)
