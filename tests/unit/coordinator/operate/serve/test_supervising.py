"""The supervisor of a folder of run files: when runs start, stop and start again.

Runs are served by a function of the test; the clock is the test's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import ConfigError, StopRequestedError
from coordinator.operate.config import ProcessConfig, ServeConfig, read_process_config
from coordinator.operate.serve.down import DownView
from coordinator.operate.serve.runs import ServedRun, ServedRuns
from coordinator.operate.serve.serving import ServeEnd
from coordinator.operate.serve.supervising import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    STEADY_S,
    SharedSite,
    Supervisor,
)
from coordinator.run.folder import RunError, write_json
from coordinator.run.steering.orders import STEERING, SettingChange, Steered
from coordinator.service.outgoing.fence import FencedError
from coordinator.service.overview.facts import RunFacts, keep_facts
from edge_sdk.program.watchdog import Watchdog
from edge_sdk.transport.settings import DeniedError
from tests.unit.coordinator.service.service_world import PLAN
from tests.waiting import HANGS_S, until

FACTS = RunFacts(task="a", run="r", folder=None, plan=PLAN)


class Ending:
    """What a served run is told to do: complete, or fail."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: Exception | None = None


@dataclass
class Stage:
    """A folder, its supervisor, and the runs that it serves."""

    folder: Path
    now: float = 100.0
    said: list[str] = field(default_factory=list)
    served: dict[str, Ending] = field(default_factory=dict)
    starts: list[tuple[str, int, bool]] = field(default_factory=list)
    """Task, steps and take-over of every start."""

    def __post_init__(self) -> None:
        config = ProcessConfig(base=self.folder, folder=self.folder / "coordinator")
        self.supervisor = Supervisor(
            self.folder,
            config,
            self.said.append,
            clock=lambda: self.now,
            work=self.work,
            take_over=True,
        )
        self.supervisor.site = SharedSite(ServedRuns())

    def work(
        self,
        config: ServeConfig,
        stop: threading.Event,
        _say: Any,
        watchdog: Watchdog,
        *,
        take_over: bool,
        site: SharedSite,
    ) -> ServeEnd:
        """Be a run until told to end."""
        assert site is self.supervisor.site
        task = config.task.name
        ending = self.served[task] = Ending()
        self.starts.append((task, config.run.steps, take_over))
        watchdog.ready(task)
        while not stop.is_set():
            if ending.event.wait(0.01):
                if ending.error is not None:
                    raise ending.error
                return ServeEnd.COMPLETE
        return ServeEnd.STOPPED

    def write(self, name: str, *, task: str | None = None, steps: int = 1, run: str = "") -> Path:
        path = self.folder / f"{name}.toml"
        task, run = task or name, run or f"run-{task or name}"
        text = f'[task]\nname = "{task}"\nsource = "t.py:f"\n'
        path.write_text(f'{text}[run]\nfolder = "{run}"\nsteps = {steps}\n')
        return path

    def look(self, times: int = 2) -> None:
        """Look until a change counts."""
        for _ in range(times):
            self.supervisor.look()

    def shown(self) -> dict[str, tuple[str, str | None]]:
        """State of every run that the page shows, and what it waits for."""
        assert self.supervisor.site is not None
        statuses = [run.overview.status() for run in self.supervisor.site.runs.all()]
        return {each["task"]: (each["state"], each["waits_for"]) for each in statuses}

    def state(self, name: str) -> str | None:
        """Look once, and say how a file is."""
        self.supervisor.look()
        rows = {row["file"]: row for row in self.supervisor.listing()}
        return rows[f"{name}.toml"]["state"] if f"{name}.toml" in rows else None

    def reaches(self, name: str, state: str | None) -> None:
        until(lambda: self.state(name) == state, self.supervisor.listing)

    def error(self, name: str) -> str:
        rows = {row["file"]: row for row in self.supervisor.listing()}
        return str(rows[f"{name}.toml"]["error"])

    def end(self, task: str, error: Exception | None = None) -> None:
        self.served[task].error = error
        self.served[task].event.set()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.supervisor.stop()
    assert made.supervisor.ended(HANGS_S)


def test_files_start_runs_and_their_removal_stops_them(stage: Stage) -> None:
    stage.write("a")
    stage.reaches("a", "served")
    stage.write("b")
    stage.reaches("b", "served")
    (stage.folder / "a.toml").unlink()
    stage.reaches("a", None)
    assert stage.state("b") == "served"
    assert stage.starts == [("a", 1, True), ("b", 1, False)]  # taken over: those of the first look
    stage.write("a")  # it comes back
    stage.reaches("a", "served")


def test_new_content_counts_once_two_looks_found_it_the_same(stage: Stage) -> None:
    stage.look(1)
    path = stage.write("a")
    path.write_text("[task]\nnam")  # half written
    stage.look(1)
    stage.write("a")
    assert stage.state("a") == "starting"
    assert not stage.starts
    stage.reaches("a", "served")


