"""A served run, as scripts and Prometheus see it: real programs, a real broker and monitor."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.operate.broker.embedded import available
from coordinator.operate.http.access.tokens import Role, token_path
from edge_sdk.program.processes import ChildProcess, Children
from tests.described_api import check_answer, check_document, operation
from tests.waiting import HANGS_S, free_port, until

PROGRAMS = Path(sys.executable).parent
OPERATE = Path(__file__).resolve().parents[2] / "examples/operate"

TASK_FILE = """\
import torch
from torch import nn

from coordinator.task.task import make_task as task_of


def make_task():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return task_of(model, torch.zeros(2, 4), groups=2)
"""
RUN_FILE = """\
[task]
name = "tiny"
source = "task.py:make_task"
evaluation = "test.npz"
[run]
folder = "run"
rounds = 100000
[round]
min_devices = 2
[broker]
embedded = true
[join]
enabled = false
[http]
device_metrics = true
"""
RUN = "/api/v1/runs/tiny"

pytestmark = [
    pytest.mark.skipif(
        "mosquitto" not in available(), reason="needs mosquitto, which is not installed"
    ),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="needs prometheus and promtool, which are not installed",
    ),
]


class ServedPrograms:
    """A coordinator with two devices, as programs, and a client of its page."""

    def __init__(self, folder: Path, children: Children) -> None:
        self.folder, self._children = folder, children
        (folder / "task.py").write_text(TASK_FILE)
        (folder / "run.toml").write_text(RUN_FILE)
        rng = np.random.default_rng(0)
        for name in ("test", "own"):
            x, y = rng.random((32, 4), dtype=np.float32), rng.integers(0, 3, 32)
            np.savez(folder / f"{name}.npz", x=x, y=y)
        self.coordinator = self._start("serve", "tessera-coordinator", "serve", "run.toml")
        self._wait_for("waits for")
        found = re.search(r"page +http://127\.0\.0\.1:(\d+)/#token=\S+", self.log)
        assert found is not None, self.log
        self.port = int(found[1])
        broker = (folder / "run/broker.toml").read_text()
        for name in ("kitchen", "porch"):
            text = f'task = "tiny"\nname = "{name}"\ndata = "own.npz"\nstate_dir = "{name}"\n'
            (folder / f"{name}.toml").write_text(f"{text}{broker}")
            self._start(name, "tessera-device", "run", f"{name}.toml")

    def _start(self, name: str, program: str, command: str, config: str) -> ChildProcess:
        line = ["/usr/bin/env", "-C", str(self.folder), str(PROGRAMS / program), command]
        return self._children.start(name, [*line, "--config", config], self.folder / f"{name}.log")

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text()

    def _wait_for(self, words: str) -> None:
        child = self.coordinator
        until(lambda: words in self.log or not child.is_running, child.last_words)
        assert child.is_running, child.last_words()

    def token(self, role: Role) -> str:
        return token_path(self.folder / "run", role).read_text().strip()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str, bytes]:
        """Send a request with the operator's token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGS_S)
        headers = {"Authorization": f"Bearer {self.token(Role.OPERATE)}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get_content_type(), answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, _, content = self.ask("GET", path)
        assert status == 200, content
        return json.loads(content)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedPrograms]:
    with Children() as children:
        yield ServedPrograms(tmp_path, children)


def check_answers(served: ServedPrograms) -> None:
    """Every route that reads answers as it is described."""
    document = served.get("/api/v1/openapi.json")
    check_document(document)
    reading = [path for path, methods in document["paths"].items() if "get" in methods]
    asked = set()
    for pattern in reading:
        path = pattern.format(task="tiny", device="kitchen") if "{" in pattern else pattern
        if path.endswith("/events"):
            continue
        status, kind, content = served.ask("GET", path)
        steered = not path.endswith("/audit") or status == 200
        assert status == 200 or not steered, (path, content)
        check_answer(document, "GET", path, status, kind, content)
        asked.add(operation(document, "GET", path)["operationId"])
    assert {"listRuns", "getRun", "listDevices", "getDevice", "getBlocks", "getStrip"} <= asked
    for kind, data in first_events(served).items():
        check_answer(document, "GET", f"{RUN}/events", 200, "text/event-stream", data)
        assert json.loads(data), kind


