"""A run that is served beside others, and its failures."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import ConfigError
from coordinator.operate.broker.ports import PortError
from coordinator.operate.config import ServeConfig, read_config
from coordinator.operate.serve import serving
from coordinator.operate.serve.runs import ServedRuns
from coordinator.operate.serve.supervising import SharedSite
from coordinator.run.folder import Run
from coordinator.run.steering import stopped
from edge_sdk.transport.settings import BrokerSettings, LinkError
from tests.unit.coordinator.service.service_world import TASK, Worlds, rounds_config


def config_of(run: Path, more: str = "") -> ServeConfig:
    path = run.parent / "run.toml"
    path.write_text(
        f'[task]\nname = "{TASK}"\nsource = "t.py:f"\n[run]\nfolder = "{run.name}"\n'
        f'batch_size = 4\n{more}[broker]\nhost = "localhost"\nprobe = false\n'
    )
    return read_config(path)


@pytest.fixture
def folder(worlds: Worlds) -> Path:
    world = worlds.make(rounds_config())
    world.stop()
    return world.folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other coordinator has the task."""

    def take_charge(run: Run, *_: Any, **__: Any) -> Any:
        return run.take_epoch("0123456789abcdef")

    monkeypatch.setattr(serving, "take_charge", take_charge)


@pytest.mark.parametrize(
    "key",
    ["[broker]\nembedded = true\nport", "[broker]\nembedded = true\ntls_port", "[join]\nport"],
)
def test_port_in_use_is_reported_before_the_task_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    def compile_task(*_: Any, **__: Any) -> Any:
        pytest.fail("the task compiles first")

    monkeypatch.setattr(serving, "compile_task", compile_task)
    path = tmp_path / "run.toml"
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        path.write_text(
            '[task]\nname = "t"\nsource = "t.py:f"\n[run]\nfolder = "run"\n'
            f"[http]\nenabled = false\n{key} = {port}\n"
        )
        config = read_config(path, environment={})
        with pytest.raises(PortError, match=f"port {port} is in use by another program"):
            serving.serve(config, threading.Event(), lambda _: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("alone")
def test_run_that_fails_before_it_begins_is_shown_as_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, config = ServedRuns(), config_of(folder)

    def service(*_: Any, **__: Any) -> Any:
        assert runs.get(TASK).overview.status()["state"] == "starting"
        raise LinkError("nobody there")

    monkeypatch.setattr(serving, "Service", service)
    site = SharedSite(runs, broker=BrokerSettings(host="localhost"))
    with pytest.raises(LinkError):
        serving.serve(config, threading.Event(), lambda _: None, site=site)
    assert runs.get(TASK).overview.status()["state"] == "stopped"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("min_devices", "9", "max_devices is 5"),
        ("target_accuracy", "0.9", "needs the accuracy"),
        ("over_selection", "1.5", "participants"),
    ],
)
def test_change_of_a_stopped_run_that_does_not_fit_is_refused_at_its_start_with_the_way_back(
    folder: Path, name: str, value: str, words: str
) -> None:
    stopped.change(folder, name, value, "anna")
    config = config_of(folder, "[round]\nmax_devices = 5\nmin_devices = 2\n")
    site = SharedSite(ServedRuns(), broker=BrokerSettings(host="localhost"))
    with pytest.raises(ConfigError, match=f"{words}.*Go back with .*set .* {name} "):
        serving.serve(config, threading.Event(), lambda _: None, site=site)