def test_saved_settings_restart_the_run_and_broken_ones_do_not(stage: Stage) -> None:
    stage.write("a")
    stage.reaches("a", "served")
    path = stage.write("a")
    path.write_text(path.read_text().replace("steps", "stepz"))
    stage.look(3)
    assert stage.state("a") == "served"
    assert "stepz is not a known key" in stage.error("a")
    stage.write("a")  # as it was
    stage.look(3)
    assert len(stage.starts) == 1
    assert stage.error("a") == "None"
    stage.write("a", steps=7)
    stage.look(3)
    until(lambda: stage.state("a") == "served" and ("a", 7, False) in stage.starts)
    stage.reaches("a", "served")


def test_broken_file_is_shown_and_tried_again_when_saved(stage: Stage) -> None:
    stage.write("good")
    (stage.folder / "bad.toml").write_text("[task\n")
    stage.reaches("good", "served")
    assert stage.state("bad") == "broken"
    assert "not TOML" in stage.error("bad")
    stage.write("bad")
    stage.reaches("bad", "served")


@pytest.mark.parametrize("table", ["broker", "join", "http"])
def test_tables_of_the_process_are_refused_in_run_files(stage: Stage, table: str) -> None:
    path = stage.write("a")
    path.write_text(f"{path.read_text()}[{table}]\n")
    assert stage.state("a") == "broken"
    said = stage.error("a")
    assert f"[{table}] is for all runs" in said
    assert "coordinator.toml" in said


@pytest.mark.parametrize(
    "error", [RunError("the disk failed"), OSError(28, "full"), DeniedError("no"), ValueError("?")]
)
def test_run_that_fails_starts_again_later_and_later(stage: Stage, error: Exception) -> None:
    stage.write("a")
    stage.write("b")
    pause_s = FIRST_PAUSE_S
    for number in range(1, 9):
        stage.reaches("a", "served")
        stage.end("a", error)
        stage.reaches("a", "failed")
        stage.now += pause_s - 0.001
        assert stage.state("a") == "failed"
        assert len([start for start in stage.starts if start[0] == "a"]) == number
        stage.now += 0.001
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert stage.state("b") == "served"
    stage.reaches("a", "served")
    stage.now += STEADY_S  # it was sound for long
    stage.look()
    stage.end("a", error)
    stage.reaches("a", "failed")
    stage.now += FIRST_PAUSE_S
    stage.reaches("a", "served")


@pytest.mark.parametrize(
    ("error", "state"),
    [(FencedError("another has it"), "fenced"), (ConfigError("no such class"), "broken")],
)
def test_run_that_only_somebody_can_help_waits_until_its_file_is_saved(
    stage: Stage, error: Exception, state: str
) -> None:
    path = stage.write("a")
    stage.reaches("a", "served")
    stage.end("a", error)
    stage.reaches("a", state)
    stage.now += 10 * LONGEST_PAUSE_S
    stage.look(3)
    assert stage.state("a") == state
    assert stage.error("a") == str(error)
    os.utime(path, ns=(1, 1))  # saved again, the same
    stage.reaches("a", "served")


def test_complete_run_stays_listed_and_goes_on_when_it_gets_more_to_do(stage: Stage) -> None:
    stage.write("a")
    stage.reaches("a", "served")
    stage.end("a")
    stage.reaches("a", "complete")
    stage.look(3)
    assert len(stage.starts) == 1
    stage.write("a", steps=2)
    stage.reaches("a", "served")


def lengthen(folder: Path, rounds: int) -> None:
    """Write what `tessera-coordinator rounds` leaves in a run's folder."""
    folder.mkdir(exist_ok=True)
    steered = Steered(file={"rounds": 6}, changes={"rounds": changed(rounds)})
    write_json(folder / STEERING, asdict(steered))


def changed(rounds: int) -> SettingChange:
    return SettingChange(by="anna", time=1.0, value=rounds)


def test_complete_run_goes_on_when_rounds_are_added(stage: Stage) -> None:
    stage.write("a")
    lengthen(stage.folder / "run-a", 8)
    stage.reaches("a", "served")
    keep_facts(stage.folder / "run-a", replace(FACTS, finished=8))
    stage.end("a")
    stage.reaches("a", "complete")
    stage.look(3)
    assert len(stage.starts) == 1
    lengthen(stage.folder / "run-a", 9)
    stage.reaches("a", "served")
    assert "rounds were added: it goes on" in "".join(stage.said)


