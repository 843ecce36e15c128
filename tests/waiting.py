"""One way to wait for what another process or thread does."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from itertools import count
from pathlib import Path

HANGS_S = 300.0
"""For everything that tests wait for: only what hangs takes so long."""

_LASTING = count(10_000 + os.getpid() % 1_000 * 10)


def until(
    holds: Callable[[], object], tell: Callable[[], object] = lambda: "", *, every_s: float = 0.01
) -> None:
    """Wait until something holds; fails with what `tell` returns if it never does."""
    by = time.monotonic() + HANGS_S
    while not holds():
        assert time.monotonic() < by, tell()
        time.sleep(every_s)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that one process at a time can have; `path` is its file."""
    with path.open("w") as file:
        flock(file, LOCK_EX)
        yield


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """A folder that one of the workers makes for all; `make` gets the folder to make."""
    with locked(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.draft")
            make(draft)
            draft.rename(folder)
    return folder


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def lasting_port() -> int:
    """A port of this machine that stays free while a program that listens on it restarts.

    It is below those that systems give to connections, and another one for every process.
    """
    while listens(port := next(_LASTING)):
        pass
    return port


def listens(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
