"""The API answers as it is described, and hands changes to the run's commands."""

from __future__ import annotations

import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from coordinator.operate.http import app
from coordinator.operate.http.answers.calls import MAX_WAITING, to_json
from coordinator.operate.http.answers.rows import arrange
from coordinator.operate.http.answers.shapes import DEVICE_KEYS
from coordinator.operate.http.refusal import RefusalError
from coordinator.operate.serve.runs import ServedRun
from coordinator.service.admission.requests import BusyError
from tests.described_api import check_answer, check_document, operation
from tests.staged_runs import API, StagedPage, StagedView, staged_device
from tests.waiting import until

RUN = f"{API}/runs/digits"
READING = (
    f"{API}/runs",
    f"{API}/session",
    f"{API}/openapi.json",
    RUN,
    f"{RUN}/devices",
    f"{RUN}/devices?since=1&sort=-battery&filter=kitchen",
    f"{RUN}/devices/kitchen",
    f"{RUN}/rounds?since=1",
    f"{RUN}/blocks",
    f"{RUN}/strip?rounds=5",
    f"{RUN}/audit?since=0",
    "/metrics",
    "/healthz",
    "/readyz",
)
CHANGES: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
    (f"{RUN}/pause", {}, "pause", {}),
    (f"{RUN}/resume", {}, "resume", {}),
    (f"{RUN}/stop", {"when": "now"}, "stop", {"when": "now"}),
    (f"{RUN}/rounds", {"add": 20}, "rounds.add", {"rounds": 20}),
    (
        f"{RUN}/settings",
        {"name": "learning_rate", "value": 0.05},
        "set",
        {"name": "learning_rate", "value": 0.05},
    ),
    (
        f"{RUN}/devices/porch/quarantine",
        {"reason": "odd"},
        "quarantine.add",
        {"device": "porch", "reason": "odd"},
    ),
    (f"{RUN}/devices/porch/allow", {}, "quarantine.allow", {"device": "porch"}),
    (f"{RUN}/devices/porch/forget", {}, "forget", {"device": "porch"}),
)


def described(page: StagedPage) -> dict[str, Any]:
    document: dict[str, Any] = page.ask("GET", f"{API}/openapi.json", role=None).json
    return document


def test_description_is_sound(page: StagedPage) -> None:
    check_document(described(page))


def test_every_described_route_is_asked_here(page: StagedPage) -> None:
    document = described(page)
    asked = [operation(document, "GET", path) for path in (*READING, f"{RUN}/events")]
    asked += [operation(document, "POST", path) for path, *_ in CHANGES]
    asked += [operation(document, each, f"{API}/session") for each in ("POST", "DELETE")]
    every = [each for methods in document["paths"].values() for each in methods.values()]
    assert {each["operationId"] for each in asked} == {each["operationId"] for each in every}


@pytest.mark.parametrize("path", READING)
def test_answer_is_as_described(page: StagedPage, path: str) -> None:
    reply = page.ask("GET", path)
    assert reply.status == 200, reply.content
    kind = reply.headers.get_content_type()
    check_answer(described(page), "GET", path, reply.status, kind, reply.content)


