"""Viewers: dashboards that may read what runs tell them, and nothing else."""

from __future__ import annotations

import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest

from coordinator.cli import main
from coordinator.operate.broker.embedded import available, find_mosquitto
from coordinator.operate.identity.authority import Authority
from edge_sdk.protocol.messages.topics import Topics
from edge_sdk.transport.link import Connected, LinkEvent, Received
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings
from tests.waiting import free_port, until

TOPICS, OTHER = Topics("digits"), Topics("weather")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def enroll(*who: str) -> None:
    assert main(["enroll", *who, "--broker", "localhost:1", "--out", who[-1] or "out"]) == 0


def test_viewer_gets_its_certificate_and_how_to_use_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enroll", "--viewer", "--broker", "b.example.org", "--task", "digits"]) == 0
    said = capsys.readouterr().out
    assert (
        "mosquitto_sub -h b.example.org -p 8883 -i viewer --cafile viewer-identity/ca.pem" in said
    )
    assert "-t 'tessera/v1/digits/view/#'" in said
    files = {path.name for path in (folder / "viewer-identity").iterdir()}
    assert files == {"ca.pem", "viewer.pem", "viewer.key"}
    with Authority(folder / "identity") as authority:
        now = authority.now
        assert authority.index.viewers(now) == {"viewer": ("digits",)}
        assert authority.index.allowed(now) == {}, "it is no device"


def test_device_cannot_have_the_name_of_a_viewer(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("viewer", "viewer-1"):
        assert main(["enroll", name, "--broker", "b.example.org"]) == 2
        assert "reserved for viewers" in capsys.readouterr().err


@pytest.mark.skipif("mosquitto" not in available(), reason="needs mosquitto")
def test_broker_lets_viewers_read_what_is_for_them_and_nobody_else(folder: Path) -> None:
    enroll("--coordinator", "eu")
    enroll("--viewer", "one")
    assert main(["enroll", "--viewer", "two", "--task", "weather", "--out", "two"]) == 0
    enroll("robot")
    port = free_port()
    config = ["broker-config", "mosquitto", "--host", "localhost", "--port", str(port)]
    assert main([*config, "--user", "root"]) == 0
    broker = subprocess.Popen(
        [str(find_mosquitto()), "-c", "identity/mosquitto/mosquitto.conf"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    heard: dict[str, list[LinkEvent]] = {name: [] for name in ("one", "two", "robot", "eu")}
    links = {}
    try:
        until(listens)
        for where, name in (
            ("one", "viewer-one"),
            ("two", "viewer-two"),
            ("robot", "robot"),
            ("eu", "coordinator-eu"),
        ):
            at = folder / where
            settings = BrokerSettings(
                host="localhost",
                port=port,
                tls=True,
                ca=folder / "identity" / "ca.pem",
                certificate=at / f"{name}.pem",
                key=at / f"{name}.key",
            )
            links[where] = link = open_link(settings, name=name, deliver=heard[where].append)
            until(partial(_connected, heard[where]))
            for topics in (TOPICS, OTHER):
                link.subscribe(topics.view_status)
                link.subscribe(topics.task)
        own = links["eu"]
        for number, topics in enumerate((TOPICS, OTHER)):
            own.publish(topics.view_status, b"status %d" % number, retain=True)
            own.publish(topics.task, b"task %d" % number, retain=True)
        until(lambda: len(_got(heard["eu"])) == 4)
        until(lambda: len(_got(heard["robot"])) == 2)
        until(lambda: len(_got(heard["one"])) == 2)
        until(lambda: len(_got(heard["two"])) == 1)
        assert _got(heard["one"]) == {b"status 0", b"status 1"}
        assert _got(heard["two"]) == {b"status 1"}
        assert _got(heard["robot"]) == {b"task 0", b"task 1"}
    finally:
        for link in links.values():
            link.kill()
        broker.terminate()
        broker.wait()


def _connected(events: list[LinkEvent]) -> bool:
    return any(isinstance(each, Connected) for each in events)


def _got(events: list[LinkEvent]) -> set[bytes]:
    return {each.payload for each in events if isinstance(each, Received)}
