"""Whoever may not come in stays out: tokens, sessions, names, origins and limits."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path

import pytest

from coordinator.errors import ConfigError
from coordinator.operate.config import HttpTable
from coordinator.operate.http.access import door as doors
from coordinator.operate.http.access.door import network
from coordinator.operate.http.access.guard import MAX_BODY_BYTES
from coordinator.operate.http.access.sessions import MAX_SESSIONS, Sessions
from coordinator.operate.http.access.tokens import (
    MAX_TICKETS,
    TICKET_S,
    Holder,
    Role,
    Tokens,
    read_tokens,
    token_path,
)
from coordinator.service.admission.limits import Rate
from tests.staged_runs import API, StagedPage, staged_page

RUN = f"{API}/runs/digits"
ANNA = Holder(Role.OPERATE, "anna")


def test_nobody_reads_without_a_token(page: StagedPage) -> None:
    for path in (f"{API}/runs", RUN, f"{RUN}/devices", f"{RUN}/events", "/metrics"):
        reply = page.ask("GET", path, role=None)
        assert reply.status == 401, path
        assert reply.headers["WWW-Authenticate"].startswith("Bearer")
        assert b"digits" not in reply.content


def test_wrong_token_is_refused_as_header_and_at_the_sign_in(page: StagedPage) -> None:
    wrong = "0" * 64
    headers = {"Authorization": f"Bearer {wrong}"}
    assert page.ask("GET", RUN, role=None, headers=headers).status == 401
    reply = page.sign_in(wrong)
    assert reply.status == 401
    assert "Set-Cookie" not in reply.headers
    basic = {"Authorization": f"Basic {page.token()}"}
    assert page.ask("GET", RUN, role=None, headers=basic).status == 401


def test_reader_reads_and_may_not_operate(page: StagedPage) -> None:
    assert page.ask("GET", RUN, role=Role.READ).status == 200
    reply = page.ask("POST", f"{RUN}/pause", role=Role.READ, body={})
    assert reply.status == 403
    assert "role operate" in reply.json["error"]
    cookie = {"Cookie": page.cookie(Role.READ), "Origin": page.origin}
    assert page.ask("POST", f"{RUN}/pause", role=None, body={}, headers=cookie).status == 403
    assert page.done == []


def test_cookie_is_out_of_reach_of_scripts_and_of_other_pages(page: StagedPage) -> None:
    reply = page.sign_in(page.token())
    assert reply.json["role"] == "operate"
    name, *attributes = (each.strip() for each in reply.headers["Set-Cookie"].split(";"))
    assert name.startswith(f"tessera-{page.port}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert page.token() not in name


def test_session_ends_when_its_browser_signs_in_again(page: StagedPage) -> None:
    before = {"Cookie": page.cookie()}
    reply = page.ask(
        "POST",
        f"{API}/session",
        role=None,
        body={"token": page.token(Role.READ)},
        headers=before | {"Origin": page.origin},
    )
    assert reply.json["role"] == "read"
    assert page.ask("GET", RUN, role=None, headers=before).status == 401


def test_session_ends_at_sign_out(page: StagedPage) -> None:
    cookie = {"Cookie": page.cookie()}
    assert page.ask("GET", f"{API}/session", role=None, headers=cookie).json["name"] == "operator"
    signed_out = page.ask(
        "DELETE", f"{API}/session", role=None, headers=cookie | {"Origin": page.origin}
    )
    assert signed_out.status == 204
    assert "Max-Age=0" in signed_out.headers["Set-Cookie"]
    assert page.ask("GET", RUN, role=None, headers=cookie).status == 401


def test_session_expires_and_the_oldest_of_too_many_ends() -> None:
    now = [0.0]
    sessions = Sessions(60.0, clock=lambda: now[0])
    name, _ = sessions.begin(ANNA)
    assert sessions.find(name) is not None
    now[0] = 60.0
    assert sessions.find(name) is None
    assert len(sessions) == 0
    names = [sessions.begin(ANNA)[0] for _ in range(MAX_SESSIONS + 1)]
    assert len(sessions) == MAX_SESSIONS
    assert sessions.find(names[0]) is None
    assert sessions.find(names[1]) is not None


def test_expired_session_is_refused(tmp_path: Path) -> None:
    hours = 1e-9  # over when the answer is sent
    with staged_page(tmp_path, HttpTable(session_hours=hours)) as page:
        assert page.ask("GET", RUN, role=None, headers={"Cookie": page.cookie()}).status == 401


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1@evil.example", ""],
)
def test_other_name_of_the_host_is_refused(page: StagedPage, host: str) -> None:
    for path in (RUN, "/", "/healthz", "/metrics"):
        assert page.ask("GET", path, headers={"Host": host}).status == 421, path
    assert page.ask("POST", f"{RUN}/pause", body={}, headers={"Host": host}).status == 421
    assert page.done == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:9", "10.1.2.3"])
def test_this_machine_and_addresses_are_names_of_the_page(page: StagedPage, host: str) -> None:
    assert page.ask("GET", RUN, headers={"Host": host}).status == 200


def test_configured_name_is_one_of_the_page(tmp_path: Path) -> None:
    with staged_page(tmp_path, HttpTable(names=("fl.example.org",))) as page:
        assert page.ask("GET", RUN, headers={"Host": "FL.example.org:8080"}).status == 200
        assert page.ask("GET", RUN, headers={"Host": "other.example.org"}).status == 421


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1", "http://localhost:{port}", "{port}"],
)
def test_request_of_another_page_changes_nothing(page: StagedPage, origin: str) -> None:
    headers = {"Origin": origin.format(port=page.port), "Cookie": page.cookie()}
    assert page.ask("POST", f"{RUN}/pause", role=None, body={}, headers=headers).status == 403
    assert page.ask("GET", RUN, role=None, headers=headers).status == 403
    with_token = {"Origin": headers["Origin"]}
    assert page.ask("POST", f"{RUN}/pause", body={}, headers=with_token).status == 403
    assert page.done == []


def test_change_by_a_browser_needs_an_origin(page: StagedPage) -> None:
    cookie = {"Cookie": page.cookie()}
    assert page.ask("POST", f"{RUN}/pause", role=None, body={}, headers=cookie).status == 403
    assert page.done == []
    headers = cookie | {"Origin": page.origin}
    assert page.ask("POST", f"{RUN}/pause", role=None, body={}, headers=headers).status == 200
    body = {"token": page.token()}
    assert page.ask("POST", f"{API}/session", role=None, body=body).status == 403


def test_change_by_a_script_needs_none_and_is_in_its_name(page: StagedPage) -> None:
    assert page.ask("POST", f"{RUN}/pause", body={}).status == 200
    assert page.done == [("pause", {"by": "operator at 127.0.0.1"})]


def test_form_of_another_page_is_no_request(page: StagedPage) -> None:
    headers = {"Cookie": page.cookie(), "Origin": page.origin}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        given = headers | {"Content-Type": kind}
        assert page.ask("POST", f"{RUN}/pause", role=None, body={}, headers=given).status == 415
    assert page.done == []


def test_large_body_is_not_read(page: StagedPage) -> None:
    body = json.dumps({"reason": "x" * MAX_BODY_BYTES}).encode()
    path = f"{RUN}/devices/porch/quarantine"
    assert page.ask("POST", path, body=body).status == 413
    declared = {"Content-Length": "1" + "0" * 12}
    assert page.ask("POST", path, body=b"{}", headers=declared).status == 413
    connection = page.connect()
    connection.request(
        "POST",
        path,
        iter([b"x" * 4096] * 16),
        {"Authorization": f"Bearer {page.token()}", "Content-Type": "application/json"},
        encode_chunked=True,
    )
    answer = connection.getresponse()
    assert answer.status == 413
    answer.read()
    connection.close()
    assert page.done == []


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2f..%2fapp.py",
        "/page/%2e%2e/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/....//app.py",
        "/page/%00index.html",
        "/page/../../../../../../etc/passwd",
        "//etc/passwd",
    ],
)
def test_no_path_leaves_the_page_folder(page: StagedPage, path: str) -> None:
    reply = page.ask("GET", path)
    assert reply.status == 404
    assert b"import" not in reply.content
    assert b"root:" not in reply.content


def test_nothing_from_a_request_becomes_a_header(page: StagedPage) -> None:
    injected = "x%0d%0aSet-Cookie:%20a=b"
    paths = (f"{RUN}/devices/{injected}", f"{API}/runs/{injected}", f"/page/{injected}")
    for path in (*paths, f"{RUN}/devices?sort={injected}"):
        reply = page.ask("GET", path)
        assert reply.status in (400, 404), path
        assert "Set-Cookie" not in reply.headers
    with socket.create_connection(("127.0.0.1", page.port)) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\x00\r\n\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 400")


def test_two_hosts_or_two_origins_are_refused(page: StagedPage) -> None:
    origin = page.origin.encode()
    for extra, status in (
        (b"Host: localhost\r\n", b"400"),
        (b"Origin: %b\r\nOrigin: http://evil.example\r\n" % origin, b"403"),
    ):
        with socket.create_connection(("127.0.0.1", page.port)) as raw:
            place = origin.removeprefix(b"http://")
            raw.sendall(b"GET / HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (place, extra))
            assert raw.recv(4096).split(b" ")[1] == status


def test_guessing_is_limited_while_sessions_go_on(page: StagedPage) -> None:
    cookie = {"Cookie": page.cookie()}
    replies = [page.sign_in(f"{number:064}") for number in range(30)]
    assert [reply.status for reply in replies[:5]] == [401] * 5
    assert replies[-1].status == 429
    assert int(replies[-1].headers["Retry-After"]) > 0
    assert page.ask("GET", RUN, role=None, headers=cookie).status == 200
    stale = {"Authorization": f"Bearer {'0' * 64}"}
    assert page.ask("GET", RUN, role=None, headers=stale).status == 429


def test_wrong_tokens_of_an_address_keep_no_valid_one_out(page: StagedPage) -> None:
    ticket = page.page.link(Role.READ).partition("#token=")[2]
    stale = {"Authorization": f"Bearer {'0' * 64}"}
    replies = [page.ask("GET", "/metrics", role=None, headers=stale) for _ in range(30)]
    assert replies[-1].status == 429
    assert page.ask("GET", "/metrics", role=Role.READ).status == 200
    assert page.sign_in(page.token()).status == 200
    assert page.sign_in(ticket).status == 200
    assert page.sign_in(ticket).status == 429  # it is used up, so it is wrong
    metrics = page.ask("GET", "/metrics").content.decode()
    assert "tessera_http_failed_sign_ins_total 31.0" in metrics


def test_right_tokens_are_not_limited(page: StagedPage) -> None:
    assert {page.ask("GET", "/healthz").status for _ in range(3)} == {200}
    assert {page.ask("GET", RUN).status for _ in range(int(doors.ATTEMPTS.burst) * 3)} == {200}


def test_addresses_of_one_sender_count_together() -> None:
    assert network("2001:db8::1") == network("2001:db8::ffff:2")
    assert network("2001:db8::1") != network("2001:db8:0:1::1")
    assert network("10.0.0.1") != network("10.0.0.2")
    assert network("?") == "?"
    assert Rate(0.1, 10.0) == doors.ATTEMPTS


def test_every_answer_has_the_headers_of_the_page(page: StagedPage) -> None:
    for path, host, kept in (
        (RUN, "localhost", "no-store"),
        ("/", "localhost", "no-cache"),  # asked for again every time, with its tag
        ("/no", "localhost", "no-store"),
        ("/", "evil", "no-store"),
    ):
        headers = page.ask("GET", path, headers={"Host": host}).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == kept
        assert "Server" not in headers
        assert not [name for name in headers if name.lower().startswith("access-control")]


def test_link_signs_in_once(page: StagedPage) -> None:
    token = page.page.link(Role.READ).partition("#token=")[2]
    assert page.sign_in(token).json["role"] == "read"
    assert page.sign_in(token).status == 401
    headers = {"Authorization": f"Bearer {page.page.link().partition('#token=')[2]}"}
    assert page.ask("GET", RUN, role=None, headers=headers).status == 401  # it is no token


def test_ticket_is_void_after_a_while_and_the_oldest_of_too_many_too() -> None:
    now = [0.0]
    tokens = Tokens({}, clock=lambda: now[0])
    old = tokens.issue(ANNA)
    now[0] = TICKET_S
    assert tokens.redeem(old) is None
    tickets = [tokens.issue(ANNA) for _ in range(MAX_TICKETS + 1)]
    assert tokens.redeem(tickets[0]) is None
    assert tokens.redeem(tickets[1]) == ANNA


def test_made_tokens_are_kept_and_readable_by_their_account_alone(tmp_path: Path) -> None:
    with staged_page(tmp_path) as page:
        first = page.token(), page.token(Role.READ)
    with staged_page(tmp_path) as page:
        assert (page.token(), page.token(Role.READ)) == first
    for role in Role:
        assert stat.S_IMODE(token_path(tmp_path, role).stat().st_mode) == 0o600
    assert stat.S_IMODE(token_path(tmp_path, Role.READ).parent.stat().st_mode) == 0o700


def test_tokens_of_a_file_are_the_only_ones(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(f"# who may\noperate anna {'a' * 40}\nread wall {'b' * 40}  # the screen\n")
    path.chmod(0o600)
    with staged_page(tmp_path / "run", HttpTable(tokens=path)) as page:
        assert not token_path(tmp_path / "run", Role.READ).exists()
        headers = {"Authorization": f"Bearer {'a' * 40}"}
        reply = page.ask("POST", f"{RUN}/pause", role=None, body={}, headers=headers)
        assert reply.status == 200
        assert page.done == [("pause", {"by": "anna at 127.0.0.1"})]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no tokens"),
        ("operate anna\n", "line 1: must be ROLE NAME TOKEN"),
        (f"admin anna {'a' * 40}\n", "line 1: must be ROLE NAME TOKEN"),
        ("read anna secret\n", "24 to 256 characters"),
        (f"read anna {'ä' * 40}\n", "ASCII"),
        (f"read anna {'a' * 40}\nread ben {'a' * 40}\n", "line 2: anna has the same token"),
    ],
)
def test_file_of_tokens_that_is_wrong_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=words) as caught:
        read_tokens(path)
    assert "secret" not in str(caught.value)


def test_file_of_tokens_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.txt"
    path.write_text(f"read anna {'a' * 40}\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_tokens(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(tmp_path / "none.txt")


def test_other_machines_need_tls_unless_a_proxy_has_it() -> None:
    with pytest.raises(ConfigError, match="tokens need TLS"):
        HttpTable(host="0.0.0.0")
    HttpTable(host="0.0.0.0", plain=True)
    with pytest.raises(ConfigError, match="belong together"):
        HttpTable(certificate=Path("a.pem"))
    with pytest.raises(ConfigError, match="no name of a machine"):
        HttpTable(names=("https://fl.example.org",))
