"""A federation with a defence: every choice trains, repeats to the bit, and is compared with data
of the coordinator's own where there is some."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.aggregate.robust import Robust, RobustName
from coordinator.errors import ConfigError
from coordinator.simulate.federation import Federation, Member
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.decision import Policy
from edge_sdk.protocol.messages.local_rule import LocalRule
from edge_sdk.train.torch import TorchBackend
from tests.integration.federations import make_federation

LEVELS = (1.0, 0.5, 0.5, 0.25, 1.0)


@pytest.fixture(scope="module")
def task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return make_task(model, torch.randn(4, 6), groups=4)


def samples(seed: int, *, wrong: bool = False) -> ArrayData:
    """Six numbers, and whether the first two are above 0 together."""
    inputs = np.random.default_rng(seed).normal(size=(40, 6)).astype(np.float32)
    return ArrayData((inputs,), ((inputs[:, :2].sum(axis=1) > 0) ^ wrong).astype(np.int64))


def federation(task: Task, robust: Robust, rule: str, **run: Any) -> Federation:
    members = [
        Member(f"device-{number}", Policy(level=level), samples(number, wrong=number == 4))
        for number, level in enumerate(LEVELS)
    ]
    return make_federation(
        task,
        members,
        lambda: TorchBackend(task, threads=1),
        rule=rule,
        mask="coverage",
        length=2,
        run=run,
        local_rule=LocalRule(learning_rate=0.1, momentum=0.5),
        steps=3,
        batch_size=8,
        min_devices=len(LEVELS),
        seed=3,
        robust=robust,
    )


@pytest.mark.parametrize(
    ("name", "rule"), list(zip(get_args(RobustName), 4 * ("ra-fed", "ram-fed"), strict=True))
)
def test_choice_trains_and_repeats_to_the_bit_in_any_number_of_threads(
    task: Task, name: RobustName, rule: str
) -> None:
    robust = Robust(name=name, norm=0.1)
    root = samples(9) if name == "root" else None
    runs = [federation(task, robust, rule, threads=threads, root=root) for threads in (1, 2)]
    before = runs[0].model.theta.copy()
    reports = [list(run.run()) for run in runs]
    assert runs[0].model.digest == runs[1].model.digest
    assert np.isfinite(runs[0].model.theta).all()
    assert (runs[0].model.theta != before).mean() > 0.5
    for first, second in zip(*reports, strict=True):
        assert first.thin_share == second.thin_share
        assert 0 <= first.thin_share < 1


def test_root_needs_data(task: Task) -> None:
    with pytest.raises(ConfigError, match="compares devices with data of yours: give it"):
        list(federation(task, Robust(name="root"), "ra-fed").run())
