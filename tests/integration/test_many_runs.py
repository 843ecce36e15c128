"""Many runs in one process, over a real Mosquitto, with devices that really train.

The task is compiled once; its runs differ in their names only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.operate.broker.embedded import find_mosquitto
from coordinator.operate.config import read_process_config
from coordinator.operate.serve.supervising import serve_folder
from coordinator.operate.taskfile import compile_task
from coordinator.run.folder import About, create_run
from coordinator.task.saved_model import SavedModel
from edge_sdk.device.config import load_config
from edge_sdk.device.service.service import DeviceService
from edge_sdk.program.control import NotServedError, ask_run
from edge_sdk.program.processes import ChildProcess, Children
from tests.waiting import HANGS_S, lasting_port, until

pytestmark = pytest.mark.skipif(
    find_mosquitto() is None, reason="needs mosquitto, which is not installed"
)

PROGRAM = str(Path(sys.executable).parent / "tessera-coordinator")
TASK_FILE = """\
import torch
from torch import nn

from coordinator.task.task import make_task as task_of


def make_task():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return task_of(model, torch.zeros(2, 4), groups=2)
"""
SOURCE = "task.py:make_task"
ROUNDS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    folder = tmp_path_factory.mktemp("task")
    (folder / "task.py").write_text(TASK_FILE)
    return compile_task(SOURCE, folder, batch_size=8)


class Folder:
    """A folder of run files, and what is known of its runs from outside."""

    def __init__(self, path: Path, model: SavedModel) -> None:
        path.mkdir()
        self.path, self._model = path, model
        self.port = lasting_port()
        (path / "coordinator.toml").write_text(
            f"[broker]\nembedded = true\nport = {self.port}\nprobe = false\n"
            "[join]\nenabled = false\n[http]\nenabled = false\n"
        )

    @property
    def home(self) -> Path:
        return self.path / "coordinator"

    def add(self, task: str) -> None:
        """Write a run file, and a run that is compiled already."""
        about = About(task=task, run=f"{task:0<16}", source=SOURCE, batch_size=8)
        create_run(self.path / f"run-{task}", about, self._model)
        (self.path / f"{task}.toml").write_text(
            f'[task]\nname = "{task}"\nsource = "{SOURCE}"\n[run]\nfolder = "run-{task}"\n'
            f"rounds = {ROUNDS}\nsteps = 2\nbatch_size = 8\n"
            "[round]\nbid_s = 600\ntrain_deadline_s = 600\naway_s = 600\n"
        )

    def states(self) -> dict[str, str]:
        """How each file is, as the process says."""
        try:
            return {row["file"]: row["state"] for row in ask_run(self.home, "runs.list")}
        except NotServedError:
            return {}

    def digests(self, task: str) -> list[str]:
        """The digest of the model after every round."""
        path = self.path / f"run-{task}" / "history.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line)["digest"] for line in lines if line.endswith("\n")]

    def device(self, task: str, folder: Path) -> Path:
        """Settings of the one device of a task."""
        folder.mkdir(parents=True)
        random = np.random.default_rng(ord(task[0]))
        x, y = random.random((32, 4), dtype=np.float32), random.integers(0, 3, 32)
        np.savez(folder / "own.npz", x=x, y=y)
        broker = (self.home / "broker.toml").read_text()
        (folder / "device.toml").write_text(
            f'task = "{task}"\nname = "device-{task}"\ndata = "own.npz"\nstate_dir = "state"\n'
            f'weigh = false\ndeliver = "off"\n{broker}'
        )
        return folder / "device.toml"


@contextmanager
def devices(folder: Folder, place: Path, tasks: str) -> Iterator[None]:
    """A device for each task, in threads of this process; they end with their runs."""
    until(lambda: (folder.home / "broker.toml").exists())
    paths = [folder.device(task, place / task) for task in tasks]
    services = [DeviceService(load_config(path, environment={})) for path in paths]
    threads = [threading.Thread(target=each.run, daemon=True) for each in services]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for service in services:
            service.stop()
        for thread in threads:
            thread.join(HANGS_S)


def serve(children: Children, folder: Folder, log: Path) -> ChildProcess:
    """Start `serve --runs`, and wait until it is there."""
    child = children.start(
        "serve", [PROGRAM, "serve", "--log-format", "json", "--runs", str(folder.path)], log
    )
    until(lambda: folder.states() or not child.is_running, child.last_words)
    assert child.is_running, child.last_words()
    return child


def complete(folder: Folder, tasks: str) -> bool:
    return all(folder.states().get(f"{task}.toml") == "complete" for task in tasks)


@pytest.fixture(scope="module")
def undisturbed(
    model: SavedModel, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """The models of all rounds of three runs that nothing happens to, by task."""
    place = tmp_path_factory.mktemp("undisturbed")
    folder, stop = Folder(place / "runs", model), threading.Event()
    for task in "abc":
        folder.add(task)
    config = read_process_config(folder.path, environment={})
    thread = threading.Thread(
        target=serve_folder, args=(folder.path, config, stop, lambda _: None), daemon=True
    )
    thread.start()
    with devices(folder, place / "devices", "abc"):
        until(lambda: complete(folder, "abc"), folder.states)
    stop.set()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    return {task: folder.digests(task) for task in "abc"}


def test_one_is_added_one_removed_one_broken_and_all_survive_a_kill(
    model: SavedModel, undisturbed: dict[str, list[str]], tmp_path: Path
) -> None:
    assert {len(digests) for digests in undisturbed.values()} == {ROUNDS}
    assert len({digests[-1] for digests in undisturbed.values()}) == 3  # their data differ
    folder = Folder(tmp_path / "runs", model)
    for task in "ab":
        folder.add(task)
    (folder.path / "broken.toml").write_text('[task]\nname = "broken"\n[broker]\nport = 1\n')
    with Children() as children:
        first = serve(children, folder, tmp_path / "first.log")
        until(lambda: folder.states().get("broken.toml") == "broken", folder.states)
        with devices(folder, tmp_path / "devices", "abc"):
            until(lambda: min(len(folder.digests(task)) for task in "ab") >= 2, first.last_words)
            folder.add("c")
            until(lambda: folder.digests("c"), first.last_words)
            first.signal(signal.SIGKILL)  # its broker ends with it
            first.process.wait()
            seen = {task: folder.digests(task) for task in "abc"}
            assert all(seen.values())
            second = serve(children, folder, tmp_path / "second.log")
            until(lambda: complete(folder, "abc") or not second.is_running, folder.states)
            assert {task: folder.digests(task) for task in "abc"} == undisturbed

            (folder.path / "a.toml").unlink()
            until(lambda: "a.toml" not in folder.states(), folder.states)
            assert folder.states() == {
                "b.toml": "complete",
                "c.toml": "complete",
                "broken.toml": "broken",
            }
        said = subprocess.run(
            [PROGRAM, "served", str(folder.path)], capture_output=True, text=True, timeout=HANGS_S
        )
        assert "[broker] is for all runs of the process" in said.stdout
        second.signal(signal.SIGTERM)
        assert second.process.wait(HANGS_S) == 143
    lines = [json.loads(line) for line in _logs(tmp_path / "second.log")]
    rounds = [line for line in lines if line.get("event") == "run" and line["task"] == "b"]
    assert rounds
    assert {line["task"] for line in lines if "task" in line} == {"a", "b", "c", "broken"}
    assert not [line for line in lines if "exception" in line]


def _logs(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            yield line


def test_second_process_for_a_folder_is_refused(model: SavedModel, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "runs", model)
    refused: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HANGS_S}
    with Children() as children:
        child = children.start(
            "serve", [PROGRAM, "serve", "--runs", str(folder.path)], tmp_path / "log"
        )
        until(lambda: "no run files yet" in child.log.read_text() or not child.is_running)
        assert child.is_running, child.last_words()
        done = subprocess.run([PROGRAM, "serve", "--runs", str(folder.path)], **refused)
        assert done.returncode == 2
        assert "in use by another process" in done.stderr
        os.kill(child.pid, signal.SIGINT)
        assert child.process.wait(HANGS_S) == 130
