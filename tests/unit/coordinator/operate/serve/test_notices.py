"""Notices over real sockets: to receivers that take them, fail, sleep, redirect and die."""

from __future__ import annotations

import hmac
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.errors import ConfigError, CoordinatorError
from coordinator.operate.config import NotifyTable
from coordinator.operate.identity.authority import Authority
from coordinator.operate.serve.notices import MAX_WAITING, Notice, NoticeRules, Notices, Receiver
from tests.waiting import until


@dataclass
class Hook:
    """A receiver on a real socket; `answers` are its next statuses, then it takes everything."""

    port: int = 0
    answers: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    """It answers nothing while this is clear."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?key=1"

    @property
    def events(self) -> list[str]:
        return [json.loads(each)["event"] for each in self.bodies]


@contextmanager
def hook(
    port: int = 0, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, **options: Any
) -> Iterator[Hook]:
    found = Hook(**options)
    found.held.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.held.wait()
            status = found.answers.pop(0) if found.answers else 204
            if status == 0:  # it dies before it answers
                return
            if status < 300:
                found.bodies.append(body)
                found.headers.append(dict(self.headers))
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"http://127.0.0.1:{found.port}/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # a client that hung up

    server = Server((host, port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield found
    finally:
        found.held.set()
        server.shutdown()
        thread.join()
        server.server_close()


def notices(url: str, **options: Any) -> Notices:
    table = {key: options.pop(key) for key in tuple(options) if hasattr(NotifyTable, key)}
    usual: dict[str, Any] = {"task": "digits", "run": "0" * 16, "first_s": 0.01, "close_s": 20.0}
    return Notices(NotifyTable(url=url, **table), **{**usual, **options})


def test_notice_is_json_and_signed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hush\n")
    with hook() as found:
        with notices(found.url, signing_key=secret) as sent:
            sent.finished()
        assert found.events == ["finished"]
        content = json.loads(found.bodies[0])
        assert content.keys() == {
            *("v", "id", "event", "task", "run", "round", "time", "text", "details")
        }
        assert (content["task"], content["run"]) == ("digits", "0" * 16)
        wanted = hmac.new(b"hush", found.bodies[0], "sha256").hexdigest()
        assert found.headers[0]["X-Tessera-Signature"] == f"sha256={wanted}"


def test_notices_come_in_order_past_failures() -> None:
    """Errors of the receiver are tried again; what it refuses for good, and redirects, are not."""
    with hook(answers=[500, 0, 429, 204, 400, 302]) as found:
        with notices(found.url) as sent:
            for name in ("finished", "stalled", "accuracy_fell", "failed"):
                sent.tell(Notice(event=name, text="x"))
        assert found.events == ["finished", "failed"]
        assert not found.answers
        assert len({json.loads(each)["id"] for each in found.bodies}) == 2


def test_receiver_that_sleeps_or_dies_holds_up_nobody() -> None:
    with hook() as found:
        found.held.clear()
        port = found.port
        with notices(found.url, close_s=0.0) as sent:
            for number in range(5 * MAX_WAITING):  # far more than wait
                sent.tell(Notice(event="finished", text=str(number)))
            assert len(sent._waiting) <= MAX_WAITING
    with notices(f"http://127.0.0.1:{port}/") as sent:
        sent.finished()
        with hook(port) as again:  # it was gone, and is back
            until(lambda: again.events == ["finished"])


def test_end_of_a_run_does_not_wait_for_a_dead_receiver_for_ever() -> None:
    with hook() as found:
        found.held.clear()
        left = threading.Event()

        def run() -> None:
            with notices(found.url, close_s=0.05) as sent:
                sent.finished()
            left.set()

        threading.Thread(target=run, daemon=True).start()
        until(left.is_set)
        assert not found.bodies


def test_failure_of_the_run_is_told_and_goes_on() -> None:
    with hook() as found:
        with pytest.raises(CoordinatorError, match="no disk"), notices(found.url):
            raise CoordinatorError("no disk")
        with pytest.raises(KeyboardInterrupt), notices(found.url):
            raise KeyboardInterrupt
        assert found.events == ["failed"]
        assert "no disk" in json.loads(found.bodies[0])["text"]


def test_only_events_that_are_asked_for() -> None:
    with hook() as found:
        with notices(found.url, events=("failed",)) as sent:
            sent.finished()
            sent.tell(Notice(event="failed", text="x"))
        assert found.events == ["failed"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_stall_is_told_once_until_a_round_comes() -> None:
    clock, quiet = Clock(), [True]
    with hook() as found:
        with notices(found.url, stalled_minutes=30.0, clock=clock, is_quiet=lambda: quiet[0]) as s:

            def pass_s(seconds: float) -> None:
                clock.now += seconds
                with s._changed:
                    s._changed.notify()

            pass_s(1900)
            until(lambda: s._moved_s == clock.now)  # it looked, and the run is paused
            quiet[0] = False
            pass_s(1900)
            until(lambda: found.events == ["stalled"])
            pass_s(1900)
            s._moved_s, s._stalled = clock.now, False  # as a round does
            pass_s(1900)
            until(lambda: found.events == ["stalled", "stalled"])
        assert len(found.events) == 2


def test_fall_of_the_accuracy_is_told_once_until_it_is_back() -> None:
    rules = NoticeRules(fell_points=5.0, fell_rounds=2)
    told = []
    for number, accuracy in enumerate(
        (0.5, 0.9, 0.84, None, 0.84, 0.2, 0.86, 0.8, 0.86, 0.8, 0.8), 1
    ):
        told += [(each.event, each.round) for each in rules.after(number, accuracy, ())]
    assert told == [("accuracy_fell", 5), ("accuracy_fell", 11)]


def test_quarantine_is_told_once_and_nothing_of_the_past_is() -> None:
    line = {"round": 3, "accuracy": 0.9, "quarantined": ["bad"]}
    with hook() as found:
        with notices(found.url, history=[line]) as sent:
            assert sent._rules.after(4, 0.9, ["bad"]) == []
            (news,) = sent._rules.after(5, 0.9, ["bad", "worse"])
        assert news.details == {"device": "worse"}
        assert not found.events


def test_rounds_that_a_rollback_undid_are_no_best() -> None:
    lines = [{"round": n, "accuracy": a, "quarantined": []} for n, a in ((1, 0.5), (2, 0.9))]
    with hook() as found:
        history = [*lines, {"rolled_back": {"from": 2, "to": 1}}]
        with notices(found.url, history=history, fell_rounds=1) as sent:
            assert sent._rules.after(2, 0.6, []) == []
        with notices(found.url, history=lines, fell_rounds=1) as sent:
            assert [each.event for each in sent._rules.after(3, 0.6, [])] == ["accuracy_fell"]


def test_certificates_are_checked(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    with Authority(tmp_path / "identity", create_days=10) as authority:
        ca.write_bytes(authority.pem)
        for name, file in authority.broker_certificate(["127.0.0.1"]).files().items():
            (tmp_path / name).write_bytes(file.content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "broker.pem", tmp_path / "broker.key")
    with hook(tls=context) as found:
        url = found.url.replace("http:", "https:")
        assert Receiver(NotifyTable(url=url, ca=ca)).send(b"{}") == 204
        with pytest.raises(CoordinatorError, match="certificate is not valid"):
            Receiver(NotifyTable(url=url)).send(b"{}")  # by an authority that nobody knows
    with hook(tls=context, host="127.0.0.2") as found:
        url = found.url.replace("http://127.0.0.1", "https://127.0.0.2")
        with pytest.raises(CoordinatorError, match="certificate is not valid"):
            Receiver(NotifyTable(url=url, ca=ca)).send(b"{}")  # of another host
        assert not found.bodies


@pytest.mark.parametrize(
    "url", ["ftp://x/", "http://", "example.org", "http://a:b@x/", "http://x/\n", "http://x:99999/"]
)
def test_wrong_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        NotifyTable(url=url)


def test_command_sends_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    text = '[task]\nname = "digits"\nsource = "t.py:f"\n[run]\nfolder = "run"\n'
    path.write_text(text)
    assert main(["notify", "--test", "--config", str(path)]) == 2
    assert "notify.url is not set" in capsys.readouterr().err
    with hook(answers=[204, 404]) as found:
        path.write_text(f'{text}[notify]\nurl = "{found.url}"\n')
        assert main(["notify", "--test", "--config", str(path)]) == 0
        assert "took the notice" in capsys.readouterr().out
        assert found.events == ["test"]
        assert main(["notify", "--test", "--config", str(path), "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert "key=1" not in str(said)  # the rest of a URL may be secret
        assert "status 404" in said["error"]
    path.write_text(f'{text}[notify]\nurl = "{found.url}"\nsigning_key = "absent"\n')
    assert main(["notify", "--test", "--config", str(path)]) == 2
