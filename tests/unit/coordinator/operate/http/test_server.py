"""The server: its start and end, its port, TLS, its files and its metrics."""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.errors import ConfigError
from coordinator.operate.broker.ports import PortError
from coordinator.operate.config import HttpTable
from coordinator.operate.http import pages, server
from coordinator.operate.http.opening import open_http
from coordinator.operate.http.pages import TYPES, read_page
from coordinator.operate.http.server import TlsFiles
from coordinator.operate.serve.runs import ServedRun, ServedRuns
from tests.staged_runs import API, StagedPage, StagedView, staged_device, staged_page
from tests.waiting import free_port

ROOT = Path(__file__).resolve().parents[5]


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for localhost that signs itself, and its key."""
    certificate, key = folder / "page.pem", folder / "page.key"
    line = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name} "
    line += f"-addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    subprocess.run(line.split(), check=True, capture_output=True)
    return certificate, key


def test_page_is_off_if_it_is_configured_so(tmp_path: Path) -> None:
    with open_http(HttpTable(enabled=False), ServedRuns(), tmp_path) as page:
        assert page is None
    assert list(tmp_path.iterdir()) == []


def test_report_has_a_link_only_where_others_do_not_read_it(page: StagedPage) -> None:
    (line, _) = page.page.report(links=True)
    assert page.sign_in(line.partition("#token=")[2]).status == 200
    (line,) = page.page.report(links=False)
    assert "token" not in line
    assert page.origin in line


def test_port_is_kept_and_another_one_is_taken_if_it_is_in_use(tmp_path: Path) -> None:
    with staged_page(tmp_path / "a") as first, staged_page(tmp_path / "b") as second:
        kept = first.port
        assert second.port != kept
    with staged_page(tmp_path / "a") as first:
        assert first.port == kept
    with socket.create_server(("127.0.0.1", kept)), staged_page(tmp_path / "a") as first:
        assert first.port != kept


def test_configured_port_that_is_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        table = HttpTable(port=taken.getsockname()[1])
        with pytest.raises(PortError, match=r"set http\.port"), staged_page(tmp_path, table):
            pass
    with (
        pytest.raises(PortError, match=r"http\.host"),
        staged_page(tmp_path, HttpTable(host="no.such.host.invalid", plain=True)),
    ):
        pass


def test_server_leaves_nothing_behind(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with staged_page(tmp_path) as page:
        assert page.ask("GET", f"{API}/runs").status == 200
        assert page.ask("POST", f"{API}/runs/digits/pause", body={}).status == 200
    left = {thread.name for thread in threading.enumerate() if thread.name == "http"}
    assert not left - before
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", page.port)) != 0


def test_request_that_never_ends_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 0.2)
    with staged_page(tmp_path) as page:
        head = b"POST /api/v1/session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        head += b"Content-Type: application/json\r\n"
        for part in (b"", b"GET / HT", head, head + b"Origin: http://localhost\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", page.port)) as raw:
                raw.settimeout(60)
                raw.sendall(part)
                with suppress(ConnectionResetError):
                    assert raw.recv(1) == b""
        assert page.ask("GET", "/healthz").status == 200
        connection = page.connect()
        for _ in range(2):  # within the time, a connection serves many
            connection.request("GET", "/healthz")
            assert connection.getresponse().read() == b'{"ok":true}'
        connection.close()


def test_too_many_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with staged_page(tmp_path) as page:
        held = [socket.create_connection(("127.0.0.1", page.port)) for _ in range(3)]
        held[2].settimeout(60)
        with suppress(ConnectionResetError):
            assert held[2].recv(1) == b""
        for each in held:
            each.close()


def test_page_is_served_with_tls_and_notices_a_renewed_certificate(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "first")
    table = HttpTable(certificate=certificate, key=key, names=("localhost",))
    with staged_page(tmp_path / "run", table) as page:
        assert page.origin.startswith("https://localhost:")
        trust = ssl.create_default_context(cafile=str(certificate))
        request = urllib.request.Request(
            f"{page.origin}{API}/session",
            b'{"token": "%s"}' % page.token().encode(),
            {"Origin": page.origin, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, context=trust) as answer:
            cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith(f"__Host-tessera-{page.port}=")
        assert "; Secure" in cookie
    files = TlsFiles(certificate, key)
    make_certificate(tmp_path, "second")
    files.renew()
    certificate.write_text("broken")
    files.renew()  # the old one stays
    with pytest.raises(ConfigError, match="cannot be used"):
        TlsFiles(certificate, key)


def test_files_of_the_page_have_types_tags_and_are_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "page"
    (folder / "js").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "js" / "main.js").write_text("// long\n" * 200)
    (folder / "secret.py").write_text("token = 1")
    monkeypatch.setattr(pages, "FOLDER", folder)
    with staged_page(tmp_path / "run") as page:
        index = page.ask("GET", "/", role=None)
        assert index.headers["Content-Type"] == "text/html; charset=utf-8"
        assert index.headers["Cache-Control"] == "no-cache"
        script = page.ask("GET", "/page/js/main.js", role=None)
        assert script.headers["Content-Type"] == "text/javascript; charset=utf-8"
        tag = {"If-None-Match": f'W/"x", {script.headers["ETag"]}'}
        again = page.ask("GET", "/page/js/main.js", role=None, headers=tag)
        assert (again.status, again.content) == (304, b"")
        packed = page.ask("GET", "/page/js/main.js", headers={"Accept-Encoding": "br, gzip;q=1"})
        assert packed.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(packed.content) == script.content
        assert page.ask("GET", "/page/secret.py").status == 404
        assert page.ask("GET", "/page/js").status == 404


def test_every_file_of_the_page_has_a_type() -> None:
    endings = {path.suffix for path in pages.FOLDER.rglob("*") if path.is_file()}
    assert endings <= TYPES.keys()
    assert len(read_page()) == sum(path.is_file() for path in pages.FOLDER.rglob("*"))


def test_metrics_need_a_token_unless_they_are_open(page: StagedPage, tmp_path: Path) -> None:
    assert page.ask("GET", "/metrics", role=None).status == 401
    with staged_page(tmp_path / "open", HttpTable(open_metrics=True)) as other:
        assert other.ask("GET", "/metrics", role=None).status == 200
        assert other.ask("GET", f"{API}/runs", role=None).status == 401


def scrape(page: StagedPage) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = page.ask("GET", "/metrics").content.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_those_of_the_run(page: StagedPage, tmp_path: Path) -> None:
    other = StagedView(state={"task": "words", "round": 9, "joules": None, "best": None})
    page.runs.add(ServedRun("words", tmp_path, other, {}))
    found = scrape(page)

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(({"task": "digits"} | labels).items())]

    assert value("tessera_round") == 3
    assert value("tessera_round", task="words") == 9
    assert value("tessera_devices", state="present") == 2
    assert value("tessera_accuracy", level="0.5") == 0.8
    assert value("tessera_bytes_total", direction="down") == 400
    assert value("tessera_joules_total") == 10
    assert value("tessera_movements_total", outcome="trained") == 4
    assert value("tessera_skips", code="battery") == 1
    assert value("tessera_round_seconds") == 2
    assert value("tessera_broker_connected") == 1
    assert value("tessera_state", state="running") == 1
    assert not [name for name, _ in found if name.startswith("tessera_device_")]
    assert ("process_resident_memory_bytes", frozenset()) in found


def test_metrics_of_devices_are_there_on_request(tmp_path: Path) -> None:
    with staged_page(tmp_path, HttpTable(device_metrics=True)) as page:
        page.view.rows = {'a"\n{b': staged_device('a"\n{b', battery=None), "c": staged_device("c")}
        found = scrape(page)
    labels = {"task": "digits", "device": 'a"\n{b'}
    assert found["tessera_device_joules_total", frozenset(labels.items())] == 3
    assert ("tessera_device_battery_ratio", frozenset(labels.items())) not in found
    labels["device"] = "c"
    assert found["tessera_device_battery_ratio", frozenset(labels.items())] == 0.8


@pytest.mark.parametrize("name", ["alerts.yml", "grafana.json"])
def test_examples_name_metrics_that_there_are(tmp_path: Path, name: str) -> None:
    with staged_page(tmp_path, HttpTable(device_metrics=True)) as page:
        known = {name for name, _ in scrape(page)}
    text = (ROOT / "examples/operate" / name).read_text()
    named = set(re.findall(r"\b(?:tessera_[a-z_]+|process_[a-z_]+)", text))
    assert len(named) > 5
    assert named <= known


def test_alert_rules_and_settings_are_those_of_prometheus(tmp_path: Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool, which is not installed")
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(ROOT / "examples/operate" / name, tmp_path)
    (tmp_path / "read.token").write_text("x")
    for what, name in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        line = [program, "check", what, str(tmp_path / name)]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_tokens_and_links_are_not_logged(
    page: StagedPage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        page.sign_in(page.token())
        page.sign_in("f" * 64)
        page.ask("GET", f"{API}/runs")
    assert "signed in from 127.0.0.1" in caplog.text
    assert "a wrong token from 127.0.0.1" in caplog.text
    assert page.token() not in caplog.text
    assert "f" * 64 not in caplog.text


def test_commands_start_without_the_server() -> None:
    code = (
        "import sys, coordinator.cli; coordinator.cli.make_parser(); "
        "print({'starlette', 'uvicorn', 'prometheus_client'} & set(sys.modules))"
    )
    line = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == "set()"


def test_free_port_is_taken_as_configured(tmp_path: Path) -> None:
    port = free_port()
    with staged_page(tmp_path, HttpTable(port=port)) as page:
        assert page.port == port
