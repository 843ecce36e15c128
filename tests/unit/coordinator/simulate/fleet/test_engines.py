"""Engines that cannot start, and nodes of a cluster that do not fit."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest

import edge_sdk
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.simulate.fleet.engines.engine import PendingCohort, Submit, TrainingKit
from coordinator.simulate.fleet.engines.local import AloneEngine, ProcessEngine
from coordinator.simulate.fleet.engines.nodes import NodeFacts, check_nodes
from coordinator.simulate.fleet.engines.ray import RayEngine
from coordinator.simulate.fleet.hands import Cohort
from coordinator.simulate.fleet.population import DevicePopulation
from tests.unit.coordinator.service.service_world import rounds_config
from tests.unit.coordinator.simulate.fleet.test_simulation import pis, trained

POPULATION = DevicePopulation(kinds=(pis(2),))
CONFIG = rounds_config(min_devices=2, rounds=1)
NODE = NodeFacts("one", edge_sdk.__version__, "1.31.1", "AMD EPYC")


def test_nodes_that_are_alike_are_fine(caplog: pytest.LogCaptureFixture) -> None:
    check_nodes([NODE, replace(NODE, host="two")])
    assert not caplog.records


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (replace(NODE, version="0.0.1"), "the node one has tessera-fl 0.0.1: install"),
        (replace(NODE, version=""), "the node one has no tessera-fl: install"),
        (replace(NODE, runtime=""), "the node one has no onnxruntime: install"),
    ],
)
def test_node_that_cannot_train_is_refused(node: NodeFacts, words: str) -> None:
    with pytest.raises(CoordinatorError, match=words):
        check_nodes([replace(NODE, host="two"), node])


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(NODE, processor="Xeon"), "different processors (AMD EPYC, Xeon)"),
        (replace(NODE, runtime="1.23.2"), "different versions of onnxruntime (1.23.2, 1.31.1)"),
    ],
)
def test_nodes_that_may_give_other_bits_are_warned_of(
    other: NodeFacts, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check_nodes([NODE, other])
    assert words in caplog.text


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'tessera-fl\[ray\]'"):
        RayEngine()


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        RayEngine(workers=0)
    with pytest.raises(ConfigError, match="leave the address out"):
        RayEngine("auto", workers=2)
    with pytest.raises(ConfigError, match="an engine has its own"):
        trained(POPULATION, CONFIG, engine=AloneEngine(), processes=2)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:", "http://head:6379"])
def test_address_of_another_form_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="auto or HOST:PORT"):
        RayEngine(address)


class Mortal(ProcessEngine):
    """An engine whose processes are killed as soon as they have work."""

    @contextmanager
    def started(self, kit: TrainingKit) -> Iterator[Submit]:
        with super().started(kit) as submit:

            def fatal(cohort: Cohort) -> PendingCohort:
                pending = submit(cohort)
                for each in psutil.Process().children():
                    with suppress(psutil.NoSuchProcess):  # or a zombie: it is killed already
                        if any("spawn_main" in word for word in each.cmdline()):
                            each.kill()
                return pending

            yield fatal


def test_simulation_ends_with_the_processes_that_train() -> None:
    with pytest.raises(CoordinatorError, match="a process that trains has died"):
        trained(POPULATION, CONFIG, engine=Mortal(2))
