"""A device joins at a real HTTPS server: what it gets, and everything that is refused.

Server and device are in one process; `tests/integration/test_joining.py` has the programs.
"""

from __future__ import annotations

import json
import logging
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

from coordinator.operate.identity.authority import Authority
from coordinator.operate.identity.files import write_file
from coordinator.operate.joining import server as server_module
from coordinator.operate.joining.codes import (
    CodeBook,
    CodeEntry,
    CodeError,
    JoinPlace,
    read_book,
    utc_now,
)
from coordinator.operate.joining.desk import Desk
from coordinator.operate.joining.server import JoinServer
from coordinator.service.admission.limits import Buckets, Rate
from edge_sdk.device.config import load_config
from edge_sdk.join import joining
from edge_sdk.join.code import AUTHORITY_PATH, JOIN_PATH, JoinError, fingerprint_of, parse_code
from edge_sdk.join.joining import join_task
from edge_sdk.protocol.messages.topics import BULK
from edge_sdk.transport.mqtt.certificates import read_certificate
from edge_sdk.transport.settings import BrokerSettings, tls_context

TASK = "digits"
BROKER = BrokerSettings(host="b.example.org", port=8883, tls=True)
PLAIN = BrokerSettings(host="127.0.0.1", port=1883, username="tessera", password="pass word")


class Site:
    """An authority, a code book and the server, on a port of this machine."""

    def __init__(self, folder: Path, stack: ExitStack, broker: BrokerSettings) -> None:
        self.folder, self.authority = folder, folder / "identity"
        self.now = utc_now()
        with Authority(self.authority, create_days=30) as authority:
            self.ca = authority.pem
            self.context = server_context(authority, folder)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        fingerprint = fingerprint_of(ssl.PEM_cert_to_DER_cert(self.ca.decode()))
        place = JoinPlace("127.0.0.1", self.port, TASK, fingerprint)
        self.book = stack.enter_context(CodeBook(folder / "run", place, clock=self.clock))
        self.desk = Desk(self.book, broker, self.authority, self.ca)
        self.server = JoinServer(listener, self.context, self.desk)
        self.server.start()
        stack.callback(self.server.close)

    def clock(self) -> datetime:
        return self.now

    def code(self, devices: int = 1, hours: float = 1.0) -> CodeEntry:
        return self.book.create(devices=devices, hours=hours)

    def join(self, entry: CodeEntry, name: str = "robot", **options: Any) -> Path:
        folder = options.pop("folder", self.folder / name)
        return join_task(parse_code(entry.code.text), name=name, folder=folder, **options)


def server_context(authority: Authority, folder: Path) -> ssl.SSLContext:
    for name, file in authority.broker_certificate(["127.0.0.1"]).files().items():
        write_file(folder / name, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "broker.pem", folder / "broker.key")
    return context


@contextmanager
def opened(folder: Path, broker: BrokerSettings = BROKER) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(folder, stack, broker)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with opened(tmp_path) as site:
        yield site


# -- joining -----------------------------------------------------------------------------------


def test_device_gets_certificates_and_a_configuration_that_works(site: Site) -> None:
    path = site.join(site.code(), data="/srv/data", label="state")
    config = load_config(path, environment={})
    assert config.format.label == ("state",)
    assert (config.name, config.task, config.data) == ("robot", TASK, "/srv/data")
    assert config.broker.address == BROKER.address
    assert config.state_dir == site.folder / "robot" / "state"
    # Each key belongs to its certificate, and each connection has its own.
    assert tls_context(config.broker) is not None
    assert tls_context(config.broker.for_bulk()) is not None
    names = []
    for certificate in (config.broker.certificate, config.broker.bulk_certificate):
        assert certificate is not None
        facts = read_certificate(certificate)
        assert facts is not None
        names.append(facts.name)
    assert names == ["robot", "robot" + BULK]
    for private in ("robot.key", "device.toml"):
        assert stat.S_IMODE((path.parent / private).stat().st_mode) == 0o600
    with Authority(site.authority) as authority:
        assert [each.name for each in authority.index.enrolments] == ["robot"]


def test_without_tls_the_same_code_brings_the_password(tmp_path: Path) -> None:
    with opened(tmp_path, PLAIN) as site:
        config = load_config(site.join(site.code()), environment={})
    assert config.broker == PLAIN
    assert not list(tmp_path.glob("robot/*.key"))


