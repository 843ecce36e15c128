"""A federation whose devices train shipped graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

from coordinator.simulate.federation import Federation, Member
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.train.backend import Backend
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import make_federation, random_data

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
        Member(f"device-{number}", Policy(level=level), random_data(random, samples))
        for number, (level, samples) in enumerate([(1, 40), (0.5, 40), (0.25, 5)])
    ]
    size: dict[str, Any] = {"steps": 3, "batch_size": 8, "min_devices": 3, "seed": 3}
    return make_federation(task, members, lambda: backend, length=4, local_rule=RULE, **size)


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
