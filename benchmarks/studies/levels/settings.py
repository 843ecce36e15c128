"""Settings of the study: a data set, a model for it, and a skewed split over devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.data import Dataset, DatasetError, load_data
from benchmarks.models import TextClassifier, ViT, cnn, resnet, sensor_cnn
from coordinator.simulate.partitions import dirichlet_parts
from coordinator.task.task import Task, make_task
from coordinator.task.tracing.norms import NORMS, decouple_norms
from edge_sdk.data.arrays import ArrayData
from edge_sdk.protocol.streams import stream

GROUPS = 4
ALPHA = 0.3
"""Skew of data without owners: the proportions of a class over devices are drawn from Dir(0.3)."""
LEAST = 32
"""Fewest samples of a device."""


def sensor_depthwise(channels: int = 48) -> nn.Module:
    """Depthwise-separable 1-D blocks with BatchNorm, for windows of 9 sensor channels × 128."""

    def separable(stride: int) -> list[nn.Module]:
        return [
            nn.Conv1d(channels, channels, 5, stride, 2, groups=channels, bias=False),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 1, bias=False),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
        ]

    return nn.Sequential(
        nn.Conv1d(9, channels, 5, 2, 2, bias=False),
        nn.BatchNorm1d(channels),
        nn.ReLU(),
        *separable(2),
        *separable(2),
        *separable(1),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(channels, 6),
    )


def mobile_net(norm: Callable[[int], nn.Module]) -> nn.Module:
    """MobileNet's depthwise-separable blocks for 32×32 images."""

    def separable(before: int, after: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(before, before, 3, stride, 1, groups=before, bias=False),
            norm(before),
            nn.ReLU6(),
            nn.Conv2d(before, after, 1, bias=False),
            norm(after),
            nn.ReLU6(),
        ]

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        norm(32),
        nn.ReLU6(),
        *separable(32, 64, 1),
        *separable(64, 96, 2),
        *separable(96, 96, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


def tight_cnn() -> nn.Module:
    """Three 3×3 convolutions with BatchNorm, of 8, 16 and 16 channels, for 28×28 images."""

    def convolution(before: int, after: int, stride: int) -> list[nn.Module]:
        return [
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *convolution(1, 8, 2),
        *convolution(8, 16, 2),
        *convolution(16, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def _groups_of_four(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _nothing(_channels: int) -> nn.Module:
    return nn.Identity()


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSetting:
    """A data set, a model, and how much of both a run uses."""

    folder: str
    """Folder of the data set, below `--data`."""
    make: Callable[[], nn.Module]
    devices: int
    rounds: int
    """Rounds of everybody at full level; other ways get the rounds of the same energy."""
    steps: int = 10
    batch_size: int = 32
    rates: tuple[float, ...] = (0.02, 0.06, 0.2)
    """Learning rates to choose from, on validation data."""
    momentum: float = 0.9
    train_samples: int | None = None
    """Training samples to use; None: all."""

    def task(self, data: Dataset, seed: int, *, decoupled: bool = False) -> Task:
        """Make the task with the initial weights of a seed.

        `decoupled`: every level has norms of its own; a model without norms stays as it is.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        if decoupled and any(isinstance(each, NORMS) for each in model.modules()):
            model = decouple_norms(model, GROUPS)
        example = (
            torch.zeros(2, *data.shape, dtype=torch.int64)
            if data.vocabulary
            else torch.zeros(2, *data.shape)
        )
        return make_task(model, example, groups=GROUPS)

    def shares(self, data: Dataset, seed: int) -> list[ArrayData]:
        """Deal out the training data: one person one device, or Dirichlet by class."""
        draws, train = stream(seed, "levels", "shares"), data.train
        if data.owners is not None:
            keep = draws.permutation(np.unique(data.owners))[: self.devices]
            rows = [np.flatnonzero(data.owners == person) for person in keep]
        else:
            some = np.arange(len(train))
            if self.train_samples is not None:
                some = draws.permutation(len(train))[: self.train_samples]
            parts = dirichlet_parts(
                train.targets[some], self.devices, draws, alpha=ALPHA, least=LEAST
            )
            rows = [some[part] for part in parts]
        return [
            ArrayData(tuple(each[part] for each in train.inputs), train.targets[part])
            for part in rows
        ]


_BATCH_NORM: Callable[[int], nn.Module] = nn.BatchNorm2d

SETTINGS: dict[str, LevelSetting] = {
    "har-cnn": LevelSetting(folder="uci_har", make=sensor_cnn, devices=12, rounds=25),
    "har-depthwise-bn": LevelSetting(
        folder="uci_har", make=sensor_depthwise, devices=12, rounds=25
    ),
    "har-tight": LevelSetting(
        folder="uci_har", make=partial(sensor_depthwise, 12), devices=12, rounds=60
    ),
    "fmnist-tight": LevelSetting(
        folder="fashion_mnist",
        make=tight_cnn,
        devices=12,
        rounds=100,
        rates=(0.06, 0.2),
        train_samples=12_000,
    ),
    "fmnist-cnn": LevelSetting(
        folder="fashion_mnist",
        make=partial(cnn, 1, 28),
        devices=12,
        rounds=20,
        train_samples=12_000,
    ),
    **{
        f"cifar-resnet8-{name}": LevelSetting(
            folder="cifar10",
            make=partial(resnet, norm, (16, 32, 64), 1),
            devices=10,
            rounds=25,
            train_samples=10_000,
        )
        for name, norm in (("bn", _BATCH_NORM), ("gn", _groups_of_four), ("none", _nothing))
    },
    **{
        f"cifar-mobile-{name}": LevelSetting(
            folder="cifar10",
            make=partial(mobile_net, norm),
            devices=10,
            rounds=rounds,
            rates=(0.06, 0.2, 0.6),
            train_samples=20_000,
        )
        for name, norm, rounds in (
            ("bn", _BATCH_NORM, 40),
            ("gn", _groups_of_four, 30),
            ("none", _nothing, 30),
        )
    },
    "cifar-vit": LevelSetting(
        folder="cifar10",
        make=partial(ViT, depth=2),
        devices=10,
        rounds=40,
        rates=(0.01, 0.03, 0.1),
        train_samples=10_000,
    ),
    "news-text": LevelSetting(
        folder="ag_news",
        make=partial(TextClassifier, 5000, padding=0),
        devices=20,
        rounds=60,
        steps=20,
        rates=(0.06, 0.2, 0.6),
    ),
    "digits-mlp": LevelSetting(
        folder="",
        make=lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        ),
        devices=10,
        rounds=10,
    ),
}
"""Settings by name. In the `tight` ones the model is no larger than its task, so that a quarter of
it is too small; in the others even a quarter has room to spare. `digits-mlp` needs no data but
scikit-learn's digits: it is for `--quick`."""


@cache
def dataset(folder: Path | None) -> Dataset:
    """Load a data set once. Raises `DatasetError`."""
    return load_data(folder)


def data_of(setting: LevelSetting, root: Path | None) -> Dataset:
    """Return the setting's data below a folder of data sets. Raises `DatasetError`."""
    if not setting.folder:
        return dataset(None)
    if root is None or not (root / setting.folder).is_dir():
        where = "--data is not given" if root is None else f"{root} has no such folder"
        raise DatasetError(f"data set {setting.folder!r}: {where}")
    return dataset(root / setting.folder)