def test_run_that_got_rounds_once_it_had_ended_goes_on(stage: Stage) -> None:
    """As while devices try its last model."""
    stage.write("a")
    lengthen(stage.folder / "run-a", 8)
    stage.reaches("a", "served")
    lengthen(stage.folder / "run-a", 9)
    keep_facts(stage.folder / "run-a", FACTS)
    stage.end("a")
    until(lambda: stage.state("a") and len(stage.starts) == 2, stage.supervisor.listing)
    keep_facts(stage.folder / "run-a", replace(FACTS, finished=9))
    stage.end("a")
    stage.reaches("a", "complete")
    stage.look(3)
    assert len(stage.starts) == 2


def test_run_that_was_lengthened_in_time_is_complete_once(stage: Stage) -> None:
    stage.write("a")
    lengthen(stage.folder / "run-a", 8)
    stage.reaches("a", "served")
    lengthen(stage.folder / "run-a", 9)
    keep_facts(stage.folder / "run-a", replace(FACTS, finished=9))
    stage.end("a")
    stage.reaches("a", "complete")
    stage.look(3)
    assert len(stage.starts) == 1


@pytest.mark.parametrize(
    ("task", "run", "words"),
    [("a", "other", "serves the task 'a' already"), ("b", "run-a", "has the folder")],
)
def test_second_file_with_a_task_or_folder_waits_for_the_first(
    stage: Stage, task: str, run: str, words: str
) -> None:
    first = stage.write("a")
    stage.write("b", task=task, run=run)
    stage.reaches("a", "served")
    assert stage.state("b") == "broken"
    assert words in stage.error("b")
    first.unlink()
    stage.reaches("b", "served")
    assert len(stage.starts) == 2


def test_stop_ends_all_runs(stage: Stage) -> None:
    for name in ("a", "b"):
        stage.write(name)
        stage.reaches(name, "served")
    stage.supervisor.stop()
    assert stage.supervisor.ended(HANGS_S)


def test_silence_is_that_of_the_run_that_is_silent_longest(stage: Stage) -> None:
    stage.write("a")
    stage.reaches("a", "served")
    assert stage.supervisor.silence_s(1e9) == 0.0  # its loop has not begun
    (each,) = stage.supervisor._files.values()
    assert each.thread is not None
    each.thread.watchdog.alive(50.0)
    assert stage.supervisor.silence_s(57.0) == 7.0


def test_run_that_waits_to_be_compiled_can_be_stopped() -> None:
    site, stop = SharedSite(ServedRuns(), at_once=1), threading.Event()
    with site.preparing(threading.Event()):
        stop.set()
        with pytest.raises(StopRequestedError), site.preparing(stop):
            pass
    with site.preparing(threading.Event()):
        pass  # it is free again


def test_certificate_of_a_broker_needs_the_task(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    text = '[broker]\ntls = true\nhost = "b.example.org"\nca = "ca.pem"\n'
    path.write_text(f'{text}certificate = "c.pem"\nkey = "c.key"\n')
    with pytest.raises(ConfigError, match="every run needs its own"):
        read_process_config(tmp_path, environment={})
    path.write_text(f'{text}certificate = "c-{{task}}.pem"\nkey = "c-{{task}}.key"\n')
    config = read_process_config(tmp_path, environment={})
    assert config.broker_of("digits").certificate == tmp_path / "c-digits.pem"
    assert config.broker_of("digits").key == tmp_path / "c-digits.key"


def test_runs_that_are_down_are_shown_with_the_reason(stage: Stage) -> None:
    stage.write("a")
    (stage.folder / "bad.toml").write_text("[task]\nname = 7\n")
    stage.reaches("a", "served")
    stage.reaches("bad", "broken")
    state, why = stage.shown()["bad"]
    assert state == "failed"
    assert why is not None
    assert "bad.toml, to be saved again (broken): " in why
    stage.end("a", RunError("the disk is full"))
    stage.reaches("a", "failed")
    assert stage.shown()["a"] == ("failed", "another try, within 10 s: the disk is full")
    stage.now += FIRST_PAUSE_S
    stage.reaches("a", "served")
    assert "a" not in stage.shown()  # it is what serve shows of it: here, nothing
    (stage.folder / "bad.toml").unlink()
    stage.reaches("bad", None)
    assert stage.shown() == {}


@pytest.mark.parametrize("change", ["removed", "renamed"])
def test_file_of_the_same_task_leaves_what_is_shown_of_the_other(stage: Stage, change: str) -> None:
    stage.write("a", task="digits")
    stage.reaches("a", "served")
    site = stage.supervisor.site
    assert site is not None
    view = DownView("digits", "as if it were served")
    site.runs.add(ServedRun("digits", stage.folder, view, {}))
    stage.write("b", task="digits", run="run-b")
    stage.reaches("b", "broken")
    assert stage.shown()["b.toml"][0] == "failed"
    assert site.runs.get("digits").overview is view
    if change == "removed":
        (stage.folder / "b.toml").unlink()
        stage.reaches("b", None)
    else:
        stage.write("b", task="letters", run="run-b")
        stage.reaches("b", "served")
    assert list(stage.shown()) == ["digits"]
