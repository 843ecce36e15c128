"""Work beside the loop: who does it, what comes back, and what the loop does meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aggregate.durability.enumeration import scratch, undisturbed
from benchmarks.aggregate.durability.site import BESIDE, CrashSite, PutOff, Stuck, quiet
from coordinator.aggregate.memory import Memory
from coordinator.rounds.synchronous import RoundPhase
from coordinator.service.aside import AtOnce, InThreads
from coordinator.service.courses.rounds import RoundsCourse
from coordinator.service.service import Service
from edge_sdk.program import files
from edge_sdk.program.files import DiskFull, write_whole


def test_work_at_once_is_done_when_it_was_begun() -> None:
    aside = AtOnce()
    assert aside.begin(lambda: threading.current_thread()).result() is threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        aside.begin(lambda: 1 // 0)


def test_work_in_threads_gives_results_and_errors_and_tells_when_it_is_done() -> None:
    aside, told = InThreads(), threading.Semaphore(0)
    aside.attend(told.release, lambda _: None)
    work: Future[Any] = aside.begin(threading.current_thread)
    assert work.result(60) is not threading.current_thread()
    failing = aside.begin(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert told.acquire(timeout=60)
    assert told.acquire(timeout=60)


def test_work_that_finds_no_room_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking: list[DiskFull] = []

    class FullOs:
        """The system's calls; the disk is full until somebody waited twice."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, handle: int, data: bytes) -> int:
            if len(lacking) < 2:
                raise OSError(errno.ENOSPC, "full")
            return os.write(handle, data)

    monkeypatch.setattr(files, "os", FullOs())
    aside = InThreads()
    aside.attend(lambda: None, lacking.append)
    aside.begin(lambda: write_whole(tmp_path / "file", b"content")).result(60)
    assert [each.path for each in lacking] == [tmp_path / "file"] * 2
    assert (tmp_path / "file").read_bytes() == b"content"


def test_loop_answers_while_a_commit_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    services: list[Service] = []
    seen: list[set[str]] = []
    note, act = CrashSite._note, PutOff.act

    def noting(site: CrashSite, service: Service) -> None:
        services[:] = [service]
        note(site, service)

    def acting(put_off: PutOff) -> bool:
        service = services[0] if services else None
        course = None if service is None else service.course
        if service is not None and isinstance(course, RoundsCourse) and course.committing:
            assert course.state.phase is RoundPhase.CLOSING
            assert not course.idle
            assert service.helm.quarantined() == []
            assert service.helm.state["paused"] is None
            seen.append({each.name for each in site.devices if each.receipts})
        return act(put_off)

    monkeypatch.setattr(CrashSite, "_note", noting)
    monkeypatch.setattr(PutOff, "act", acting)
    with quiet(), scratch() as folder:
        site = CrashSite(BESIDE, folder)
        result = site.run()
    assert result == undisturbed("ram-fed")[0]
    assert {"a", "b"} <= seen[0]  # their receipts did not wait for the commit
    assert len(seen) > 6


def test_commit_that_fails_is_told_once_and_closes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Memory] = []
    close = Memory.close

    def closing(memory: Memory) -> None:
        closed.append(memory)
        close(memory)

    def failing(*_: object) -> None:
        raise ValueError("no levels")

    monkeypatch.setattr(Memory, "close", closing)
    monkeypatch.setattr(RoundsCourse, "_judge", failing)
    monkeypatch.setattr(Service, "kill", Service.close)  # the process ends in order
    with quiet(), scratch() as folder, pytest.raises(Stuck) as stuck:
        CrashSite(BESIDE, folder).run()
    ends = str(stuck.value).partition("[")[2]
    assert ends.count("could not be committed ← no levels") == len(closed) > 1
    assert "could not be removed" not in ends
