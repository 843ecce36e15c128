"""A run whose view and commands a test sets, in the shapes that real ones have; and its page."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.errors import ConfigError
from coordinator.operate.config import HttpTable
from coordinator.operate.http.access.tokens import Role, token_path
from coordinator.operate.http.opening import OpenPage, open_http
from coordinator.operate.serve.runs import ServedRun, ServedRuns

API = "/api/v1"


def staged_device(name: str, **more: Any) -> dict[str, Any]:
    """A row of a device."""
    row: dict[str, Any] = {
        "device": name,
        "present": True,
        "state": "idle",
        "level": 0.5,
        "reason": None,
        "code": None,
        "round": 3,
        "last_seen": 1_700_000_000.5,
        "last_error": None,
        "last_error_time": None,
        "battery": 0.8,
        "charging": False,
        "temperature_c": 31.5,
        "memory_free_mb": 900.0,
        "memory_mb": 4000.0,
        "bytes_up": 10,
        "bytes_down": 20,
        "train_s": 1.5,
        "joules": 3.0,
        "energy_today_j": 3.0,
        "energy_budget_j": None,
        "trained": 2,
        "skipped": 1,
        "late": 0,
        "rejected": 0,
        "contribution": 0.5,
        "staleness": 1,
        "samples": 64,
        "quarantined": None,
        "labels": {"site": "berlin"},
        "profile": "pixel-8",
        "version": "0.1.0",
        "sequence": 1,
    }
    assert row.keys() >= more.keys()
    return row | more


def staged_round(number: int, **more: Any) -> dict[str, Any]:
    """A row of a round."""
    row: dict[str, Any] = {
        "round": number,
        "time": 1_700_000_000.0 + number,
        "accuracy": 0.9,
        "levels": [{"level": 1.0, "accuracy": 0.9}, {"level": 0.5, "accuracy": 0.8}],
        "seconds": 2.0,
        "joules": 5.0,
        "bytes_up": 100,
        "bytes_down": 200,
        "trained": 2,
        "skipped": 1,
        "late": 0,
        "rejected": 0,
        "coverage_min": 1,
        "oldest_memory": 2,
        "digest": "00ff",
        "event": None,
    }
    assert row.keys() >= more.keys()
    return row | more


@dataclass
class StagedView:
    """What a test lets a run show."""

    sequence: int = 1
    rows: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {name: staged_device(name) for name in ("kitchen", "porch")}
    )
    history: list[dict[str, Any]] = field(
        default_factory=lambda: [staged_round(number) for number in (1, 2)]
    )
    state: dict[str, Any] = field(default_factory=dict)
    """Changes to the status."""
    hold: threading.Event | None = None
    """Reads wait for it."""

    def status(self) -> dict[str, Any]:
        if self.hold is not None:
            self.hold.wait()
        return {
            "task": "digits",
            "run": "0123456789abcdef",
            "folder": "/runs/digits",
            "state": "running",
            "phase": "training",
            "asynchronous": False,
            "round": 3,
            "rounds": 30,
            "committed": 2,
            "waits_for": None,
            "deadline_s": 12.5,
            "started": 1_700_000_000.0,
            "time": 1_700_000_100.0,
            "version": "0.1.0",
            "broker_connected": True,
            "devices": {"known": 2, "present": 2, "training": 1, "quarantined": 0, "paused": 0},
            "levels": {"1": 1, "0.5": 1},
            "skips": {"battery": 1},
            "accuracy": 0.9,
            "deploy": 1.0,
            "best": {"round": 2, "accuracy": 0.9, "level": 1.0},
            "level_reports": [
                {"level": 1.0, "parameters": 1000, "accuracy": 0.9, "devices": 1},
                {"level": 0.5, "parameters": 300, "accuracy": 0.8, "devices": 1},
            ],
            "totals": {
                "seconds": 4.0,
                "joules": 10.0,
                "bytes_up": 200,
                "bytes_down": 400,
                "trained": 4,
                "skipped": 2,
                "late": 0,
                "rejected": 0,
            },
            "settings": {"rule": "ram-fed", "learning_rate": 0.1},
            "paused": None,
            "stopping": None,
            "delivery": None,
            "sequence": self.sequence,
        } | self.state

    def devices(self, since: int = 0) -> list[dict[str, Any]]:
        return [row for row in self.rows.values() if row["sequence"] > since]

    def device(self, name: str) -> dict[str, Any]:
        if name not in self.rows:
            raise ConfigError(f"no device {name!r}")
        done = {
            "round": 2,
            "level": 0.5,
            "reason": None,
            "code": None,
            "outcome": "counted",
            "loss": 0.5,
            "bytes_up": 10,
            "bytes_down": 20,
            "train_s": 1.0,
            "joules": 2.0,
        }
        return self.rows[name] | {"rounds": [done]}

    def rounds(self, since: int = 0) -> list[dict[str, Any]]:
        return [row for row in self.history if row["round"] > since]

    def blocks(self) -> dict[str, Any]:
        block = {
            "id": 0,
            "parameters": 6,
            "signature": [["a", 0], ["b", 0]],
            "covered": 2,
            "last_covered": 2,
            "age": 0,
            "memory_age": None,
            "movement": 0.01,
        }
        tensor = {"name": "w", "shape": [2, 3], "parameters": 6, "blocks": [block]}
        return {
            "round": 2,
            "axes": [{"name": "a", "groups": [2]}, {"name": "b", "groups": [3]}],
            "tensors": [tensor],
        }

    def strip(self, rounds: int = 60) -> dict[str, Any]:
        return {
            "rounds": [1, 2],
            "devices": {"kitchen": "9b", "porch": "5."},
            "legend": {"b": "battery"},
        }

    def change(self, name: str, **more: Any) -> None:
        """Change a device."""
        self.sequence += 1
        row = self.rows.get(name, staged_device(name))
        self.rows[name] = row | more | {"sequence": self.sequence}

    def commit(self) -> None:
        """Add a round."""
        self.sequence += 1
        self.history.append(staged_round(len(self.history) + 1))


@dataclass
class Reply:
    """An answer to a request."""

    status: int
    headers: http.client.HTTPMessage
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class StagedPage:
    """A page over a staged run, and a client of it."""

    page: OpenPage
    runs: ServedRuns
    view: StagedView
    folder: Path
    done: list[tuple[str, dict[str, Any]]]
    """Commands that were performed."""

    @property
    def port(self) -> int:
        return int(self.page.address.rpartition(":")[2])

    @property
    def origin(self) -> str:
        return self.page.address

    def token(self, role: Role = Role.OPERATE) -> str:
        return token_path(self.folder, role).read_text().strip()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self,
        method: str,
        path: str,
        *,
        role: Role | None = Role.OPERATE,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request, with a token of `role` in its header."""
        given = {} if role is None else {"Authorization": f"Bearer {self.token(role)}"}
        content = None
        if body is not None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            given["Content-Type"] = "application/json"
        connection = self.connect()
        try:
            connection.request(method, path, content, given | dict(headers or {}))
            answer = connection.getresponse()
            return Reply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def sign_in(self, token: str) -> Reply:
        """Sign in as the page does."""
        return self.ask(
            "POST",
            f"{API}/session",
            role=None,
            body={"token": token},
            headers={"Origin": self.origin},
        )

    def cookie(self, role: Role = Role.OPERATE) -> str:
        """Sign in, and return the cookie to send."""
        reply = self.sign_in(self.token(role))
        assert reply.status == 200, reply.content
        return reply.headers["Set-Cookie"].partition(";")[0]


def staged_commands(done: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Commands that note what they are asked."""

    def noting(name: str) -> Any:
        def command(**arguments: Any) -> dict[str, Any]:
            if arguments.get("device") == "nobody":
                raise ConfigError("no device 'nobody'")
            done.append((name, arguments))
            return {"done": name}

        return command

    names = ["pause", "resume", "stop", "rounds.add", "set"]
    names += ["quarantine.add", "quarantine.allow", "forget"]
    audit = [
        {"number": 1, "id": "a", "time": 1.0, "by": "anna at ::1", "what": "pause", "details": {}}
    ]
    return {name: noting(name) for name in names} | {"audit": lambda since: audit}


@contextmanager
def staged_page(
    folder: Path, table: HttpTable | None = None, *, view: StagedView | None = None
) -> Iterator[StagedPage]:
    """Serve the page of a staged run."""
    runs, view = ServedRuns(), view or StagedView()
    done: list[tuple[str, dict[str, Any]]] = []
    runs.add(ServedRun("digits", folder, view, staged_commands(done)))
    with open_http(table or HttpTable(), runs, folder) as page:
        assert page is not None
        yield StagedPage(page, runs, view, folder, done)
