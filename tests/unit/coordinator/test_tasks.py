"""Tasks: losses against torch's own, and what a task remembers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.errors import ConfigError
from coordinator.tasks import LOSSES, make_task

BATCH = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def classes(*shape: int) -> Tensor:
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("name", "reference", "shape", "targets"),
    [
        ("cross-entropy", F.cross_entropy, (BATCH, 3), classes(BATCH)),
        ("cross-entropy", F.cross_entropy, (BATCH, 3, 5), classes(BATCH, 5)),  # a class per token
        ("mse", F.mse_loss, (BATCH,), numbers(BATCH)),
        ("mse", F.mse_loss, (BATCH, 4), numbers(BATCH, 4)),
        ("mse", F.mse_loss, (BATCH, 2, 3), numbers(BATCH, 2, 3)),
        ("bce-with-logits", F.binary_cross_entropy_with_logits, (BATCH,), numbers(BATCH)),
        ("bce-with-logits", F.binary_cross_entropy_with_logits, (BATCH, 4), numbers(BATCH, 4)),
    ],
)
def test_loss_per_sample_has_torchs_mean(
    name: str,
    reference: Callable[[Tensor, Tensor], Tensor],
    shape: tuple[int, ...],
    targets: Tensor,
) -> None:
    outputs = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    losses = LOSSES[name](outputs, targets)
    assert losses.shape == (BATCH,)
    torch.testing.assert_close(losses.mean(), reference(outputs, targets))
    # a sample's loss is its own
    torch.testing.assert_close(losses[2], reference(outputs[2:3], targets[2:3]))


def test_cross_entropy_takes_small_integers() -> None:
    outputs, targets = numbers(BATCH, 3), classes(BATCH)
    wanted = LOSSES["cross-entropy"](outputs, targets)
    assert torch.equal(LOSSES["cross-entropy"](outputs, targets.to(torch.uint8)), wanted)


@pytest.mark.parametrize("name", LOSSES)
def test_task_takes_a_loss_by_name(name: str) -> None:
    assert make_task(model(), torch.ones(2, 4), loss=name, groups=4).loss is LOSSES[name]


def test_task_takes_a_loss_of_ones_own() -> None:
    def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().mean(1)

    assert make_task(model(), torch.ones(2, 4), loss=absolute, groups=4).loss is absolute


def test_task_refuses_an_unknown_loss() -> None:
    with pytest.raises(ConfigError, match="'hinge'; known are cross-entropy, mse, bce-with-logits"):
        make_task(model(), torch.ones(2, 4), loss="hinge", groups=4)


def test_task_remembers_the_weights_it_was_made_with() -> None:
    module = model()
    before = {name: tensor.clone().numpy() for name, tensor in module.state_dict().items()}
    task = make_task(module, torch.ones(2, 4), ratios=(1, 3))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(9)
    remembered = {**task.weights, **task.buffers}
    assert set(remembered) == set(before)
    for name, array in before.items():
        np.testing.assert_array_equal(remembered[name], array)
    assert [axis.groups for axis in task.plan.axes] == [(2, 6)]
    assert task.plan is task.traced.plan
    assert task.train_program is task.traced.train
