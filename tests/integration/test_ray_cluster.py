"""Fleets trained on a real Ray cluster of several nodes, all on this machine."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

import edge_sdk
from coordinator.aggregate.rules import RULES
from coordinator.errors import CoordinatorError
from coordinator.masks import make_masks
from coordinator.simulate.fleet.engines.connection import load_ray
from coordinator.simulate.fleet.engines.engine import PendingCohort, Submit, TrainingKit
from coordinator.simulate.fleet.engines.ray import RayEngine
from coordinator.simulate.fleet.hands import Cohort
from coordinator.simulate.fleet.population import DeviceKind, DevicePopulation
from edge_sdk.decide.decision import Policy
from edge_sdk.machine.board import find_board
from tests.unit.coordinator.service.service_world import rounds_config
from tests.unit.coordinator.simulate.fleet.test_simulation import pis, told, trained
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'tessera-fl[ray]'"
)

STORE_BYTES = 80 * 2**20
POPULATION = DevicePopulation(
    kinds=(
        pis(5, policy=Policy(level=0.5)),
        DeviceKind(board=find_board("raspberry_pi_5"), count=4, latency_s=0.3),
    )
)
COHORTS = 5
"""Cohorts of two devices in a round of nine."""
CONFIG = rounds_config(
    rule=RULES["ram-fed"](), masks=make_masks("random"), min_devices=9, rounds=3, steps=2
)


class Grid:
    """A cluster without processors, and nodes with one each."""

    def __init__(self) -> None:
        load_ray()
        from ray.cluster_utils import Cluster

        self._usual = {"object_store_memory": STORE_BYTES, "include_log_monitor": False}
        quick = {
            "health_check_initial_delay_ms": 0,
            "health_check_period_ms": 300,
            "health_check_failure_threshold": 2,
        }
        self.cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "_system_config": quick,
                **self._usual,
            },
        )
        self.address: str = self.cluster.address

    def add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, **self._usual)

    def lose(self, node: Any) -> None:
        """Kill all processes of a node."""
        lost = _family(_raylet(node))
        self.cluster.remove_node(node, allow_graceful=False)
        for each in lost:
            if each.is_running():
                each.kill()

    def processes(self) -> list[psutil.Process]:
        return [
            found
            for node in self.cluster.list_all_nodes()
            for kind in node.all_processes.values()
            for each in kind
            for found in _family(each.process.pid)
        ]


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _raylet(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid


def _workers(node: Any) -> list[psutil.Process]:
    """Processes of a node that train."""
    return [
        each
        for each in _family(_raylet(node))
        if each.is_running() and each.name() in ("ray::IDLE", "ray::train")
    ]


@pytest.fixture
def grid(started: Grid) -> Grid:
    """The cluster, with a node at least."""
    if not started.cluster.worker_nodes:
        started.add()
    return started


@pytest.fixture(scope="module")
def started() -> Iterator[Grid]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        patch = pytest.MonkeyPatch()
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Grid()
        yield made
        there = made.processes()
        made.cluster.shutdown()
        _, left = psutil.wait_procs(there, timeout=10)
        for each in left:
            each.kill()
        patch.undo()
    assert not left


class Interfering:
    """A Ray engine that does something when all cohorts of a round are on the cluster."""

    trays = False

    def __init__(self, engine: RayEngine, does: dict[int, Callable[[], None]], grid: Grid) -> None:
        self._engine, self._does, self._grid = engine, does, grid
        self.submitted: list[tuple[int, PendingCohort]] = []

    @contextmanager
    def started(self, kit: TrainingKit) -> Iterator[Submit]:
        with self._engine.started(kit) as submit:

            def together(cohort: Cohort) -> PendingCohort:
                round = cohort.orders[0].round
                first = round not in [each for each, _ in self.submitted]
                if first and round in self._does:
                    self._freeze()
                self.submitted.append((round, submit(cohort)))
                if [each for each, _ in self.submitted].count(round) == COHORTS:
                    self._act(round)
                return self.submitted[-1][1]

            yield together

    def _freeze(self) -> None:
        """Stop the processes that train, so that a cohort is in the middle of each."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At

        ray = load_ray()
        alive = [each for each in ray.nodes() if each["Alive"] and each["Resources"].get("CPU")]
        here = ray.remote(num_cpus=1)(lambda: None)
        ray.get(
            [here.options(scheduling_strategy=At(each["NodeID"], False)).remote() for each in alive]
        )
        for node in self._grid.cluster.worker_nodes:
            for each in _workers(node):
                each.suspend()

    def _act(self, round: int) -> None:
        if round not in self._does:
            return
        until(lambda: not load_ray().available_resources().get("CPU"), every_s=0.05)
        assert not [each for each, task in self.submitted if each == round and task.done()]
        self._does[round]()
        for node in self._grid.cluster.worker_nodes:
            for each in _workers(node):
                each.resume()


