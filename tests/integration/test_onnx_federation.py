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

from coordinator.simulate.demo.digits import deal, load_digits
from coordinator.simulate.federation import Federation, Member
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.train.backend import Backend
from edge_sdk.train.inference import Predictor
from edge_sdk.train.onnx import OnnxBackend
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import make_federation, random_data


class Residual(nn.Module):
    """A hidden layer beside the value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.inner(x)
        return out


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


def test_federation_of_devices_with_one_two_and_four_blocks_learns() -> None:
    """Digits, by depth: every block is trained, and what comes out is better than any guess."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Residual() for _ in range(4)]
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *blocks, nn.Linear(16, 10))
        task = make_task(model, torch.randn(2, 1, 8, 8), regions="depth")
    made = compile_graphs(task, levels=(1.0, 0.5, 0.25))
    digits = load_digits(3)
    levels = {"large": 1.0, "middle": 0.5, "other": 0.5, "small": 0.25}
    shares = deal(digits.train, list(levels), 3)
    run = make_federation(
        task,
        [Member(name, Policy(level=levels[name]), shares[name]) for name in levels],
        lambda: OnnxBackend(task.plan, made.manifest, made.files),
        rule="ram-fed",
        length=12,
        mask="coverage",
        local_rule=LocalRule(learning_rate=0.1, momentum=0.5),
        steps=10,
        batch_size=16,
        min_devices=4,
        seed=3,
    )
    start = run.model.theta.copy()
    reports = list(run.run())
    sizes = {each.device: each.bytes_up for each in reports[0].devices}
    one = sum(parameter.numel() for parameter in blocks[0].parameters())
    assert sizes["large"] - sizes["middle"] == pytest.approx(2 * 4 * one, abs=64)
    assert sizes["middle"] - sizes["small"] == pytest.approx(4 * one, abs=64)
    assert min(report.coverage_min for report in reports) >= 1
    moved = np.add.reduceat(run.model.theta != start, task.plan.block_offsets[:-1])
    assert moved.all()
    predictor = Predictor(task.plan, made.manifest, made.files)
    model_now = run.model
    outputs = predictor.predict(model_now.weights, model_now.buffers, digits.test.inputs)
    assert (outputs.argmax(1) == digits.test.targets).mean() > 0.8
