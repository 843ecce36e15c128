"""Whatever is sent, the page answers with words or closes the connection, and goes on."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.described_api import check_answer
from tests.staged_runs import API, StagedPage, staged_page

RUN = f"{API}/runs/digits"
PATHS = (
    "/",
    "/healthz",
    "/metrics",
    f"{API}/runs",
    f"{API}/session",
    RUN,
    f"{RUN}/devices",
    f"{RUN}/rounds",
    f"{RUN}/strip",
    f"{RUN}/blocks",
    f"{RUN}/audit",
    f"{RUN}/stop",
    f"{RUN}/settings",
    f"{RUN}/devices/porch/quarantine",
    f"{RUN}/devices/{{any}}",
    f"{RUN}/devices/{{any}}/forget",
    f"{API}/runs/{{any}}/pause",
    "/page/{any}",
    "/{any}",
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
KNOWN = st.fixed_dictionaries(
    {},
    optional={
        "when": st.sampled_from(["round", "now"]) | VALUES,
        "add": st.integers(-2, 5) | VALUES,
        "name": st.text(max_size=5) | VALUES,
        "value": VALUES,
        "reason": VALUES,
        "token": VALUES,
    },
)
BODIES = st.none() | st.binary(max_size=60) | (KNOWN | VALUES).map(lambda v: json.dumps(v).encode())
QUERIES = st.dictionaries(
    st.sampled_from(["since", "sort", "filter", "rounds", "round", "x"]),
    st.text(max_size=12) | st.integers().map(str),
    max_size=3,
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedPage]:
    with staged_page(tmp_path_factory.mktemp("fuzz")) as found:
        yield found


@pytest.fixture(scope="module")
def document(page: StagedPage) -> dict[str, Any]:
    found: dict[str, Any] = page.ask("GET", f"{API}/openapi.json").json
    return found


@settings(max_examples=120)
@given(
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"]),
    path=st.sampled_from(PATHS),
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    query=QUERIES,
    body=BODIES,
)
def test_any_request_is_answered_as_described(
    page: StagedPage,
    document: dict[str, Any],
    method: str,
    path: str,
    text: str,
    query: dict[str, str],
    body: bytes | None,
) -> None:
    filled = path.replace("{any}", urllib.parse.quote(text, safe=""))
    target = f"{filled}?{urllib.parse.urlencode(query)}"
    reply = page.ask(method, target, body=body)
    assert reply.status < 500, reply.content
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    if reply.status >= 400 and method != "HEAD":
        assert reply.json["error"]
    described = [path.replace("{any}", "x")] if "/runs" in path else []
    for known in described if method in ("GET", "POST") and reply.status != 405 else []:
        if "/" not in text and reply.json != {"error": "nothing is at this address"}:
            kind = reply.headers.get_content_type()
            check_answer(document, method, known, reply.status, kind, reply.content)


@settings(max_examples=60)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_leave_the_page_alive(page: StagedPage, first: bytes, second: bytes) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", page.port), timeout=60) as raw:
        with suppress(OSError):  # it may close at the first bytes
            raw.sendall(first)
            raw.sendall(second)
            raw.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            answer = raw.recv(64)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