def test_lost_process_and_lost_node_change_no_bit(
    grid: Grid, capfd: pytest.CaptureFixture[str]
) -> None:
    doomed = grid.add()

    def lose_process() -> None:
        for each in _workers(doomed):
            each.kill()

    does = {2: lose_process, 3: lambda: grid.lose(doomed)}
    engine = Interfering(RayEngine(grid.address), does, grid)
    capfd.readouterr()
    digest, rounds = trained(POPULATION, CONFIG, engine=engine, cohort=2)
    assert capfd.readouterr() == ("", "")
    assert doomed not in grid.cluster.worker_nodes
    alone, others = trained(POPULATION, CONFIG, cohort=2)
    together, _ = trained(POPULATION, CONFIG, processes=2, cohort=2)
    assert digest == alone == together
    assert [told(each) for each in rounds] == [told(each) for each in others]


def test_cluster_outlives_an_interrupted_simulation(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Event().wait(0.1)

    monkeypatch.setenv("RAY_ADDRESS", grid.address)
    before = signal.getsignal(signal.SIGTERM)
    engine = Interfering(RayEngine("auto"), {2: interrupt}, grid)
    with pytest.raises(KeyboardInterrupt):
        trained(POPULATION, CONFIG, engine=engine, cohort=2)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not load_ray().is_initialized()
    assert all(each.is_running() for each in grid.processes())


def test_connection_of_the_program_is_used_and_kept(grid: Grid) -> None:
    ray = load_ray()
    ray.init(grid.address, log_to_driver=False, configure_logging=False)
    try:
        gone = ray.remote(num_cpus=1)(lambda: time.sleep(1000))
        busy = [gone.remote() for _ in grid.cluster.worker_nodes]
        with pytest.raises(CoordinatorError, match=r"came free in 1 s \(it has 1\)"):
            trained(POPULATION, CONFIG, engine=RayEngine(timeout_s=1.0))
        for each in busy:
            ray.cancel(each, force=True)
        digest, _ = trained(POPULATION, CONFIG, engine=RayEngine())
        assert digest == trained(POPULATION, CONFIG)[0]
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_node_of_another_version_is_refused(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    own = edge_sdk.__version__
    monkeypatch.setattr(edge_sdk, "__version__", "9.9.9")
    with pytest.raises(CoordinatorError, match=f"has tessera-fl {own}: install .* 9.9.9 on every"):
        trained(POPULATION, CONFIG, engine=RayEngine(grid.address))
    assert not load_ray().is_initialized()


def test_cluster_that_loses_all_its_nodes_ends_the_simulation(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_all() -> None:
        for node in list(grid.cluster.worker_nodes):
            grid.lose(node)

    monkeypatch.setattr("coordinator.simulate.fleet.engines.ray.LOOK_S", 0.3)
    engine = Interfering(RayEngine(grid.address, lost_s=1.0), {2: lose_all}, grid)
    with pytest.raises(CoordinatorError, match="has had no processor for 1 s"):
        trained(POPULATION, CONFIG, engine=engine, cohort=2)


def test_own_cluster_gives_the_same_bits_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        before, there = dict(os.environ), psutil.Process().children(recursive=True)
        digest, _ = trained(POPULATION, CONFIG, engine=RayEngine(workers=2))
        assert capfd.readouterr() == ("", "")
        assert dict(os.environ) == before
        assert not list(Path(folder).iterdir())
    assert not (tmp_path / ".ray").exists()
    assert not set(psutil.Process().children(recursive=True)) - set(there)
    assert digest == trained(POPULATION, CONFIG)[0]


def test_address_where_no_cluster_is_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(CoordinatorError, match=f"no Ray cluster answered at {address} in 2 s"):
            trained(POPULATION, CONFIG, engine=RayEngine(address, timeout_s=2.0))
    with pytest.raises(CoordinatorError, match=f"nothing answers at {address}"):
        trained(POPULATION, CONFIG, engine=RayEngine(address))
