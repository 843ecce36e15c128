"""Ports that a run keeps: the usual ones, or the next free set; what is in use is named."""

from __future__ import annotations

import os
import socket
from itertools import count
from pathlib import Path

import pytest

from coordinator.operate.broker import ports as ports_module
from coordinator.operate.broker.ports import PortError, Ports, claim_ports
from tests.waiting import HANGS_S, free_port

ANY = Ports(local=0, devices=0, join=0)


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs may have the usual ports of this machine.

    These are below those that systems give to connections, and other ones for every process.
    """
    start = 20_000 + os.getpid() % 40 * 250
    for number, name in enumerate(("LOCAL", "DEVICES", "JOIN")):
        monkeypatch.setattr(ports_module, name, start + 80 * number)
    monkeypatch.setattr(ports_module, "PATIENCE_S", 0.0)


def claim(folder: Path, wanted: Ports = ANY, *, embedded: bool = True) -> Ports:
    ports, listener = claim_ports(folder, wanted, "127.0.0.1", embedded=embedded)
    listener.close()
    return ports


def test_run_keeps_its_ports(tmp_path: Path) -> None:
    first = claim(tmp_path)
    with socket.create_server(("127.0.0.1", ports_module.LOCAL + 1)):
        assert claim(tmp_path) == first


def test_run_waits_for_its_own_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = claim(tmp_path)
    ending = socket.create_server(("127.0.0.1", first.devices))
    looks = count(1)

    def sleep(_: float) -> None:
        if next(looks) == 3:
            ending.close()  # as the broker of a killed coordinator does

    monkeypatch.setattr(ports_module, "PATIENCE_S", HANGS_S)
    monkeypatch.setattr("coordinator.operate.broker.ports.time.sleep", sleep)
    assert claim(tmp_path) == first
    assert next(looks) == 4


def test_second_run_takes_the_next_set_as_a_whole(tmp_path: Path) -> None:
    ports, listener = claim_ports(tmp_path / "one", ANY, "127.0.0.1", embedded=True)
    with listener:
        other = claim(tmp_path / "two")
    assert other == Ports(local=ports.local + 1, devices=ports.devices + 2, join=ports.join + 2)


def test_port_that_another_program_has_is_passed_over_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", ports_module.LOCAL)):
        chosen = claim(tmp_path)
    assert chosen.local == ports_module.LOCAL + 1
    with (
        socket.create_server(("127.0.0.1", chosen.devices)),
        pytest.raises(PortError, match=rf"port {chosen.devices} is in use .*set broker\.tls_port"),
    ):
        claim(tmp_path)


def test_named_port_is_used_or_named_in_the_error(tmp_path: Path) -> None:
    port = free_port()
    wanted = Ports(local=0, devices=0, join=port)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(PortError, match=rf"port {port} is in use .*set join\.port"),
    ):
        claim(tmp_path, wanted)
    assert claim(tmp_path, wanted).join == port


def test_broker_elsewhere_needs_only_the_port_for_joining(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", ports_module.LOCAL)):
        assert claim(tmp_path, embedded=False).join == ports_module.JOIN


def test_damaged_note_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text("{}")
    with pytest.raises(PortError, match=r"ports\.json cannot be read .* remove it"):
        claim(tmp_path)
