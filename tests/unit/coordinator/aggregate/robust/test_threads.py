"""Work in the threads of a pool: results, errors, and who waits while the disk is full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.aggregate.memory import DiskMemory, MemoryConfig, MemoryType
from coordinator.aggregate.optimizer import ServerOptimizer
from coordinator.aggregate.robust.threads import side_by_side
from coordinator.run.folder import CHECKPOINTS, Checkpoint
from coordinator.run.moments import DiskMoments
from coordinator.service.aside import Aside, AtOnce, InThreads
from edge_sdk.program import files
from edge_sdk.program.files import DiskFull, waiting_for_room, write_whole
from tests.contract.memory.oracle import PLAN, movement
from tests.waiting import HANGS_S


class FullOs:
    """The system's calls; threads of a pool find the disk full until somebody waited twice."""

    def __init__(self) -> None:
        self.waited: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pwrite(self, *arguments: Any) -> int:
        self._find_room()
        return os.pwrite(*arguments)

    def write(self, *arguments: Any) -> int:
        self._find_room()
        return os.write(*arguments)

    def _find_room(self) -> None:
        pooled = threading.current_thread().name.startswith(("memory", "ThreadPool", "pool"))
        if pooled and len(self.waited) < 2:
            raise OSError(errno.ENOSPC, "full")

    def wait(self, _: DiskFull) -> None:
        self.waited.append(threading.current_thread())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullOs:
    found = FullOs()
    monkeypatch.setattr(files, "os", found)
    return found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3, "pool") as made:
        yield made


def test_results_come_in_the_order_of_the_works(pool: ThreadPoolExecutor) -> None:
    last = threading.Event()

    def number(which: int) -> int:
        if which == 2:
            last.set()
        assert last.wait(HANGS_S)
        return which

    assert side_by_side(pool, [partial(number, each) for each in range(3)]) == [0, 1, 2]
    assert side_by_side(pool, list[Callable[[], int]]()) == []


def test_first_error_is_raised_once_all_have_ended(pool: ThreadPoolExecutor) -> None:
    failed, ended = threading.Event(), list[int]()

    def work(number: int) -> None:
        if number == 1:
            failed.set()
            raise KeyError("first")
        assert failed.wait(HANGS_S)
        ended.append(number)

    with pytest.raises(KeyError, match="first"):
        side_by_side(pool, [partial(work, number) for number in range(500)])
    assert 0 in ended


def test_thread_that_began_the_work_waits_for_room(
    pool: ThreadPoolExecutor, disk: FullOs, tmp_path: Path
) -> None:
    works = [partial(write_whole, tmp_path / name, b"content") for name in "abcdef"]
    with waiting_for_room(disk.wait):
        side_by_side(pool, works)
    assert set(disk.waited) == {threading.current_thread()}
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcdef")


def test_work_fails_where_nobody_waits_or_waiting_ends(
    pool: ThreadPoolExecutor, disk: FullOs, tmp_path: Path
) -> None:
    def give_up(full: DiskFull) -> None:
        raise full

    works = [partial(write_whole, tmp_path / name, b"content") for name in "abcdef"]
    with pytest.raises(DiskFull):
        side_by_side(pool, works)
    with pytest.raises(DiskFull), waiting_for_room(give_up):
        side_by_side(pool, works)
    assert disk.waited == []


@pytest.mark.parametrize("aside", [AtOnce(), InThreads()])
@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_memory_with_several_threads_waits_for_room(
    aside: Aside, kind: MemoryType, disk: FullOs, tmp_path: Path
) -> None:
    config = MemoryConfig(memory_type=kind, threads=2)
    memory = DiskMemory(tmp_path / "memory", PLAN, config, reserve_bytes=0)
    part = movement("ada", 1, [0, 1, 2, 3], seed=1)
    part.blocks.values.flags.writeable = False
    memory.advance(1)

    def write() -> threading.Thread:
        memory.write([part])
        memory.prepare()
        return threading.current_thread()

    aside.attend(lambda: None, disk.wait)
    with waiting_for_room(disk.wait):  # as the loop's own steps have it
        worker = aside.begin(write).result(HANGS_S)
    memory.commit()
    assert set(disk.waited) == {worker}
    (entry,) = memory.recall("ada")
    assert np.allclose(entry.blocks.values, part.blocks.values, atol=0.05)
    memory.close()


@pytest.mark.parametrize("aside", [AtOnce(), InThreads()])
def test_moments_with_several_threads_wait_for_room(
    aside: Aside, disk: FullOs, tmp_path: Path
) -> None:
    (tmp_path / CHECKPOINTS).mkdir()
    optimizer = ServerOptimizer(name="momentum")
    first = Checkpoint.first(PLAN, np.zeros(PLAN.parameters, np.float32), {})
    moments = DiskMoments(tmp_path, PLAN, optimizer, first)
    moved = np.ones(PLAN.parameters, np.float32)
    blocks = np.ones(PLAN.block_count, dtype=bool)

    def step() -> threading.Thread:
        optimizer.step(PLAN, moved, blocks, moments, round=1, threads=2)
        return threading.current_thread()

    aside.attend(lambda: None, disk.wait)
    with waiting_for_room(disk.wait):
        worker = aside.begin(step).result(HANGS_S)
    assert set(disk.waited) == {worker}
    assert moments.current[0].tolist() == [1.0] * PLAN.parameters
