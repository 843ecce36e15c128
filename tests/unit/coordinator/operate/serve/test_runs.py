"""The runs of a process: added, found and removed from any thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from coordinator.errors import ConfigError
from coordinator.operate.http.viewed import RunView
from coordinator.operate.serve.runs import ServedRun, ServedRuns
from edge_sdk.program.control import ControlCommand


def made(task: str) -> ServedRun:
    return ServedRun(task, Path("folders") / task, cast("RunView", None), {})


def test_runs_are_found_by_task_and_listed_by_name() -> None:
    runs = ServedRuns()
    for task in ("wake-word", "digits"):
        runs.add(made(task))
    assert [run.task for run in runs.all()] == ["digits", "wake-word"]
    assert runs.get("digits").folder == Path("folders/digits")


def test_unknown_task_is_named_with_the_nearest() -> None:
    runs = ServedRuns()
    with pytest.raises(ConfigError, match=r"no run of task 'digit' is served here$"):
        runs.get("digit")
    runs.add(made("digits"))
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        runs.get("digit")


def test_task_has_one_run() -> None:
    runs = ServedRuns()
    runs.add(made("digits"))
    with pytest.raises(ConfigError, match="served already"):
        runs.add(made("digits"))
    runs.remove("digits")
    runs.remove("digits")
    runs.add(made("digits"))


def test_retired_run_can_be_looked_at_but_not_changed() -> None:
    runs = ServedRuns()
    commands: dict[str, ControlCommand] = {"audit": list, "pause": str, "page.session": list}
    runs.add(replace(made("digits"), commands=commands, silent_s=lambda: 99.0))
    runs.retire("digits")
    run = runs.get("digits")
    assert set(run.commands) == {"audit"}
    assert run.silent_s() == 0.0


def test_runs_change_while_others_read() -> None:
    runs, done = ServedRuns(), threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            seen.append(len(runs.all()))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        runs.add(made(f"task-{number}"))
        runs.remove(f"task-{number - 3}")
    done.set()
    reader.join()
    assert set(seen) <= set(range(5))
    assert len(runs.all()) == 3