@pytest.mark.parametrize(("path", "body", "command", "arguments"), CHANGES)
def test_change_is_a_command_of_the_run_in_the_name_of_its_sender(
    page: StagedPage, path: str, body: Any, command: str, arguments: dict[str, Any]
) -> None:
    reply = page.ask("POST", path, body=body)
    assert reply.status == 200, reply.content
    assert reply.json == {"result": {"done": command}}
    assert page.done == [(command, {**arguments, "by": "operator at 127.0.0.1"})]
    check_answer(described(page), "POST", path, 200, "application/json", reply.content)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", f"{API}/runs/digit", None, 404, "did you mean 'digits'"),
        ("GET", f"{RUN}/devices/nobody", None, 404, "nobody"),
        ("GET", f"{RUN}/devices?since=x", None, 400, "since must be a whole number"),
        ("GET", f"{RUN}/devices?since=-1", None, 400, "since must be a whole number"),
        ("GET", f"{RUN}/devices?sort=batery", None, 400, "did you mean 'battery'"),
        ("GET", f"{RUN}/devices?filter=batery:1", None, 400, "did you mean 'battery'"),
        ("GET", f"{RUN}/devices?filter=battery%3Clow", None, 400, "must be a number"),
        ("POST", f"{RUN}/devices/nobody/forget", {}, 400, "nobody"),
        ("POST", f"{RUN}/stop", {}, 400, "'when' is missing"),
        ("POST", f"{RUN}/stop", {"when": "later"}, 400, "'when' must be one of 'round', 'now'"),
        ("POST", f"{RUN}/stop", {"when": "now", "by": "x"}, 400, "unknown key 'by'"),
        ("POST", f"{RUN}/rounds", {"add": 0}, 400, "'add' must be from 1"),
        ("POST", f"{RUN}/rounds", {"add": True}, 400, "'add' must be of type integer"),
        ("POST", f"{RUN}/settings", {"name": "x", "value": [1]}, 400, "'value' must be of type"),
        ("POST", f"{RUN}/devices/a/quarantine", {"reason": "x" * 501}, 400, "at most 500"),
        ("POST", f"{RUN}/pause", [], 400, "must be a JSON object"),
        ("POST", f"{RUN}/pause", b"{", 400, "not JSON"),
        ("POST", f"{RUN}/pause", b'{"a": NaN}', 400, "not JSON"),
        ("POST", f"{RUN}/pause", b"[" * 9000, 400, "not JSON"),
        ("POST", f"{RUN}/pause", b"\xff", 400, "not JSON"),
    ],
)
def test_mistake_is_refused_in_words(
    page: StagedPage, method: str, path: str, body: Any, status: int, words: str
) -> None:
    reply = page.ask(method, path, body=body)
    assert (reply.status, words in reply.json["error"]) == (status, True), reply.content
    assert page.done == []
    check_answer(described(page), method, path, status, "application/json", reply.content)


@pytest.mark.parametrize("served_before", [True, False])
def test_run_that_is_down_is_listed_and_answers_as_described(
    page: StagedPage, *, served_before: bool
) -> None:
    task = "digits" if served_before else "letters"
    page.runs.retire("digits")
    page.runs.show_down("run.toml", task, page.folder, "another try, within 10 s: <b>full</b>")
    listed = {each["task"]: each["state"] for each in page.ask("GET", f"{API}/runs").json}
    assert listed == {"digits": "running", task: "failed"}
    for rest in ("", "/devices", "/rounds", "/blocks", "/strip"):
        reply = page.ask("GET", path := f"{API}/runs/{task}{rest}")
        check_answer(described(page), "GET", path, 200, "application/json", reply.content)
    names = [row["device"] for row in page.ask("GET", f"{API}/runs/{task}/devices").json]
    assert names == (["kitchen", "porch"] if served_before else [])
    assert page.ask("POST", f"{API}/runs/{task}/pause", body={}).status == 501
    metrics = page.ask("GET", "/metrics").content.decode()
    assert f'tessera_state{{state="failed",task="{task}"}} 1.0' in metrics or (
        f'tessera_state{{task="{task}",state="failed"}} 1.0' in metrics
    )
    assert page.ask("GET", "/readyz").status == 200
    page.runs.hide_down("run.toml")
    assert [each["task"] for each in page.ask("GET", f"{API}/runs").json] == ["digits"]


def test_unknown_address_and_method_are_refused_as_json(page: StagedPage) -> None:
    assert page.ask("GET", f"{API}/nothing").json["error"]
    reply = page.ask("PUT", RUN, body={})
    assert reply.status == 405
    assert set(reply.headers["Allow"].split(", ")) == {"GET", "HEAD"}
    head = page.ask("HEAD", RUN)
    assert (head.status, head.content) == (200, b"")


def test_run_without_a_command_says_so(page: StagedPage) -> None:
    page.runs.add(ServedRun("bare", page.folder, StagedView(), {}))
    assert page.ask("POST", f"{API}/runs/bare/pause", body={}).status == 501
    assert page.ask("GET", f"{API}/runs/bare/audit").status == 501


