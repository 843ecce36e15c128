"""The task and the phones of a study: data, its model, the shares of the phones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from benchmarks.data import Dataset, fit_images
from benchmarks.models import FAMILIES, Family
from benchmarks.studies.learn.config import DEVICES
from coordinator.simulate.demo.digits import deal, make_model
from coordinator.simulate.demo.emulated import choose_members, emulate_all
from coordinator.simulate.demo.run import BATCH_SIZE, GROUPS
from coordinator.simulate.partitions import key_parts
from coordinator.task.graphs.compilation import compile_graphs
from coordinator.task.graphs.compiled import CompiledGraphs
from coordinator.task.task import Task, make_task
from edge_sdk.data.arrays import ArrayData
from edge_sdk.decide.emulation.emulation import Emulation
from edge_sdk.decide.emulation.fleet import Fleet, find_fleet
from edge_sdk.protocol.streams import stream

FLEET = "phones"
WORK_MACS = 872_832
"""MACs of `sensor-cnn` for one window, for which the fleet's `work` was chosen."""
MODELS = {"uci-har": "sensor-cnn", "idx": "lenet-28", "cifar-10": "cnn", "ag-news": "news"}
"""Family for each format; digits use the demo's model."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """Common parts of all runs of a study."""

    data: Dataset
    model: str
    """The name of its family, or `demo`."""
    make: Callable[[int], nn.Module]
    """Makes a model from its seed."""
    graphs: CompiledGraphs
    fleet: Fleet
    """Fleet whose `work` is scaled so that the whole model takes as long as `sensor-cnn` does."""

    def task(self, seed: int) -> Task:
        """Make the task with the initial weights of a seed."""
        return _task(self.make(seed), self.data)

    def phones(self) -> dict[str, Emulation]:
        """Start all phones, by name."""
        return emulate_all(self.fleet, choose_members(self.fleet, self.devices))

    @property
    def devices(self) -> int:
        """Number of phones: one per person if the data has owners."""
        return DEVICES if self.data.owners is None else len(np.unique(self.data.owners))

    def shares(self, names: tuple[str, ...], seed: int) -> dict[str, ArrayData]:
        """Deal out the data. Which person has which phone is drawn for every seed."""
        train, owners = self.data.train, self.data.owners
        if owners is None:
            return deal(train, names, seed)
        people = key_parts(owners)
        order = stream(seed, "learn", "people").permutation(len(people))
        return {
            name: ArrayData(tuple(x[people[one]] for x in train.inputs), train.targets[people[one]])
            for name, one in zip(names, order, strict=True)
        }


def make_setting(data: Dataset) -> Setting:
    """Make the setting for this data. Raises `DatasetError` if the model cannot take it."""
    name = MODELS.get(data.format, "demo")
    make: Callable[[int], nn.Module] = make_model
    if name in FAMILIES:
        family: Family = FAMILIES[name]
        data, make = fit_images(data, family.shape), family.model
    task = _task(make(0), data)
    fleet = find_fleet(FLEET)
    macs = task.plan.submodel_macs(task.plan.all_groups())
    return Setting(
        data,
        name,
        make,
        compile_graphs(task, batch_sizes=(BATCH_SIZE,)),
        replace(fleet, work=fleet.work * WORK_MACS / macs),
    )


def _task(model: nn.Module, data: Dataset) -> Task:
    dtype = torch.int64 if data.vocabulary else torch.float32
    return make_task(model, torch.zeros(2, *data.shape, dtype=dtype), groups=GROUPS)
