"""Streams of events: what changed, to whom it may concern, and no longer."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.operate.http.answers import events
from coordinator.operate.http.answers.calls import Calls
from coordinator.operate.http.answers.events import MAX_STREAMS, StreamPlace, Streams
from coordinator.operate.serve.runs import ServedRun
from tests.described_api import check_answer
from tests.staged_runs import API, StagedPage, StagedView, staged_device, staged_page
from tests.waiting import until

PATH = f"{API}/runs/digits/events"


@contextmanager
def stream(
    page: StagedPage, path: str = PATH, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    connection = page.connect()
    given = {"Authorization": f"Bearer {page.token()}"} if "Cookie" not in headers else {}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=given)
    answer = connection.getresponse()
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


def listen(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, each with its kind, data and perhaps id."""
    event: dict[str, Any] = {}
    while line := answer.readline():
        text = line.decode().rstrip("\n")
        key, _, value = text.partition(": ")
        if key == "data":
            event["data"] = json.loads(value)
        elif key in ("event", "id"):
            event[key] = value
        elif not text and event:
            yield event
            event = {}


def turn(heard: Iterator[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The events up to the next one with an id, by kind."""
    found: dict[str, dict[str, Any]] = {}
    for event in heard:
        assert event["event"] not in found
        found[event["event"]] = event
        if "id" in event:
            break
    return found


def names(event: dict[str, Any]) -> list[str]:
    return [row["device"] for row in event["data"]]


def test_first_events_have_everything_and_later_ones_what_changed(page: StagedPage) -> None:
    with stream(page) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        heard = listen(answer)
        first = turn(heard)
        assert first.keys() == {"status", "devices", "rounds"}
        assert names(first["devices"]) == ["kitchen", "porch"]
        assert [row["round"] for row in first["rounds"]["data"]] == [1, 2]
        page.view.change("porch", battery=0.1)
        second = turn(heard)
        assert second.keys() == {"status", "devices"}
        assert names(second["devices"]) == ["porch"]
        page.view.commit()
        third = turn(heard)
        assert third.keys() == {"status", "rounds"}
        assert [row["round"] for row in third["rounds"]["data"]] == [3]
        document = page.ask("GET", f"{API}/openapi.json").json
        for event in (*first.values(), *second.values(), *third.values()):
            content = json.dumps(event["data"]).encode()
            check_answer(document, "GET", PATH, 200, "text/event-stream", content)


def test_events_come_at_most_once_a_second_with_the_newest_rows(page: StagedPage) -> None:
    with stream(page) as answer:
        heard = listen(answer)
        turn(heard)
        began, turns, battery = time.monotonic(), 0, -1.0
        for number in range(25):
            page.view.change("porch", battery=number / 100)
            time.sleep(0.02)  # changes many times a second
        while battery != 0.24:
            (row,) = turn(heard)["devices"]["data"]
            turns, battery = turns + 1, row["battery"]
        assert turns <= time.monotonic() - began + 2


def test_stream_resumes_where_it_broke_off(page: StagedPage) -> None:
    with stream(page) as answer:
        last = next(each["id"] for each in turn(listen(answer)).values() if "id" in each)
    page.view.change("porch")
    page.view.commit()
    with stream(page, Last_Event_ID=last) as answer:
        missed = turn(listen(answer))
    assert names(missed["devices"]) == ["porch"]
    assert [row["round"] for row in missed["rounds"]["data"]] == [3]


@pytest.mark.parametrize("last", ["00000000-1.2", "x", "1", "-1.-1", "00000000-" + "9" * 30 + ".1"])
def test_stream_of_another_process_begins_anew(page: StagedPage, last: str) -> None:
    with stream(page, Last_Event_ID=last) as answer:
        assert turn(listen(answer)).keys() == {"status", "devices", "rounds"}


def test_stream_begins_where_the_reader_is(page: StagedPage) -> None:
    page.view.change("porch")
    with stream(page, f"{PATH}?since=1&round=1") as answer:
        found = turn(listen(answer))
    assert names(found["devices"]) == ["porch"]
    assert [row["round"] for row in found["rounds"]["data"]] == [2]
    with stream(page, f"{PATH}?since=999") as answer:  # of a process that ended
        assert names(turn(listen(answer))["devices"]) == ["kitchen", "porch"]


def test_name_of_a_device_cannot_end_an_event(page: StagedPage) -> None:
    hostile = 'x\n\nevent: status\ndata: {"state":"hacked"}\n\n\r\u2028</script>'
    page.view.rows = {hostile: staged_device(hostile)}
    with stream(page) as answer:
        found = turn(listen(answer))
    assert names(found["devices"]) == [hostile]
    assert found["status"]["data"]["state"] == "running"


def test_quiet_stream_shows_that_it_is_alive(
    page: StagedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "QUIET_S", 0.5)
    with stream(page) as answer:
        turn(listen(answer))
        while (line := answer.readline()) in (b"\n", b""):
            pass
        assert line == b": alive\n"


def test_too_many_streams_are_refused_until_one_ends(page: StagedPage) -> None:
    connections = [page.connect() for _ in range(MAX_STREAMS)]
    headers = {"Authorization": f"Bearer {page.token()}"}
    for connection in connections:
        connection.request("GET", PATH, headers=headers)
    answers = [connection.getresponse() for connection in connections]
    assert {answer.status for answer in answers} == {200}
    for answer in answers:
        answer.readline()  # it has begun
    reply = page.ask("GET", PATH)
    assert reply.status == 429
    assert "32 streams" in reply.json["error"]
    metrics = page.ask("GET", "/metrics").content
    assert f"tessera_http_event_streams {MAX_STREAMS}.0".encode() in metrics
    answers[0].close()
    connections[0].close()

    def opens() -> bool:
        with stream(page) as answer:
            return answer.status == 200

    until(opens, every_s=0.1)
    for answer, connection in zip(answers, connections, strict=True):
        answer.close()
        connection.close()


def test_stream_ends_at_sign_out(page: StagedPage) -> None:
    cookie = page.cookie()
    with stream(page, Cookie=cookie) as answer:
        heard = listen(answer)
        turn(heard)
        page.ask(
            "DELETE",
            f"{API}/session",
            role=None,
            headers={"Cookie": cookie, "Origin": page.origin},
        )
        assert list(heard) == []


def test_stream_ends_with_the_run_and_with_the_process(tmp_path: Path) -> None:
    with staged_page(tmp_path) as page, stream(page) as answer:
        heard = listen(answer)
        turn(heard)
        page.runs.remove("digits")
        assert list(heard) == []
    rest: list[Any] = []
    with staged_page(tmp_path) as page:
        connection = page.connect()
        connection.request("GET", PATH, headers={"Authorization": f"Bearer {page.token()}"})
        heard = listen(connection.getresponse())
        turn(heard)
        reader = threading.Thread(target=lambda: rest.extend(heard))
        reader.start()
    reader.join()
    connection.close()
    assert rest == []


def test_streams_of_a_moment_share_one_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class CountingView(StagedView):
        def devices(self, since: int = 0) -> list[dict[str, Any]]:
            asked.append(since)
            return super().devices(since)

    monkeypatch.setattr(events, "EVERY_S", 1e9)  # one moment
    run = ServedRun("digits", tmp_path, CountingView(), {})

    async def watch() -> list[bytes]:
        calls = Calls()
        streams = Streams(calls)
        watchers = [streams.open(run, StreamPlace(), lambda: True) for _ in range(5)]
        for watcher in watchers:
            assert (await anext(watcher)).startswith(b"retry")
        texts = await asyncio.gather(*(anext(watcher) for watcher in watchers))
        streams.end()
        calls.close()
        return texts

    texts = asyncio.run(watch())
    assert len(set(texts)) == 1
    assert b"event: devices" in texts[0]
    assert asked == [0]
