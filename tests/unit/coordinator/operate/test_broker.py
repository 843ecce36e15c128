"""The embedded broker: started, guarded by a password, and gone afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import coordinator.operate.broker.embedded
from coordinator.operate.broker.embedded import BrokerStartError, Kind, available, embedded_broker
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.waiting import HANGS_S, free_port, listens


@pytest.fixture(params=["mosquitto", "amqtt"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param not in available():
        pytest.skip(f"{request.param} is not installed")
    found: Kind = request.param
    return found


def first_event(settings: BrokerSettings, wanted: Callable[[LinkEvent], bool]) -> LinkEvent:
    events: list[LinkEvent] = []
    happened = threading.Event()

    def note(event: LinkEvent) -> None:
        if wanted(event):
            events.append(event)
            happened.set()

    link = open_link(settings, name="test", deliver=note)
    try:
        assert happened.wait(HANGS_S)
    finally:
        link.close()
    return events[0]


def mosquittos() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.name() == "mosquitto"}


def test_broker_is_there_inside_the_context_only(kind: Kind, tmp_path: Path) -> None:
    before = mosquittos()
    with embedded_broker(tmp_path, kind=kind) as settings:
        assert first_event(settings, lambda event: True) == Connected(first=True)
        assert settings.host == "127.0.0.1"
    assert not listens(settings.port)
    assert mosquittos() == before


def test_broker_ends_when_its_context_fails(kind: Kind, tmp_path: Path) -> None:
    before = mosquittos()
    with pytest.raises(ZeroDivisionError), embedded_broker(tmp_path, kind=kind) as settings:
        raise ZeroDivisionError
    assert not listens(settings.port)
    assert mosquittos() == before


OWNER = """
import sys, time
from pathlib import Path
from coordinator.operate.broker.embedded import embedded_broker
with embedded_broker(Path(sys.argv[1]), kind="mosquitto"):
    print("there", flush=True)
    time.sleep(3600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends programs with their parent")
def test_broker_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    if "mosquitto" not in available():
        pytest.skip("mosquitto is not installed")
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"there\n"
            (broker,) = psutil.Process(owner.pid).children()
            assert broker.name() == "mosquitto"
        finally:
            owner.kill()
    try:
        psutil.wait_procs([broker], timeout=HANGS_S)
        assert not broker.is_running()
    finally:
        with suppress(psutil.NoSuchProcess):
            broker.kill()


@pytest.mark.parametrize("change", [{"password": "wrong"}, {"username": None, "password": None}])
def test_broker_lets_in_its_user_alone(
    kind: Kind, tmp_path: Path, change: dict[str, str | None]
) -> None:
    with embedded_broker(tmp_path, kind=kind) as settings:
        stranger = replace(settings, **change)  # type: ignore[arg-type]
        event = first_event(stranger, lambda event: True)
        assert isinstance(event, Disconnected)
        assert "user" in event.reason


def test_broker_takes_the_port_and_password_it_is_given(kind: Kind, tmp_path: Path) -> None:
    port = free_port()
    with embedded_broker(tmp_path, kind=kind, port=port, password="given") as settings:
        assert (settings.port, settings.password) == (port, "given")
        assert first_event(settings, lambda event: True) == Connected(first=True)


def test_broker_says_why_a_taken_port_cannot_be_had(kind: Kind, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(
                BrokerStartError, match=f"{kind} did not start.*[Aa]ddress already in use"
            ),
            embedded_broker(tmp_path, kind=kind, port=port),
        ):
            pass


def test_password_is_not_stored_readable(tmp_path: Path) -> None:
    if "mosquitto" not in available():
        pytest.skip("mosquitto is not installed")
    with embedded_broker(tmp_path, kind="mosquitto", password="very secret"):
        files = [path for path in tmp_path.iterdir() if path.is_file()]
        assert {path.name for path in files} == {"users", "mosquitto.conf", "mosquitto.log"}
        assert not [path for path in files if "very secret" in path.read_text()]
        assert (tmp_path / "users").stat().st_mode & 0o077 == 0


def test_broker_that_is_nowhere_to_be_found_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator.operate.broker.embedded, "available", lambda: ())
    with pytest.raises(BrokerStartError, match="install mosquitto"), embedded_broker(tmp_path):
        pass
    with (
        pytest.raises(BrokerStartError, match="amqtt is not installed"),
        embedded_broker(tmp_path, kind="amqtt"),
    ):
        pass
