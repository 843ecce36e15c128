"""`tessera-device run` and `init` as people and scripts use them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from coordinator.operate.broker.embedded import available, embedded_broker
from edge_sdk.cli import main
from edge_sdk.data.source import open_data
from edge_sdk.device.config import load_config
from edge_sdk.program.logs import configure_logging
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.protocol.messages.transfer import Presence
from edge_sdk.protocol.messages.wire import decode_message
from edge_sdk.transport.link import LinkEvent, Received
from edge_sdk.transport.opening import open_link
from tests.unit.edge_sdk.data.specs import spec_of
from tests.waiting import HANGS_S, until

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "device"
DIGITS = spec_of(1, 8, 8, highest=9, range=(0.0, 1.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and data."""
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "a.npz", x=np.zeros((3, 4), dtype=np.float32), y=np.zeros(3))
    (tmp_path / "device.toml").write_text('task = "toy"\nname = "pi"\ndata = "data"\n')
    return tmp_path


def run(folder: Path, *flags: str) -> int:
    config = str(folder / "device.toml")
    return main(["run", "--config", config, "--state-dir", str(folder / "state"), *flags])


def test_init_writes_a_file_that_run_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", str(path)]) == 0
    assert f"--config {path}" in capsys.readouterr().out
    assert load_config(path, environment={}).task == "digits"
    assert main(["init", str(path)]) == 2
    assert "is left as it is" in capsys.readouterr().err


def test_wrong_configuration_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "device.toml").write_text('tsak = "toy"')
    assert run(folder) == 2
    assert "did you mean 'task'?" in capsys.readouterr().err


def test_certificate_that_is_not_there_is_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "device.toml").open("a") as file:
        file.write('[broker]\ntls = true\nca = "none.pem"\n')
    assert run(folder) == 2
    assert "none.pem" in capsys.readouterr().err


def test_data_that_cannot_be_loaded_is_exit_code_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--data", str(folder / "none")) == 3
    assert "is not there" in capsys.readouterr().err


@pytest.fixture
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CONNECT_S", "0.1")
    monkeypatch.setenv("TESSERA_BROKER_PORT", "9")


def test_broker_that_is_not_there_in_time_is_exit_code_4(
    folder: Path, capsys: pytest.CaptureFixture[str], nobody_listens: None
) -> None:
    assert run(folder, "--log-format", "json") == 4
    last = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert last["level"] == "error"
    assert "no connection within 0.1 s" in last["message"]


def test_start_is_reported_to_people(
    folder: Path, capsys: pytest.CaptureFixture[str], nobody_listens: None
) -> None:
    assert run(folder, "--level", "0.25") == 4
    out = capsys.readouterr().out
    for name, value in (
        ("name", "pi"),
        ("task", "toy"),
        ("broker", "127.0.0.1:9"),
        ("data", "arrays: 1 file in"),
        ("level", "0.25"),
        ("backend", "onnxruntime"),
    ):
        assert f"{name:<16} {value}" in out


def test_checks_of_this_machine_come_before_the_connection(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--state-dir", str(folder / "device.toml" / "state")) == 1
    assert "device.toml is a file; name a folder in state_dir" in capsys.readouterr().err


def test_help_lists_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    out = capsys.readouterr().out
    for code in ("  0  ", "  2  ", "  3  ", "  4  ", "  5  ", "  130"):
        assert f"\n{code}" in out


@pytest.mark.parametrize(
    "command", ["run", "join", "tasks", "init", "check", "explain", "status", "pause", "infer"]
)
def test_help_is_wrapped(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_json_logs_are_one_object_per_line() -> None:
    stream = StringIO()
    configure_logging("json", "info", stream)
    log = logging.getLogger("edge_sdk.anything")
    log.debug("not shown")
    log.info("two\nlines of %s", "ünïcode")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("it failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["message"] == "two\nlines of ünïcode"
    assert (first["level"], first["logger"]) == ("info", "edge_sdk.anything")
    assert first["time"].endswith("+00:00")
    assert "ValueError: boom" in second["exception"]


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signal_ends_the_program_with_a_goodbye(
    folder: Path, sent: signal.Signals, code: int
) -> None:
    with embedded_broker(folder / "broker", kind="mosquitto") as settings:
        environment = {
            **os.environ,
            "TESSERA_BROKER_PORT": str(settings.port),
            "TESSERA_BROKER_USERNAME": settings.username or "",
            "TESSERA_BROKER_PASSWORD": settings.password or "",
        }
        command = [sys.executable, "-m", "edge_sdk.cli", "run", "--log-format", "json"]
        command += ["--config", str(folder / "device.toml"), "--state-dir", str(folder / "state")]
        log_file = folder / "log"
        with log_file.open("w") as stderr:
            program = subprocess.Popen(command, stderr=stderr, env=environment, cwd=ROOT)
        try:
            until(
                lambda: "connected to" in log_file.read_text() or program.poll() is not None,
                log_file.read_text,
            )
            assert program.poll() is None, log_file.read_text()
            program.send_signal(sent)
            assert program.wait(HANGS_S) == code
        finally:
            program.kill()
            program.wait()
        seen: SimpleQueue[LinkEvent] = SimpleQueue()
        watcher = open_link(settings, name="watcher", deliver=seen.put)
        watcher.subscribe(Topics("toy").presences)
        while not isinstance(event := seen.get(timeout=HANGS_S), Received):
            pass
        watcher.close()
        presence = decode_message(event.payload)
        assert isinstance(presence, Presence)
        assert (presence.name, presence.online) == ("pi", False)
    lines = [json.loads(line) for line in log_file.read_text().splitlines()]
    assert lines[0]["message"] == "starting"
    assert lines[0]["data"] == f"arrays: 1 file in {folder / 'data'}"


def test_example_configuration_and_loader_work() -> None:
    config = load_config(EXAMPLE / "device.toml", environment={})
    assert config.data is not None
    data = open_data(config.data, config.format).read(DIGITS).data
    own = open_data(f"{EXAMPLE / 'own_data.py'}:load").read(DIGITS).data
    np.testing.assert_array_equal(data.inputs[0], own.inputs[0])
    np.testing.assert_array_equal(data.targets, own.targets)
    assert data.inputs[0].shape == (60, 1, 8, 8)
    assert data.inputs[0].dtype == np.float32
    assert 0 <= data.inputs[0].min() < data.inputs[0].max() == 1
    assert set(np.unique(data.targets)) == set(range(10))
    assert config.broker.address == "127.0.0.1:1883"
