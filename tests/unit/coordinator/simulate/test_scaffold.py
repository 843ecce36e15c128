"""SCAFFOLD against a loop as the paper prints it: weights and variates, round by round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from coordinator.aggregate.model import GlobalModel
from coordinator.aggregate.rules import make_rule
from coordinator.masks import make_masks
from coordinator.rounds.report import RoundReport
from coordinator.rounds.synchronous import RoundsConfig
from coordinator.simulate.federation import Federation, Member
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.encoding.encoding import Encoding
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.protocol.streams import stream
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import random_data

SEED, STEPS, RATE, SERVER_RATE = 5, 4, 0.2, 0.75
NAMES = tuple(f"device-{number}" for number in range(6))

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )


@pytest.fixture(scope="module")
def task(model: nn.Module) -> Task:
    return make_task(model, torch.randn(4, 6), groups=4)


@pytest.fixture(scope="module")
def data() -> dict[str, ArrayData]:
    random = np.random.default_rng(2)
    return {name: random_data(random, 30) for name in NAMES}


def run_of(
    task: Task,
    data: Mapping[str, ArrayData],
    *,
    up: str = "fp32",
    down: str = "fp32",
    rounds: int = 6,
    level: float = 1.0,
    **local: Any,
) -> Federation:
    config = RoundsConfig(
        plan=task.plan,
        rule=make_rule("scaffold", server_rate=SERVER_RATE),  # type: ignore[arg-type]
        masks=make_masks("random"),
        local_rule=LocalRule(learning_rate=RATE, **local),
        rounds=rounds,
        steps=STEPS,
        batch_size=8,
        min_devices=len(NAMES),
        participants=3,
        seed=SEED,
        up=Encoding.parse(up),
    )
    model = GlobalModel(
        task.plan, task.weights, task.buffers, encoding=Encoding.parse(down), seed=SEED
    )
    members = [Member(name, Policy(level=level), data[name]) for name in NAMES]
    return Federation(config, model, lambda: TorchBackend(task), members)


class Printed:
    """Algorithm 1 of the paper with option II, on whole models."""

    def __init__(self, model: nn.Module, data: Mapping[str, ArrayData]) -> None:
        self._model, self._data = model, data
        self.x: Tensors = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.c: Tensors = {name: torch.zeros_like(each) for name, each in self.x.items()}
        self.own = {device: {n: torch.zeros_like(t) for n, t in self.x.items()} for device in data}

    def round(self, number: int, sampled: list[str]) -> None:
        moved = {name: torch.zeros_like(each) for name, each in self.x.items()}
        varied = {name: torch.zeros_like(each) for name, each in self.x.items()}
        for device in sampled:
            y, c_i = {name: each.clone() for name, each in self.x.items()}, self.own[device]
            draws = stream(SEED, device, number, "batches")
            for batch in self._data[device].batches(STEPS, 8, draws):
                grads = self._gradients(y, batch.inputs[0], batch.targets)
                for name in y:
                    y[name] = y[name] - RATE * (grads[name] + self.c[name] - c_i[name])
            for name in y:
                new = c_i[name] - self.c[name] + (self.x[name] - y[name]) / (STEPS * RATE)
                varied[name] += new - c_i[name]
                moved[name] += y[name] - self.x[name]
                c_i[name] = new
        for name in self.x:
            self.x[name] = self.x[name] + SERVER_RATE * moved[name] / len(sampled)
            share = len(sampled) / len(self.own)
            self.c[name] = self.c[name] + share * varied[name] / len(sampled)

    def _gradients(self, weights: Tensors, inputs: object, targets: object) -> Tensors:
        leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
        outputs = functional_call(self._model, leaves, (torch.as_tensor(inputs),))
        loss = nn.functional.cross_entropy(outputs, torch.as_tensor(targets))
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def flat(self, task: Task, values: Tensors) -> np.ndarray:
        return task.plan.flatten({name: each.numpy() for name, each in values.items()})


def trained(report: RoundReport) -> list[str]:
    return [each.device for each in report.devices if each.level is not None]


def test_scaffold_is_the_algorithm_as_printed(
    model: nn.Module, task: Task, data: dict[str, ArrayData]
) -> None:
    """Three of six devices a round; without the variates, a round differs by per cents."""
    printed, federation = Printed(model, data), run_of(task, data)
    start, seen = federation.model.theta.copy(), set[str]()
    for report in federation.run():
        assert len(trained(report)) == 3
        seen |= {*trained(report)}
        printed.round(report.round, trained(report))
        expected = printed.flat(task, printed.x)
        moved = float(np.abs(expected - start).max())
        np.testing.assert_allclose(federation.model.theta, expected, atol=2e-6 * max(1.0, moved))
        assert federation.model.control is not None
        control = printed.flat(task, printed.c)
        np.testing.assert_allclose(federation.model.control, control, atol=2e-6)
    assert seen == set(NAMES)
    assert np.abs(control).max() > 0.01


@pytest.mark.parametrize(("up", "down", "level"), [("int8", "int8", 1.0), ("fp16", "fp32", 0.5)])
def test_sum_of_variates_is_that_of_the_devices(
    task: Task, data: dict[str, ArrayData], up: str, down: str, level: float
) -> None:
    """Whatever rounding on the wire does to movements and to c, and with submodels too."""
    federation = run_of(task, data, up=up, down=down, level=level, rounds=8)
    for _ in federation.run():
        pass
    plan, total = task.plan, np.zeros(task.plan.parameters)
    zeros = plan.select(np.zeros(plan.parameters, dtype=np.float32), plan.full_groups())
    for device in federation._devices.values():
        variates = device.wake()._variates
        variates.settle(8, used=True)  # the run is over before the last verdicts arrive
        total -= variates.correction(9, zeros).values
    assert federation.model.control is not None
    assert np.abs(total).max() > 0.01
    np.testing.assert_allclose(federation.model.control * len(NAMES), total, atol=1e-5)


def test_gradients_are_clipped_once_they_are_corrected(
    task: Task, data: dict[str, ArrayData]
) -> None:
    """So the bound on movements holds, and nobody is refused."""
    federation = run_of(task, data, clip_norm=0.05)
    for report in federation.run():
        assert len(trained(report)) == 3
        assert not [each.reason for each in report.devices if "long" in each.reason]


def test_bytes_of_the_variate_are_counted(task: Task, data: dict[str, ArrayData]) -> None:
    report = next(run_of(task, data).run())
    down = {each.bytes_down for each in report.devices if each.level is not None}
    assert min(down) >= 2 * 4 * task.plan.parameters