def test_lost_answer_is_asked_for_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = site.code()
    with monkeypatch.context() as patch:
        patch.setattr(joining, "_store", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            site.join(entry)
    key = (site.folder / "robot" / "robot.key").read_bytes()
    assert site.join(entry).exists()
    assert (site.folder / "robot" / "robot.key").read_bytes() == key
    assert [guest.name for guest in site.book.entries[-1].guests] == ["robot"]


def test_revoked_device_does_not_come_back_with_its_old_code(site: Site) -> None:
    entry = site.code()
    config = site.join(entry)
    config.unlink()  # the same name and key ask again
    site.join(entry).unlink()
    with Authority(site.authority) as authority:
        authority.revoke("robot")
    with pytest.raises(JoinError, match="'robot' was revoked: to come back, it needs a new code"):
        site.join(entry)
    # Nor once another device has got its name.
    site.now += timedelta(seconds=5)
    site.join(site.code(), folder=site.folder / "successor")
    with pytest.raises(JoinError, match="'robot' was revoked"):
        site.join(entry)
    with Authority(site.authority) as authority:
        assert len(authority.valid("robot")) == 1


def test_task_that_was_withdrawn_does_not_come_back_with_the_old_code(site: Site) -> None:
    entry = site.book.create(devices=1, hours=1.0, tasks=[TASK, "weather"])
    site.join(entry).unlink()
    with Authority(site.authority) as authority:
        assert authority.allow("robot", (TASK,))
    site.join(entry)  # the same name and key ask again
    with Authority(site.authority) as authority:
        assert authority.tasks("robot") == (TASK,)


def test_name_that_is_taken_is_refused_and_costs_no_place(site: Site) -> None:
    entry = site.code(devices=2)
    site.join(entry)
    with pytest.raises(JoinError, match=r"'robot' has joined already: choose another name"):
        site.join(entry, folder=site.folder / "elsewhere")
    assert site.join(entry, "other").exists()
    with Authority(site.authority) as authority:
        authority.revoke("robot")
    assert site.join(site.code(), folder=site.folder / "again").exists()


def test_device_that_has_joined_is_not_overwritten(site: Site) -> None:
    site.join(site.code())
    with pytest.raises(JoinError, match=r"device\.toml already exists: start it with"):
        site.join(site.code())


@pytest.mark.parametrize("name", ["coordinator", "Robot", "x" * 60, "a-bulk"])
def test_impossible_name_is_refused_before_anything_is_sent(site: Site, name: str) -> None:
    with pytest.raises(JoinError, match="--name"):
        site.join(site.code(), name)
    assert site.book.entries[-1].guests == ()


# -- codes -------------------------------------------------------------------------------------


def test_used_up_code_is_refused(site: Site) -> None:
    entry = site.code(devices=2)
    site.join(entry, "one")
    site.join(entry, "two")
    with pytest.raises(JoinError, match=r"refuses: this code was for 2 devices, and is used up"):
        site.join(entry, "three")
    assert not (site.folder / "three" / "device.toml").exists()


def test_expired_code_is_refused(site: Site) -> None:
    entry = site.code(hours=2)
    site.now += timedelta(hours=2)
    with pytest.raises(JoinError, match=r"refuses: this code expired on .* UTC: ask for a new one"):
        site.join(entry)


def test_revoked_code_is_refused_and_who_has_joined_stays(site: Site) -> None:
    entry = site.code(devices=3)
    site.join(entry, "one")
    site.book.revoke(entry.code.id)
    with pytest.raises(JoinError, match="refuses: this code was revoked"):
        site.join(entry, "two")
    with Authority(site.authority) as authority:
        assert authority.valid("one")


def test_unknown_code_and_wrong_secret_are_refused_alike(site: Site) -> None:
    entry = site.code()
    stranger = replace(entry, code=replace(entry.code, secret=bytes(12)))
    with pytest.raises(JoinError, match="refuses: this code is not known here"):
        site.join(stranger)
    body = json.dumps({"v": 1, "code": entry.code.id, "task": TASK, "name": "x"}).encode()
    with pytest.raises(CodeError, match="not known here"):
        site.desk.admit(body, stranger.code.mac(body), "here")
    with pytest.raises(CodeError, match="not known here"):
        site.desk.admit(body, "nonsense ü", "here")


def test_code_of_another_task_is_refused(site: Site) -> None:
    entry = site.code()
    other = replace(entry, code=replace(entry.code, task="letters"))
    with pytest.raises(JoinError, match="refuses: this code is for 'digits', not for"):
        site.join(other)


def test_code_for_several_tasks_lets_a_device_into_all_of_them(tmp_path: Path) -> None:
    with opened(tmp_path) as site:
        entry = site.book.create(devices=1, hours=1, tasks=["weather", "digits"])
        assert entry.code.task == "weather"  # all that is in the code itself
        path = site.join(entry)
        assert 'tasks = ["weather", "digits"]' in path.read_text()
        assert "\ntask = " not in path.read_text()
        with Authority(site.authority) as authority:
            assert authority.tasks("robot") == ("digits", "weather")
    with CodeBook(tmp_path / "run") as again:
        assert [each.tasks for each in again.entries] == [("weather", "digits")]


def test_codes_survive_a_restart_and_are_private(tmp_path: Path) -> None:
    with opened(tmp_path) as site:
        entry = site.code(devices=3)
        site.join(entry, "one")
        port = site.port
    book = tmp_path / "run" / "join" / "codes.json"
    assert stat.S_IMODE(book.stat().st_mode) == 0o600
    assert stat.S_IMODE(book.parent.stat().st_mode) == 0o700
    with CodeBook(tmp_path / "run") as again:
        (known,) = again.entries
        assert (known.code, [guest.name for guest in known.guests]) == (entry.code, ["one"])
        assert again.create(devices=1, hours=1).code.port == port
        with pytest.raises(CodeError, match="in use by another process"):
            CodeBook(tmp_path / "run")


def test_damaged_book_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "join").mkdir()
    with pytest.raises(CodeError, match="was never served"):
        CodeBook(tmp_path)
    (tmp_path / "join" / "codes.json").write_text('{"version": 1}')
    with pytest.raises(CodeError, match=r"codes\.json cannot be read .* remove it"):
        CodeBook(tmp_path)


