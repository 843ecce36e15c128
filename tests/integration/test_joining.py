"""Joining as programs: serve on a fresh folder, one line on a device, and a run that goes on.

Mosquitto speaks TLS, and nobody configured it. The device has a home of its own and learns
everything from the code.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from coordinator.operate.broker.embedded import find_mosquitto
from edge_sdk.program.processes import ChildProcess, Children
from tests.waiting import HANGS_S, lasting_port, until

pytestmark = pytest.mark.skipif(
    find_mosquitto() is None, reason="needs mosquitto, which is not installed"
)

PROGRAMS = Path(sys.executable).parent

TASK_FILE = """\
import torch
from torch import nn

from coordinator.task.task import make_task as task_of


def make_task():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return task_of(model, torch.zeros(2, 4), groups=2)
"""

RUN_FILE = """\
[task]
name = "tiny"
source = "task.py:make_task"
[run]
folder = "run"
rounds = 1000
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a fresh machine: a task, and ports that no other test takes."""
    folder = tmp_path / "coordinator"
    folder.mkdir()
    (folder / "task.py").write_text(TASK_FILE)
    local, devices, join = lasting_port(), lasting_port(), lasting_port()
    (folder / "run.toml").write_text(
        f"{RUN_FILE}[broker]\nembedded = true\nport = {local}\ntls_port = {devices}\n"
        f'[join]\nhost = "localhost"\ndevices = 2\nport = {join}\n'
    )
    return folder


@pytest.fixture
def device_home(tmp_path: Path) -> Path:
    folder = tmp_path / "device"
    (folder / "data").mkdir(parents=True)
    rng = np.random.default_rng(0)
    x, y = rng.random((32, 4), dtype=np.float32), rng.integers(0, 3, 32)
    np.savez(folder / "data" / "own.npz", x=x, y=y)
    return folder


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as children:
        yield children


def start(children: Children, name: str, folder: Path, command: Sequence[str]) -> ChildProcess:
    """Start a program in its own folder, which is also its home."""
    log = folder / f"{name}.log"
    log.unlink(missing_ok=True)
    line = ["/usr/bin/env", "-C", str(folder), f"HOME={folder}", *command]
    return children.start(name, line, log)


def serve(children: Children, home: Path) -> ChildProcess:
    program = str(PROGRAMS / "tessera-coordinator")
    child = start(children, "serve", home, [program, "serve", "--config", "run.toml"])
    until(lambda: "waits for" in child.log.read_text() or not child.is_running, child.last_words)
    assert child.is_running, child.last_words()
    return child


def rounds(home: Path) -> int:
    history = home / "run" / "history.jsonl"
    return len(history.read_text().splitlines()) if history.exists() else 0


def line_to_paste(child: ChildProcess) -> list[str]:
    (line,) = re.findall(r"^  (tessera-device join \S+)$", child.log.read_text(), re.MULTILINE)
    return [str(PROGRAMS / "tessera-device"), *str(line).split()[1:]]


def codes(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(PROGRAMS / "tessera-coordinator"), "codes", *arguments]
    return subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=HANGS_S)


def tasks_of(config: str) -> subprocess.CompletedProcess[bytes]:
    command = [str(PROGRAMS / "tessera-device"), "tasks", "--config", config, "--json"]
    return subprocess.run(command, capture_output=True, timeout=HANGS_S)


def test_fresh_machine_one_line_and_a_restart(
    home: Path, device_home: Path, children: Children
) -> None:
    first = serve(children, home)
    assert "compiles   loading torch and the task's code" in first.log.read_text()
    line = line_to_paste(first)
    device = start(children, "join", device_home, [*line, "--name", "robot", "--data", "data"])
    until(lambda: rounds(home) >= 2 or not device.is_running, device.last_words)
    assert device.is_running, device.last_words()
    config = (device_home / "robot" / "device.toml").read_text()
    assert "tls = true" in config
    assert "password" not in config
    checked = subprocess.run(
        [line[0], "check", "--config", "robot/device.toml"],
        cwd=device_home,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for said in (
        r"✓ certificate   for 'robot', until 20\d\d-",
        r"! broker        not tried: robot runs, and would lose its own connection",
        r"✓ task          tiny, run [0-9a-f]+, as last seen",
        r"✓ plan          \d+ parameters, plan [0-9a-f]+…; levels 100%, ",
        r"✓ data          32 samples; 0: \d+, 1: \d+, 2: \d+",
        r"✓ memory        ",
    ):
        assert re.search(said, checked.stdout), checked.stdout

    # A code of its own for each device that is still to come, while the run is served.
    created = codes(home, "create", "run", "--devices", "3", "--hours", "2")
    (other,) = re.findall(r"^  (tessera-device join \S+)$", created.stdout, re.MULTILINE)
    assert other.split()[-1] != line[-1]
    listed = json.loads(codes(home, "list", "run", "--json").stdout)
    assert [(each["state"], each["joined"]) for each in listed] == [
        ("open", ["robot"]),
        ("open", []),
    ]
    assert "is revoked" in codes(home, "revoke", "run", listed[1]["id"]).stdout

    # The coordinator and its broker are killed and start again: the same ports, the same code.
    first.process.kill()
    first.process.wait()
    before = rounds(home)
    second = serve(children, home)
    assert line_to_paste(second) == line
    # The first round may close with what had arrived; the second needs the device.
    until(lambda: rounds(home) > before + 1 or not device.is_running, device.last_words)
    assert device.is_running, device.last_words()

    refused = subprocess.run(
        [line[0], *other.split()[1:], "--name", "late"],
        cwd=device_home,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert refused.returncode == 2
    assert refused.stderr == (
        "tessera-device: the coordinator refuses: this code was revoked: ask for a new one "
        "(tessera-coordinator codes create)\n"
    )

    children.stop(device)
    config = str(device_home / "robot" / "device.toml")
    tasks = json.loads(tasks_of(config).stdout)
    assert [(each["name"], each["online"]) for each in tasks] == [("tiny", True)]
    # A revoked device is shut out at once: the broker reads the list again.
    command = [str(PROGRAMS / "tessera-coordinator"), "revoke", "robot"]
    asked = subprocess.run(command, cwd=home, stdin=subprocess.DEVNULL, capture_output=True)
    assert b"Nothing was changed: add --yes" in asked.stderr
    done = subprocess.run([*command, "--yes"], cwd=home, capture_output=True, timeout=HANGS_S)
    assert b"The run's broker has read it" in done.stdout, done.stderr
    until(lambda: b"was revoked" in tasks_of(config).stderr)
    until(lambda: "robot left" in second.log.read_text())
    assert "robot left: it was told to stop" in second.log.read_text()
    children.stop(second)
    for log in (device.log, second.log):
        said = log.read_text()
        assert "Traceback" not in said
        # The line itself is printed for people; logs begin with a date.
        assert not [each for each in said.splitlines() if each[:1].isdigit() and line[-1] in each]
    assert json.loads(codes(home, "list", "run", "--json").stdout)[1]["state"] == "revoked"
