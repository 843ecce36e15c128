"""Both programs as systemd starts them: ready, alive while they wait, gone when told to stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.integration.test_identity import TASK_FILE
from tests.waiting import HANGS_S, free_port

ROOT = Path(__file__).resolve().parents[2]

RUN = """\
[task]
name = "tiny"
source = "task.py:make_task"
[run]
folder = "run"
rounds = 1
[broker]
embedded = true
"""


class Supervised:
    """A program with a notification socket, and all that it said there."""

    def __init__(self, folder: Path, module: str, *arguments: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self._socket.settimeout(HANGS_S)
        self.said: list[str] = []
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": "200000",
        }
        environment.pop("WATCHDOG_PID", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=folder, env=environment
        )

    def wait_until(self, heard: Callable[[list[str]], bool]) -> None:
        """Read on until the condition holds; `TimeoutError` if nothing more is said."""
        while not heard(self.said):
            self.said.append(self._socket.recv(4096).decode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._socket.close()


@contextmanager
def supervised(folder: Path, module: str, *arguments: str) -> Iterator[Supervised]:
    program = Supervised(folder, module, *arguments)
    try:
        yield program
    finally:
        program.close()


def watch_and_stop(program: Supervised) -> None:
    program.wait_until(lambda said: said.count("WATCHDOG=1") >= 3)
    program.process.send_signal(signal.SIGTERM)
    program.wait_until(lambda said: said[-1] == "STOPPING=1")


def test_device_is_alive_while_it_waits_for_its_broker(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data/a.npz", x=np.zeros((4, 4), np.float32), y=np.zeros(4, np.int64))
    (tmp_path / "device.toml").write_text(
        f'task = "tiny"\nname = "robot"\ndata = "data"\n[broker]\nport = {free_port()}\n'
    )
    with supervised(tmp_path, "edge_sdk.cli", "run", "--config", "device.toml") as program:
        watch_and_stop(program)
        assert program.process.wait(HANGS_S) == 0
    assert program.said[0] == "READY=1\nSTATUS=waiting for the broker"
    assert any(each.startswith("STATUS=no connection: ") for each in program.said)


def test_coordinator_is_alive_while_it_waits_for_devices(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "task.py").write_text(TASK_FILE)
    with supervised(tmp_path, "coordinator.cli", "serve", "--config", "run.toml") as program:
        watch_and_stop(program)
        assert program.process.wait(HANGS_S) == 143
    assert program.said[0] == "READY=1\nSTATUS=coordinating tiny"