def test_command_that_is_late_or_fails_is_told_apart(
    page: StagedPage, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(by: str) -> None:
        raise BusyError("the run is busy")

    def broken(by: str) -> None:
        raise ZeroDivisionError("a secret of ours")

    page.runs.add(ServedRun("odd", page.folder, StagedView(), {"pause": busy, "resume": broken}))
    late = page.ask("POST", f"{API}/runs/odd/pause", body={})
    assert (late.status, late.headers["Retry-After"]) == (503, "5")
    failed = page.ask("POST", f"{API}/runs/odd/resume", body={})
    assert failed.status == 500
    assert b"secret" not in failed.content
    assert "a secret of ours" in caplog.text


def test_reads_go_on_while_commands_wait_and_too_many_are_refused(page: StagedPage) -> None:
    hold = threading.Event()
    slow = {"pause": lambda by: hold.wait()}
    page.runs.add(ServedRun("slow", page.folder, StagedView(), slow))
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(page.ask("POST", f"{API}/runs/slow/pause", body={}).status)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    try:
        assert page.ask("GET", RUN).status == 200
        more = [threading.Thread(target=ask) for _ in range(MAX_WAITING - 3)]
        for asker in more:
            asker.start()
        until(lambda: HTTPStatus.SERVICE_UNAVAILABLE in statuses)
    finally:
        hold.set()
    for asker in askers + more:
        asker.join()
    assert statuses.count(503) == 1


def test_rows_are_filtered_and_sorted_with_unknown_values_last() -> None:
    rows = [
        staged_device("a", battery=0.2, state="training", labels={"site": "berlin"}),
        staged_device("b", battery=None, labels={}),
        staged_device("Cellar", battery=0.9, code="heat", labels={"site": "rome"}),
    ]

    def names(wanted: str = "", order: str = "") -> list[str]:
        found = arrange(rows, DEVICE_KEYS, wanted=wanted, order=order)
        return [row["device"] for row in found]

    assert names() == ["a", "b", "Cellar"]
    assert names(order="battery") == ["a", "Cellar", "b"]
    assert names(order="-battery") == ["Cellar", "a", "b"]
    assert names("battery<0.5") == ["a"]
    assert names("battery>0.5, cel") == ["Cellar"]
    assert names("battery:null") == ["b"]
    assert names("state:training,label.site:berlin") == ["a"]
    assert names("state=training,label.site=berlin") == ["a"]  # as the commands write it
    assert names("battery=none") == names("battery:null")
    assert names("present:true", "label.site") == ["a", "Cellar", "b"]
    assert names("code:heat,label.site:berlin") == []
    with pytest.raises(RefusalError, match="did you mean 'state'"):
        names("stat:training")


def test_number_that_is_not_finite_is_null() -> None:
    text = to_json({"a": [float("nan"), float("inf"), 1.5], "b": (1, None)})
    assert text == b'{"a":[null,null,1.5],"b":[1,null]}'


def test_large_answer_is_compressed_on_request(page: StagedPage) -> None:
    reply = page.ask("GET", f"{RUN}/devices", headers={"Accept-Encoding": "gzip"})
    assert reply.headers["Content-Encoding"] == "gzip"
    assert reply.content[:2] == b"\x1f\x8b"


def test_process_without_its_loop_or_broker_is_not_well(
    page: StagedPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FRESH_S", 0.0)
    silent = ServedRun("hidden", tmp_path, StagedView(), {}, lambda: 1e6)
    lost = ServedRun("hidden", tmp_path, StagedView(state={"broker_connected": False}), {})
    over = StagedView(state={"broker_connected": False, "state": "finished"})
    page.runs.add(ServedRun("over", tmp_path, over, {}))
    for path, run in (("/healthz", silent), ("/readyz", lost)):
        assert page.ask("GET", path, role=None).status == 200
        page.runs.add(run)
        reply = page.ask("GET", path, role=None)
        page.runs.remove(run.task)
        assert reply.status == 503
        assert run.task not in reply.json["error"]
