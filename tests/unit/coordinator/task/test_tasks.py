"""Tasks: losses against torch's own, and what a task remembers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.errors import ConfigError
from coordinator.task.task import LOSSES, make_task
from edge_sdk.protocol.task.data_spec import ArraySpec, DataSpec
from edge_sdk.protocol.task.description import InputDescription

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
    with pytest.raises(ConfigError, match="'hinge'; choose one of cross-entropy, mse"):
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


# -- what data a task wants ---------------------------------------------------------------------


class Tagger(nn.Module):
    """A class for each of five tokens, from their ids, those of their tags, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(30, 8), nn.EmbeddingBag(7, 8)
        self.more, self.odd = nn.Embedding(20, 8), nn.Embedding(40, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, tags: Tensor, others: Tensor, numbers: Tensor) -> Tensor:
        words = self.words(ids[:, 0]) + self.more(ids.permute(0, 2, 1)[..., 1])
        words = words + self.odd(others + 1) + self.tags(tags.int())[:, None] + numbers[..., None]
        out: Tensor = self.head(torch.tanh(words)).permute(0, 2, 1)
        return out


def test_data_of_inputs_says_what_they_are_looked_up_in() -> None:
    ids, tags = torch.zeros(2, 2, 5, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.uint8)
    others, numbers_ = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(2, 5)
    task = make_task(Tagger(), (ids, tags, others, numbers_), groups=2)
    assert task.data.inputs == (
        ArraySpec("int64", (2, 5), 19),  # the smaller of two tables
        ArraySpec("uint8", (4,), 6),
        ArraySpec("int32", (5,)),  # ids that are computed are not known
        ArraySpec("float32", (5,)),
    )
    assert task.data.targets == ArraySpec("int64", (5,), 2)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("cross-entropy", ArraySpec("int64", (), 2)),
        ("mse", ArraySpec("float32", (3,))),
        ("bce-with-logits", ArraySpec("float32", (3,), 1)),
    ],
)
def test_data_of_targets_follows_from_the_loss(loss: str, targets: ArraySpec) -> None:
    task = make_task(model(), torch.ones(2, 4), loss=loss, groups=4)
    assert task.data == DataSpec((ArraySpec("float32", (4,)),), targets)
    assert task.loss_name == loss


def test_data_of_targets_is_the_examples_where_they_are_given() -> None:
    def own(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets.sum(1)).abs()

    examples = classes(2, 7)
    task = make_task(model(), torch.ones(2, 4), loss=own, groups=4, example_targets=examples)
    # The largest of a few examples says nothing of the largest there is.
    assert task.data.targets == ArraySpec("int64", (7,))
    assert task.loss_name == "custom"
    small = classes(2).to(torch.uint8)
    task = make_task(model(), torch.ones(2, 4), groups=4, example_targets=small)
    assert task.data.targets == ArraySpec("uint8", (), 2)


def test_data_that_is_not_known_is_told() -> None:
    task = make_task(model(), torch.ones(2, 4), loss=lambda o, t: (o - t).abs().mean(1), groups=4)
    with pytest.raises(ConfigError, match="give make_task example_targets"):
        _ = task.data
    flat = nn.Sequential(model(), nn.Linear(3, 1), nn.Flatten(0))
    with pytest.raises(ConfigError, match="cross-entropy needs a score for each class"):
        _ = make_task(flat, torch.ones(2, 4), groups=4).data
    task = make_task(model(), torch.ones(2, 4), groups=4, example_targets=classes(2, 5))
    with pytest.raises(ConfigError, match=r"shape \(5,\) per sample, but cross-entropy .* \(\)"):
        _ = task.data


@pytest.mark.parametrize("targets", [torch.tensor(1), torch.zeros(0, 3)])
def test_task_refuses_examples_that_are_no_batch(targets: Tensor) -> None:
    with pytest.raises(ConfigError, match="example_targets must be a batch"):
        make_task(model(), torch.ones(2, 4), groups=4, example_targets=targets)


def test_task_says_what_its_data_means() -> None:
    meaning = InputDescription(features=tuple("abcd"), mean=(0.5,), deviation=(2.0,))
    task = make_task(model(), numbers(2, 4), groups=4, classes=["x", "y", "z"], inputs=meaning)
    assert task.data.classes == ("x", "y", "z")
    assert task.data.descriptions == (meaning,)
    with pytest.raises(ConfigError, match="2 classes have names, but the task has 3"):
        make_task(model(), numbers(2, 4), groups=4, classes=["x", "y"])
    with pytest.raises(ConfigError, match="window = 9, but a sample is 4"):
        make_task(model(), numbers(2, 4), groups=4, inputs=InputDescription(window=9))
