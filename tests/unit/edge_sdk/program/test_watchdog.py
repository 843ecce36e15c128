"""The watchdog against a real datagram socket, as systemd has one."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.program.watchdog import RETRY_S, Watchdog


class Manager:
    """The end of the socket that systemd holds."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """All that was said since the last call."""
        said = []
        with suppress(BlockingIOError):
            while True:
                said.append(self._socket.recv(4096).decode())
        return said

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.close()


def asked(manager: Manager, **more: str) -> dict[str, str]:
    """The environment with which systemd starts a program."""
    return {"NOTIFY_SOCKET": manager.address, "WATCHDOG_PID": str(os.getpid()), **more}


def test_life_of_a_program_is_told_in_order(manager: Manager) -> None:
    watchdog = Watchdog.from_environment(asked(manager, WATCHDOG_USEC="10000000"))
    watchdog.ready("waiting for the broker")
    watchdog.alive(100.0)
    watchdog.status("round 3: training")
    watchdog.stopping()
    assert manager.heard() == [
        "READY=1\nSTATUS=waiting for the broker",
        "WATCHDOG=1",
        "STATUS=round 3: training",
        "STOPPING=1",
    ]


def test_alive_is_said_at_half_the_time_and_not_more_often(manager: Manager) -> None:
    watchdog = Watchdog.from_environment(asked(manager, WATCHDOG_USEC="10000000"))
    said_at = []
    for now in range(50, 71):
        watchdog.alive(float(now))
        if manager.heard() == ["WATCHDOG=1"]:
            said_at.append(now)
    assert said_at == [50, 55, 60, 65, 70]


@given(
    timeout_s=st.integers(1, 600),
    waits=st.lists(st.floats(0.001, 100.0, allow_nan=False), max_size=50),
)
def test_loop_that_obeys_due_is_never_silent_for_the_timeout(
    timeout_s: int, waits: list[float]
) -> None:
    manager = Manager(f"@tessera-due-{os.getpid()}")
    try:
        watchdog, now, heard = Watchdog(manager.address, float(timeout_s)), 1_000.0, []
        for wait in [0.0, *waits]:
            now += min(wait, max(0.0, watchdog.due_s - now))
            watchdog.alive(now)
            if manager.heard():
                heard.append(now)
    finally:
        manager.close()
    assert heard[0] == 1_000.0
    gaps = [later - earlier for earlier, later in pairwise([*heard, now])]
    assert max(gaps) <= timeout_s / 2 + 1e-6


def test_loop_that_hangs_is_silent(manager: Manager) -> None:
    """Only the loop speaks: there is no thread that goes on without it."""
    threads = threading.active_count()
    watchdog = Watchdog.from_environment(asked(manager, WATCHDOG_USEC="1000"))
    watchdog.ready("up")
    watchdog.alive(1.0)
    manager.heard()
    assert threading.active_count() == threads
    assert threading.Event().wait(0.05) is False  # 50 times what systemd bears
    assert manager.heard() == []


def test_abstract_socket_is_reached(tmp_path: Path) -> None:
    manager = Manager(f"@tessera-{os.getpid()}-{tmp_path.name}")
    try:
        Watchdog.from_environment(asked(manager)).ready("up")
        assert manager.heard() == ["READY=1\nSTATUS=up"]
    finally:
        manager.close()


def test_watchdog_of_another_process_is_left_to_it(manager: Manager) -> None:
    environment = asked(manager, WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getppid()))
    watchdog = Watchdog.from_environment(environment)
    watchdog.alive(1.0)
    assert manager.heard() == []
    assert watchdog.due_s == math.inf


def test_watchdog_without_a_pid_is_ours(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "2000000"}
    watchdog = Watchdog.from_environment(environment)
    watchdog.alive(7.0)
    assert manager.heard() == ["WATCHDOG=1"]
    assert watchdog.due_s == 8.0


@pytest.mark.parametrize("microseconds", ["", "0", "-5", "1e6", "many", "²"])
def test_watchdog_without_a_time_keeps_silent(manager: Manager, microseconds: str) -> None:
    watchdog = Watchdog.from_environment(asked(manager, WATCHDOG_USEC=microseconds))
    watchdog.alive(1.0)
    assert watchdog.due_s == math.inf
    assert manager.heard() == []


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "relative"])
def test_program_without_systemd_says_nothing(address: str | None) -> None:
    environment = {} if address is None else {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"}
    watchdog = Watchdog.from_environment(environment)
    watchdog.ready("up")
    watchdog.alive(1.0)
    watchdog.stopping()
    assert watchdog.due_s == math.inf


def test_environment_of_the_process_is_the_default(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "4000000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    watchdog = Watchdog.from_environment()
    watchdog.alive(1.0)
    assert manager.heard() == ["WATCHDOG=1"]
    assert watchdog.due_s == 3.0


def test_programs_that_we_start_do_not_speak_for_us(manager: Manager) -> None:
    environment = asked(manager, WATCHDOG_USEC="4000000", PATH="/usr/bin")
    Watchdog.from_environment(environment)
    assert environment == {"PATH": "/usr/bin"}


def test_systemd_that_is_gone_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(str(tmp_path / "nobody"), 60.0)
    with caplog.at_level(logging.WARNING):
        watchdog.ready("up")
        watchdog.alive(10.0)
    assert watchdog.due_s == 10.0 + RETRY_S
    assert len(caplog.records) == 1
    assert str(tmp_path / "nobody") in caplog.text


def test_systemd_that_does_not_read_does_not_block(manager: Manager) -> None:
    """The queue of a datagram socket is short; a loop must not wait for room in it."""
    watchdog = Watchdog(manager.address, 60.0)
    for _ in range(10_000):
        watchdog.status("busy")
    watchdog.alive(10.0)
    assert watchdog.due_s == 10.0 + RETRY_S
    assert 0 < len(manager.heard()) < 10_000
    watchdog.alive(11.0)
    assert manager.heard() == ["WATCHDOG=1"]
    assert watchdog.due_s == 11.0 + 30.0


def test_status_is_one_line(manager: Manager) -> None:
    Watchdog(manager.address).status("cannot connect:\nREADY=1\n\tbecause")
    assert manager.heard() == ["STATUS=cannot connect: READY=1 because"]