def test_no_flipped_bit_of_the_book_goes_unnoticed(tmp_path: Path) -> None:
    with opened(tmp_path) as site:
        site.code(devices=3)
    path = tmp_path / "run" / "join" / "codes.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytes([whole[place] ^ 1 << place % 8])
        path.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(CodeError, match="cannot be read"):
            read_book(path)


@pytest.mark.parametrize(("devices", "hours"), [(0, 1.0), (1, 0.0), (1, float("nan")), (1, 1e9)])
def test_impossible_code_is_refused(site: Site, devices: int, hours: float) -> None:
    with pytest.raises(CodeError):
        site.book.create(devices=devices, hours=hours)


# -- somebody in between -----------------------------------------------------------------------


def listen(site: Site) -> list[str]:
    """Everything that devices send to a site: bodies and MACs."""
    heard: list[str] = []
    admit = site.desk.admit

    def hear(body: bytes, mac: str, address: str) -> dict[str, Any]:
        heard.append(body.decode() + mac)
        return admit(body, mac, address)

    site.desk.admit = hear  # type: ignore[method-assign]
    return heard


def test_other_authority_is_recognised_before_anything_is_sent(tmp_path: Path) -> None:
    with opened(tmp_path / "real") as site, opened(tmp_path / "false") as false:
        entry = site.code()
        heard = listen(false)
        lured = replace(entry, code=replace(entry.code, port=false.port))
        with pytest.raises(JoinError, match=r"is not the coordinator that made this code.*Nothing"):
            site.join(lured)
        assert heard == []
        assert not (site.folder / "robot").exists()


def test_right_authority_shown_by_a_stranger_does_not_help(tmp_path: Path) -> None:
    """The authority's certificate is public: somebody in between can show it, not use it."""
    with opened(tmp_path / "real") as site, opened(tmp_path / "false") as false:
        entry = site.code()
        heard = listen(false)
        false.desk.welcome = site.desk.welcome  # type: ignore[method-assign]
        lured = replace(entry, code=replace(entry.code, port=false.port))
        with pytest.raises(JoinError, match="is not the coordinator that made this code"):
            site.join(lured)
        assert heard == []