def first_events(served: ServedPrograms) -> dict[str, bytes]:
    """The data of the first event of each kind."""
    found: dict[str, bytes] = {}
    kind = ""
    with open_stream(served) as stream:
        while found.keys() != {"status", "devices", "rounds"}:
            line = stream.readline()
            assert line, found.keys()
            key, _, value = line.rstrip(b"\n").partition(b": ")
            if key == b"event":
                kind = value.decode()
            elif key == b"data":
                found.setdefault(kind, value)
    return found


@contextmanager
def open_stream(served: ServedPrograms) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=HANGS_S)
    headers = {"Authorization": f"Bearer {served.token(Role.READ)}"}
    connection.request("GET", f"{RUN}/events", headers=headers)
    with connection.getresponse() as answer:
        yield answer
    connection.close()


class Monitor:
    """A Prometheus that scrapes a served run, by the files of the examples."""

    def __init__(self, served: ServedPrograms, children: Children) -> None:
        folder = served.folder / "monitor"
        folder.mkdir()
        (folder / "read.token").write_text(served.token(Role.READ))
        settings = (OPERATE / "prometheus.yml").read_text()
        settings = settings.replace("127.0.0.1:8080", f"127.0.0.1:{served.port}")
        (folder / "prometheus.yml").write_text(settings.replace("15s", "1s"))
        rules = (OPERATE / "alerts.yml").read_text()
        (folder / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 0s", rules))
        port = free_port()
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self.program = children.start(
            "prometheus",
            [
                str(shutil.which("prometheus")),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            folder / "prometheus.log",
        )

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=HANGS_S) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found

    def has(self, expression: str) -> bool:
        assert self.program.is_running, self.program.last_words()
        try:
            return bool(self.query(expression))
        except OSError:
            return False  # it is starting

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        alerts = self.get("alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}


def dashboard_expressions() -> list[str]:
    """All expressions of the dashboard, with its variables as Grafana would fill them in."""
    board = json.loads((OPERATE / "grafana.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    values = {"$__rate_interval": "1m", "$task": "tiny", "$job": "tessera"}
    for name, value in values.items():
        found = [each.replace(name, value) for each in found]
    assert not [each for each in found if "$" in each]
    return found


def test_served_run_as_scripts_and_prometheus_see_it(served: ServedPrograms) -> None:
    until(lambda: len(served.get(f"{RUN}/rounds")) >= 2, lambda: served.log)
    assert served.get("/readyz") == {"ok": True}
    check_answers(served)
    with Children() as children:
        monitor = Monitor(served, children)
        until(lambda: monitor.has("rate(tessera_round[1m]) > 0"), every_s=0.1)
        expressions = dashboard_expressions()
        empty = {each for each in expressions if not monitor.query(each)}
        # Nobody skips, and not every machine can tell what training costs it.
        assert all("tessera_skips" in each or "tessera_joules" in each for each in empty), empty
        (seen,) = monitor.query("tessera_devices{state='present'}")
        assert seen["value"][1] == "2"
        assert monitor.has('tessera_device_present{device="porch"} == 1')
        assert len(monitor.rules()) >= 10
        until(lambda: all(rule["health"] == "ok" for rule in monitor.rules()), every_s=0.1)
        assert monitor.get("alerts")["alerts"] == []
        stop_while_somebody_watches(served)
        until(lambda: monitor.firing() == {"TesseraDown"}, monitor.firing, every_s=0.1)


def stop_while_somebody_watches(served: ServedPrograms) -> None:
    """Ctrl-C ends the page, its streams and the process, without a complaint."""
    with open_stream(served) as stream:
        assert stream.readline().startswith(b"retry")
        served.coordinator.process.send_signal(signal.SIGINT)
        while stream.readline():
            pass
    assert served.coordinator.process.wait(HANGS_S) == 130, served.log
    assert "Traceback" not in served.log
    assert "WARN" not in served.log.partition("waits for")[2].upper()
