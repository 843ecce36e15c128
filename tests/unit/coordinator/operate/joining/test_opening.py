"""What `serve` opens for devices: broker, port and codes, with and without Mosquitto."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import ConfigError
from coordinator.operate.broker import embedded
from coordinator.operate.config import JoinTable, ServeConfig, read_config
from coordinator.operate.joining import opening
from coordinator.operate.joining.codes import CodeBook, JoinPlace, utc_now
from coordinator.operate.joining.opening import (
    Joining,
    book_commands,
    local_address,
    open_embedded,
    open_entrance,
    open_joining,
)
from coordinator.operate.joining.qr import draw_qr
from coordinator.operate.serve.serving import NO_TLS, is_journal, reach_broker
from edge_sdk.device.config import load_config
from edge_sdk.device.service.offers import list_tasks
from edge_sdk.join.joining import join_task
from edge_sdk.program.control import ControlError
from edge_sdk.transport.settings import BrokerSettings
from tests.waiting import free_port

RUN = '[task]\nname = "tiny"\nsource = "task.py:make"\n[run]\nfolder = "run"\n'


def config_of(folder: Path, more: str = "") -> ServeConfig:
    path = folder / "run.toml"
    path.write_text(RUN + more)
    return read_config(path, environment={})


@pytest.mark.skipif("amqtt" not in embedded.available(), reason="needs amqtt")
def test_without_mosquitto_devices_on_this_machine_join_with_the_same_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (opening, embedded):
        monkeypatch.setattr(module, "available", lambda: ("amqtt",))
    config = config_of(tmp_path)
    with open_embedded(config, tmp_path / "run" / "broker") as (own, entrance):
        assert entrance is not None
        with open_joining(config, tmp_path / "run", entrance) as joining:
            entry = joining.current()
            assert entry is not None
            path = join_task(entry.code, name="robot", folder=tmp_path / "robot")
        device = load_config(path, environment={})
        assert device.broker == replace(own, chunk_bytes=device.broker.chunk_bytes)
        assert list_tasks(device.broker, "robot") == ()
        with pytest.raises(ControlError, match="not ours: reload it yourself"):
            entrance.reload()
    # The password stays the same: the device has written it down.
    assert (tmp_path / "run" / "broker" / "password").read_text() == own.password
    elsewhere = config_of(tmp_path, '[join]\nhost = "coordinator.example.org"\n')
    with (
        pytest.raises(ConfigError, match="serves this machine only; install mosquitto"),
        open_embedded(elsewhere, tmp_path / "run" / "broker"),
    ):
        pass


def test_own_broker_with_tls_hands_out_its_address(tmp_path: Path) -> None:
    more = (
        '[broker]\nhost = "b.example.org"\ntls = true\n[join]\nenabled = true\n'
        f'authority = "identity"\nhost = "localhost"\nport = {free_port()}\n'
    )
    config = config_of(tmp_path, more)
    with open_entrance(config, tmp_path / "run" / "broker") as entrance:
        assert entrance.port == config.join.port
        with open_joining(config, tmp_path / "run", entrance) as joining:
            entry = joining.current()
            assert entry is not None
            path = join_task(entry.code, name="robot", folder=tmp_path / "robot")
    device = load_config(path, environment={})
    assert (device.broker.address, device.broker.tls) == ("b.example.org:8883", True)


def test_own_broker_on_this_machine_is_named_as_devices_reach_it(tmp_path: Path) -> None:
    more = (
        '[broker]\nhost = "localhost"\ntls = true\n[join]\nenabled = true\n'
        f'authority = "identity"\nport = {free_port()}\nhost = '
    )
    for host in ("coordinator.example.org", "127.0.0.1"):
        with open_entrance(config_of(tmp_path, f'{more}"{host}"\n'), tmp_path / "b") as entrance:
            assert (entrance.broker.host, entrance.host) == (host, host)


def test_own_broker_without_tls_cannot_be_joined(tmp_path: Path) -> None:
    broker = '[broker]\nhost = "{}"\nusername = "own"\npassword = "own"\n'
    plain = "allow_plaintext = true\n"
    for text in (broker.format("127.0.0.1"), broker.format("b.example.org") + plain):
        config = config_of(tmp_path, text + "[join]\nenabled = true\n")
        assert not config.can_join
        with reach_broker(config, config.run.folder) as (settings, entrance):
            assert (settings.username, entrance) == ("own", None)
    assert "password" in NO_TLS


def test_without_joining_its_port_is_not_needed(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        more = f'[join]\nenabled = false\nhost = "c.example.org"\nport = {port}\n'
        config = config_of(tmp_path, f"{more}[broker]\nembedded = true\ntls_port = {port}\n")
        for _ in range(2):
            with open_embedded(config, tmp_path / "run" / "broker") as (own, entrance):
                assert (own.tls, entrance) == (False, None)


def test_authority_is_in_the_run_where_the_settings_are_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    assert config.authority == tmp_path / "identity"
    inside = config.run.folder / "identity"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)  # root may write
        assert config.authority == inside
        named = config_of(tmp_path, '[join]\nauthority = "other"\n')
        assert named.authority == tmp_path / "other"
        (tmp_path / "identity").mkdir()
        assert config.authority == tmp_path / "identity"
        (tmp_path / "identity").rmdir()
    inside.mkdir(parents=True)
    assert config.authority == inside  # it stays


def test_own_broker_without_its_authority_cannot_be_joined(tmp_path: Path) -> None:
    broker = '[broker]\nhost = "b.example.org"\ntls = true\n'
    assert not config_of(tmp_path, broker).can_join
    with pytest.raises(ConfigError, match=r"join\.enabled needs join\.authority"):
        config_of(tmp_path, broker + "[join]\nenabled = true\n")
    assert not config_of(tmp_path, "[join]\nenabled = false\n").can_join


@pytest.fixture
def book(tmp_path: Path) -> Iterator[CodeBook]:
    with CodeBook(tmp_path, JoinPlace("127.0.0.1", 1, "tiny", bytes(16))) as book:
        yield book


def joining_of(book: CodeBook, tmp_path: Path, devices: int | None = None) -> Joining:
    config = config_of(tmp_path, "[round]\nmin_devices = 3\n")
    return Joining(book, replace(config, join=JoinTable(devices=devices)))


def test_printed_code_is_for_the_devices_that_are_missing(tmp_path: Path, book: CodeBook) -> None:
    joining = joining_of(book, tmp_path)
    first = joining.current()
    assert first is not None
    assert (first.devices, first.until - first.made) == (3, timedelta(hours=24))
    assert joining.current() == first  # a restart prints the same
    book.enter(first, "one", "", lambda _: None)
    book.revoke(first.code.id)
    second = joining.current()
    assert second is not None
    assert second.devices == 2
    for name in ("two", "three"):
        book.enter(second, name, "", lambda _: None)
    assert joining.current() is None
    assert joining_of(book, tmp_path, devices=4).current() is not None


@pytest.mark.parametrize(
    "moved",
    [{"host": "10.0.0.2"}, {"port": 2}, {"fingerprint": bytes(15) + b"x"}],
)
def test_code_for_an_old_place_is_not_printed(tmp_path: Path, moved: dict[str, Any]) -> None:
    place = JoinPlace("127.0.0.1", 1, "tiny", bytes(16))
    with CodeBook(tmp_path, place) as book:
        old = book.create(devices=3, hours=1)
    with CodeBook(tmp_path, replace(place, **moved)) as book:
        new = joining_of(book, tmp_path).current()
        assert new is not None
        assert new.code.id != old.code.id
    with CodeBook(tmp_path, place) as book:
        assert joining_of(book, tmp_path).current() == old


def test_commands_of_a_book_are_plain_values(book: CodeBook) -> None:
    commands = book_commands(book)
    made = commands["codes.create"](devices=2, hours=1)
    assert (made["state"], made["devices"], made["joined"]) == ("open", 2, [])
    assert commands["codes.list"]() == [made]
    commands["codes.revoke"](id=made["id"])
    (revoked,) = commands["codes.list"]()
    assert (revoked["state"], revoked["code"]) == ("revoked", None)
    assert book.entries[0].revoked is not None
    assert book.entries[0].revoked <= utc_now()


def test_address_of_this_machine_is_one() -> None:
    assert BrokerSettings(host=local_address(), tls=True).host.count(".") == 3


def test_journal_is_recognised_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "journal").open("w") as journal:
        status = os.fstat(journal.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_journal(journal)
        with (tmp_path / "other").open("w") as other:
            assert not is_journal(other)
        for wrong in ("", "nonsense", "1:2:3"):
            monkeypatch.setenv("JOURNAL_STREAM", wrong)
            assert not is_journal(journal)
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not is_journal(sys.stdout)


def test_qr_code_is_a_square_of_blocks() -> None:
    drawn = draw_qr("tessera-device join " + "a" * 80)
    lines = drawn.splitlines()
    assert {len(line) for line in lines} == {max(map(len, lines))}
    assert set(drawn) <= set("█▀▄ \n")