def test_secret_is_neither_sent_nor_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    sent = listen(site)
    entry = site.code()
    with caplog.at_level(logging.DEBUG):
        site.join(entry)
        with pytest.raises(JoinError):
            site.join(entry, "second")
    assert len(sent) == 2
    key = (site.folder / "robot" / "robot.key").read_text().splitlines()[1]
    for text in (*sent, caplog.text):
        for secret in (entry.code.text, entry.code.secret.hex(), key):
            assert secret not in text
    assert f"robot joined with code {entry.code.id}" in caplog.text


# -- strangers ---------------------------------------------------------------------------------


def ask(site: Site, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    context = ssl.create_default_context(cadata=site.ca.decode())
    with closing(HTTPSConnection("127.0.0.1", site.port, timeout=30, context=context)) as link:
        link.request(method, path, body or None, headers)
        response = link.getresponse()
        return response.status, json.loads(response.read())


def test_failed_attempts_are_limited_by_address(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = Buckets(Rate(0.0, 3.0), 10)
    monkeypatch.setattr(site.server, "_attempts", limited)
    entry = site.code(devices=10)
    for number in range(5):
        site.join(entry, f"device-{number}")  # what succeeds does not count
    wrong = replace(entry, code=replace(entry.code, secret=bytes(12)))
    for _ in range(3):
        with pytest.raises(JoinError, match="not known here"):
            site.join(wrong, "stranger")
    for tried in (wrong, entry):
        with pytest.raises(JoinError, match="too many failed attempts from this address: wait"):
            site.join(tried, "stranger")


def test_connections_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BY_ADDRESS", 2)
    with opened(tmp_path) as site, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(("127.0.0.1", site.port)))
        with socket.create_connection(("127.0.0.1", site.port), timeout=30) as third:
            assert third.recv(1) == b""  # closed at once, before any handshake


def test_slow_connection_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S", 0.1)
    with (
        opened(tmp_path) as site,
        socket.create_connection(("127.0.0.1", site.port), timeout=30) as slow,
    ):
        assert slow.recv(1) == b""


def test_silent_client_does_not_keep_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_S", 2.0)
    with opened(tmp_path) as site:
        context = ssl.create_default_context(cadata=site.ca.decode())
        with (
            socket.create_connection(("127.0.0.1", site.port), timeout=30) as plain,
            context.wrap_socket(
                plain, server_hostname="127.0.0.1", suppress_ragged_eofs=False
            ) as silent,
            # Cut off: the server does not say goodbye, to which it would await an answer.
            pytest.raises((ssl.SSLEOFError, ConnectionResetError)),
        ):
            silent.recv(1)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", b"", 404),
        ("GET", JOIN_PATH, b"", 404),
        ("POST", AUTHORITY_PATH, b"{}", 404),
        ("POST", JOIN_PATH, b"not JSON", 403),
        ("POST", JOIN_PATH, b"[]", 403),
        ("POST", JOIN_PATH, b'{"v": 1}', 403),
        ("POST", JOIN_PATH, b'{"v": 1, "code": "x", "task": "t", "name": "n"}', 403),
        ("POST", JOIN_PATH, b"x" * 10_000, 400),
    ],
)
def test_other_requests_are_refused(
    site: Site, method: str, path: str, body: bytes, status: int
) -> None:
    got, answer = ask(site, method, path, body)
    assert (got, list(answer)) == (status, ["v", "error"])


def test_what_does_not_speak_tls_harms_nobody(site: Site) -> None:
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(300)):
        with socket.create_connection(("127.0.0.1", site.port), timeout=30) as stranger:
            stranger.sendall(data)
    assert site.join(site.code()).exists()


def test_request_for_another_kind_of_key_is_refused(site: Site) -> None:
    code = site.code().code
    for request in (None, "no request"):
        content = {"v": 1, "code": code.id, "task": TASK, "name": "robot", "request": request}
        body = json.dumps(content).encode()
        status, answer = ask(site, "POST", JOIN_PATH, body, **{"Tessera-Mac": code.mac(body)})
        assert (status, "signing request cannot be read" in answer["error"]) == (403, True)
    assert site.book.entries[-1].guests == ()


def test_nobody_there_is_said_in_words(tmp_path: Path) -> None:
    with opened(tmp_path) as site:
        entry = site.code()
    with pytest.raises(JoinError, match="nothing listens there; is serve running"):
        site.join(entry)
