"""Settings that cannot work are refused with the setting's name; the others are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings, LinkError, is_loopback, tls_context


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": ""}, "host"),
        ({"host": "mqtt://example.org"}, "without a scheme"),
        ({"host": "two words"}, "host"),
        ({"port": -1}, "port = -1: must be from 0 to 65535"),
        ({"port": 65_536}, "port"),
        ({"chunk_bytes": 1_023}, "chunk_bytes"),
        ({"chunk_bytes": 262_145}, "chunk_bytes"),
        ({"keepalive_s": 0}, "keepalive_s"),
        ({"ca": Path("ca.pem")}, "ca is set but tls is off"),
        ({"tls": True, "certificate": Path("c.pem")}, "key is not"),
        ({"tls": True, "key": Path("k.pem")}, "certificate is not"),
        ({"bulk_key": Path("k.pem")}, "bulk_key is set but tls is off"),
        ({"tls": True, "bulk_certificate": Path("c.pem")}, "bulk_key is not"),
        ({"tls": True, "bulk_key": Path("k.pem")}, "bulk_certificate is not"),
        (
            {"tls": True, "bulk_certificate": Path("c.pem"), "bulk_key": Path("k.pem")},
            "bulk_certificate is set but certificate is not",
        ),
        ({"password": "x"}, "username"),
        ({"host": "192.168.1.7"}, "allow_plaintext = true"),
        ({"host": "broker.example.org"}, "read and change the password, the model"),
    ],
)
def test_settings_that_contradict_themselves_name_what_is_wrong(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(LinkError) as caught:
        BrokerSettings(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "127.9.9.9"},
        {"host": "broker.example.org", "tls": True, "port": 8_883},
        {"host": "192.168.1.7", "allow_plaintext": True},
        {"username": "user"},
        {"chunk_bytes": 98_304, "keepalive_s": 3_600},
    ],
)
def test_settings_that_can_work_are_taken(given: dict[str, Any]) -> None:
    BrokerSettings(**given)


def test_bulk_connection_has_its_own_certificate_or_the_same() -> None:
    one = BrokerSettings(tls=True, certificate=Path("c.pem"), key=Path("c.key"))
    assert one.for_bulk() == one
    two = replace(one, bulk_certificate=Path("b.pem"), bulk_key=Path("b.key"))
    bulk = two.for_bulk()
    assert (bulk.certificate, bulk.key) == (Path("b.pem"), Path("b.key"))
    assert replace(bulk, certificate=Path("c.pem"), key=Path("c.key")) == two


def test_password_is_not_shown() -> None:
    assert "secret" not in repr(BrokerSettings(username="user", password="secret"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("lan", False)],
)
def test_loopback_is_told_by_its_text(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_open_link_refuses_a_file_that_is_missing(tmp_path: Path, name: str) -> None:
    files = {"certificate": tmp_path / "c.pem", "key": tmp_path / "k.pem"}
    for other, path in files.items():
        if other != name:
            path.write_text("-")
    if name == "ca":
        settings = BrokerSettings(tls=True, ca=tmp_path / "ca.pem")
    else:
        settings = BrokerSettings(tls=True, certificate=files["certificate"], key=files["key"])
    with pytest.raises(LinkError) as caught:
        open_link(settings, name="x", deliver=lambda event: None)
    assert str(caught.value).startswith(f"{name} {tmp_path}")


def test_tls_files_that_are_not_pem_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pem"
    path.write_text("this is not PEM")
    with pytest.raises(LinkError, match=r"^ca "):
        tls_context(BrokerSettings(tls=True, ca=path))
    with pytest.raises(LinkError, match="both must be PEM files"):
        tls_context(BrokerSettings(tls=True, certificate=path, key=path))


@pytest.mark.parametrize("name", ["", "x" * 101, "käse", "a\nb"])
def test_open_link_refuses_a_name_no_broker_takes(name: str) -> None:
    with pytest.raises(LinkError, match="name"):
        open_link(BrokerSettings(), name=name, deliver=lambda event: None)
