"""`tessera-device status`, `pause` and `resume` and a device that runs, on a real broker."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.operate.broker.embedded import available, embedded_broker
from edge_sdk.cli import main
from edge_sdk.program.control import SOCKET
from edge_sdk.program.processes import Children
from edge_sdk.program.settings import PREFIX
from edge_sdk.protocol.messages.round import Bid, Outcome
from edge_sdk.transport.settings import BrokerSettings
from tests.unit.edge_sdk.scripted import DEVICE, TASK, Coordinator, MqttStage, make_data
from tests.waiting import HANGS_S

pytestmark = pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "\x1b[2J\x1b]0;owned\x07 late \u202e\x9b31m"


def write_config(folder: Path, settings: BrokerSettings) -> Path:
    data = make_data()
    np.savez(folder / "own.npz", x=data.inputs[0], y=data.targets)
    config = folder / "device.toml"
    config.write_text(
        f'task = "{TASK}"\nname = "{DEVICE}"\ndata = "own.npz"\nstate_dir = "state"\n'
        f'[broker]\nport = {settings.port}\nusername = "{settings.username}"\n'
        f'password = "{settings.password}"\n'
    )
    return config


def environment() -> dict[str, str]:
    kept = {key: text for key, text in os.environ.items() if not key.startswith(PREFIX)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@contextmanager
def running(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "edge_sdk.cli", "run", "--config", str(config)]
    log = config.parent / "device.log"
    with Children() as children:
        # Levels are not weighed: what this machine can spare is no matter here.
        values = environment() | {"TESSERA_WEIGH": "false"}
        yield children.start(DEVICE, command, log, values).process


def owner(capsys: pytest.CaptureFixture[str], *command: str | Path) -> str:
    """What a command of the owner prints."""
    capsys.readouterr()
    assert main([str(each) for each in command]) == 0
    return capsys.readouterr().out


def bids(coordinator: Coordinator, round: int, *, level: bool) -> Bid:
    def fits(bid: Bid) -> bool:
        return bid.round == round and (bid.level is not None) == level

    return coordinator.stage.until(lambda: coordinator.last(Bid, fits))


def test_owner_sees_pauses_and_resumes_a_device_that_is_killed_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    with embedded_broker(tmp_path / "broker", kind="mosquitto") as settings:
        config = write_config(tmp_path, settings)
        assert "never ran here" in owner(capsys, "status", "--config", config)
        stage = MqttStage(settings)
        coordinator = Coordinator(stage)
        coordinator.present()
        coordinator.announce()
        coordinator.open(1, steps=10**9)

        def status() -> dict[str, Any]:
            whole = json.loads(owner(capsys, "status", "--json", "--config", config))
            return {**whole, **whole["tasks"][0]}

        with running(config) as device:
            bids(coordinator, 1, level=True)
            coordinator.assign(1)
            stage.until(lambda: status()["phase"] == "training" and status()["step"] > 1)
            folder = tmp_path / "state" / TASK / DEVICE
            assert (folder / SOCKET).stat().st_mode & 0o777 == 0o600
            said = owner(capsys, "status", "--config", config)
            assert f"runs (process {device.pid})" in said
            assert "of 1000000000" in said
            assert "until" in owner(capsys, "pause", "--for", "2h", "--config", config)
            skip = bids(coordinator, 1, level=False)
            assert (skip.reason, skip.code) == ("skip: paused by its owner", "paused")
            stage.until(lambda: status()["phase"] == "resting")
            assert "PAUSED" in watched(config)
            device.kill()
            device.wait()
        assert "it crashed, was killed, or lost its power" in owner(
            capsys, "status", "--config", config
        )
        assert "paused it since" in said_by_check(capsys, config)
        assert (
            "paused" in json.loads(owner(capsys, "explain", "--json", "--config", config))["code"]
        )
        coordinator.forget()
        coordinator.open(2)
        with running(config) as device:
            bids(coordinator, 2, level=False)
            assert "no longer paused" in owner(capsys, "resume", "--config", config)
            coordinator.open(3)
            bids(coordinator, 3, level=True)
            coordinator.assign(3)
            stage.until(lambda: coordinator.movements)
            coordinator.receipt(3, Outcome.LATE, HOSTILE)
            stage.until(lambda: status()["verdicts"])
            said = owner(capsys, "status", "--config", config)
            assert "round 3 late: [2J ]0;owned late 31m" in said
            assert said.replace("\n", "").isprintable()
            seen = watched(config)
            assert "owned" in seen
            assert "\x1b]0;" not in seen
            assert "\x1b[2J\x1b]" not in seen
            coordinator.finish(3)
            stage.until(lambda: device.poll() is not None)
            assert device.returncode == 0
        assert status()["ended"]["words"] == "the run is finished"
        assert (status()["trained"], status()["waiting"]) == (1, [])
        coordinator.close()


def said_by_check(capsys: pytest.CaptureFixture[str], config: Path) -> str:
    capsys.readouterr()
    main(["check", "--config", str(config)])
    return capsys.readouterr().out


def watched(config: Path) -> str:
    """What `status --watch` draws on a terminal of 80 × 24 without colours, until `q`."""
    keyboard, terminal = pty.openpty()
    values = environment() | {"NO_COLOR": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    command = [sys.executable, "-m", "edge_sdk.cli", "status", "--watch", "--config", str(config)]
    viewer = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=values, cwd=ROOT
    )
    os.close(terminal)
    drawn, until, pressed = b"", time.monotonic() + HANGS_S, False
    try:
        while time.monotonic() < until:
            if not select.select([keyboard], [], [], 0.1)[0]:
                continue
            try:
                drawn += os.read(keyboard, 65536)
            except OSError:  # it has ended
                break
            if b"q or Ctrl-C ends" in drawn and not pressed:
                pressed = True
                os.write(keyboard, b"q")
        assert viewer.wait(HANGS_S) == 0, drawn.decode(errors="replace")
    finally:
        viewer.kill()
        viewer.wait()
        os.close(keyboard)
    return drawn.decode()
