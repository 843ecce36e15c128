"""The control socket: private, one JSON line each way, and clear about what it does not know."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.program.control import (
    MAX_CONNECTIONS,
    SOCKET,
    ControlError,
    ControlSocket,
    NotServedError,
    ask_run,
)


def double(number: int) -> dict[str, int]:
    if number < 0:
        raise ControlError("negative numbers are not doubled here")
    return {"twice": 2 * number}


def broken() -> None:
    raise ZeroDivisionError


@pytest.fixture(params=["short", "l" * 120])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run; the path of a socket has at most 108 bytes, that of a folder more."""
    folder = tmp_path / request.param
    folder.mkdir()
    control = ControlSocket(folder, {"double": double, "broken": broken})
    control.start()
    yield folder
    control.close()
    assert not (folder / SOCKET).exists()


def raw(folder: Path, *lines: bytes) -> list[Any]:
    import os

    handle = os.open(folder, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(f"/proc/self/fd/{handle}/{SOCKET}")
            with connection.makefile("rwb") as stream:
                stream.write(b"".join(line + b"\n" for line in lines))
                stream.flush()
                return [json.loads(stream.readline()) for _ in lines]
    finally:
        os.close(handle)


def test_command_is_answered_and_the_socket_is_private(run: Path) -> None:
    assert stat.S_IMODE((run / SOCKET).stat().st_mode) == 0o600
    assert ask_run(run, "double", number=21) == {"twice": 42}


def test_refusals_are_words(run: Path) -> None:
    for command, arguments, words in (
        ("double", {"number": -1}, "negative numbers are not doubled here"),
        ("doubel", {"number": 1}, "unknown command 'doubel'; did you mean 'double'"),
        ("double", {"nubmer": 1}, "double: .*nubmer"),
        ("broken", {}, "the command failed: ZeroDivisionError"),
    ):
        with pytest.raises(ControlError, match=words):
            ask_run(run, command, **arguments)
    assert ask_run(run, "double", number=1) == {"twice": 2}


def test_connection_carries_several_requests_and_survives_nonsense(run: Path) -> None:
    good = json.dumps({"v": 1, "command": "double", "arguments": {"number": 2}}).encode()
    answers = raw(run, b"nonsense", b"[]", b'{"v": 2, "command": "double"}', good)
    assert [each["ok"] for each in answers] == [False, False, False, True]
    assert all(each["v"] == 1 for each in answers)
    assert "version 1, not 2" in answers[2]["error"]


def test_run_that_nobody_serves_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(NotServedError, match="is not being served"):
        ask_run(tmp_path, "double", number=1)
    with socket.socket(socket.AF_UNIX) as left:  # by a process that was killed
        left.bind(str(tmp_path / SOCKET))
    with pytest.raises(NotServedError, match="is not being served"):
        ask_run(tmp_path, "double", number=1)
    control = ControlSocket(tmp_path, {"double": double})
    control.start()
    assert ask_run(tmp_path, "double", number=1) == {"twice": 2}
    control.close()


def test_many_clients_one_after_another_are_all_answered(run: Path) -> None:
    for number in range(2 * MAX_CONNECTIONS):
        assert ask_run(run, "double", number=number) == {"twice": 2 * number}


def test_socket_that_cannot_be_private_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("os.chmod", refuse)
    with pytest.raises(ControlError, match="cannot be made: Operation not permitted"):
        ControlSocket(tmp_path, {})
    assert list(tmp_path.iterdir()) == []
