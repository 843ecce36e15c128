"""Deals out a data set: training samples to devices, the others to validation and test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.data.dataset import Dataset, DatasetError
from edge_sdk.data.arrays import ArrayData
from edge_sdk.program.settings import Count, Natural, Within, check_fields
from edge_sdk.protocol.streams import stream

PartitionName = Literal["iid", "dirichlet", "labels", "shards", "key", "pairs", "pair-apart"]
RUN = 20
"""Samples in a row that go to validation or to the test together: neighbours may be alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPartition:
    """A way to deal out samples. Raises `ConfigError`."""

    partition: PartitionName = "iid"
    """Way to deal out the samples: `iid`, evenly; `dirichlet`, each class in drawn proportions;
    `labels`, so many classes each; `shards`, so many pieces of the sorted samples each; `key`, one
    device for each person; `pairs`, pairs of classes, each on neighbouring devices; `pair-apart`,
    one pair on the first tenth of the devices, the others two classes each."""
    alpha: Annotated[float, Within(above=0)] = 0.3
    """Evenness of `dirichlet`: 0.1 is very uneven, 100 even."""
    classes: Count = 2
    """Classes that a device has, with `labels`."""
    shards: Count = 2
    """Shards that a device has, with `shards`."""
    least: Natural = 1
    """Fewest samples of a device."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        """Name the partition with the option that shapes it."""
        match self.partition:
            case "dirichlet":
                return f"dirichlet({self.alpha:g})"
            case "labels":
                return f"labels({self.classes})"
            case "shards":
                return f"shards({self.shards})"
            case name:
                return name

    def deal(
        self,
        labels: NDArray[np.int64],
        devices: int | None,
        random: np.random.Generator,
        owners: NDArray[np.int64] | None = None,
    ) -> list[NDArray[np.int64]]:
        """Return the rows of every device.

        `owners`, the person that each sample is of, are needed for `key`, where `devices` may be
        None for all people; of more people than devices, some are drawn. Raises `DatasetError`
        where there are no owners or too few, `ConfigError` where there are too few samples.
        """
        from coordinator.simulate import budgets, partitions

        if self.partition == "key":
            return self._by_owner(devices, random, owners)
        if devices is None:
            raise DatasetError(f"a partition by {self.partition} needs a number of devices")
        match self.partition:
            case "iid":
                return partitions.iid_parts(labels, devices, random, least=self.least)
            case "dirichlet":
                return partitions.dirichlet_parts(
                    labels, devices, random, alpha=self.alpha, least=self.least
                )
            case "labels":
                return partitions.label_parts(
                    labels, devices, random, classes_each=self.classes, least=self.least
                )
            case "pairs":
                return budgets.high_skew(labels, devices, random).parts
            case "pair-apart":
                return budgets.moderate_skew(labels, devices, random).parts
            case "shards":
                return partitions.shard_parts(
                    labels, devices, random, shards_each=self.shards, least=self.least
                )

    def _by_owner(
        self,
        devices: int | None,
        random: np.random.Generator,
        owners: NDArray[np.int64] | None,
    ) -> list[NDArray[np.int64]]:
        from coordinator.simulate.partitions import key_parts

        if owners is None:
            raise DatasetError(
                "this data set does not say whose samples are whose: choose another partition"
            )
        parts = key_parts(owners, least=self.least)
        if devices is None:
            return parts
        if devices > len(parts):
            raise DatasetError(
                f"{devices} devices are too many for the samples of {len(parts)} people: take at "
                "most as many, or choose another partition"
            )
        kept = np.sort(random.permutation(len(parts))[:devices])
        return [parts[number] for number in kept]


def halves(data: Dataset, seed: int = 0) -> tuple[ArrayData, ArrayData]:
    """Split the data that is not for training into (validation, test), in runs of samples."""
    rest = data.test
    runs = np.arange(len(rest)) // RUN
    chosen: NDArray[np.bool_] = stream(seed, "levels", "halves").random(runs.max() + 1) < 0.5
    first = chosen[runs]
    return _part(rest, first), _part(rest, ~first)


def _part(data: ArrayData, rows: NDArray[np.bool_]) -> ArrayData:
    return ArrayData(tuple(each[rows] for each in data.inputs), data.targets[rows])
