"""A connection to a Ray cluster: one that exists, or one of our own on this machine.

A cluster that we start is ours alone: whoever connects needs a token that nobody else has, it
reports to nobody, and it is gone with its files when the connection ends. One that exists stays as
it is. Ray waits for minutes, deep in a library, for a cluster that does not answer; so another
process tries the address first, and can be ended.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from coordinator.errors import ConfigError, CoordinatorError
from edge_sdk.program.processes import limit_threads, run_child, uninterrupted

LONGEST_FOLDER = 40
"""Characters of a folder in which Ray's sockets still have names that a system takes."""
STORE_BYTES = 256 * 2**20
"""Memory for objects of a cluster of our own, beside the data."""
SKIP_VARIABLE = "RAY_DEDUP_LOGS_SKIP_REGEX"
"""Lines that Ray does not print, as a pattern that is read when it is imported."""

_TRIAL = """
import sys
import ray
try:
    ray.init(sys.argv[1], log_to_driver=False, logging_level=50)
    ray.shutdown()
except Exception as error:
    print(next(iter(f"{error.__cause__ or error}".strip().splitlines()), type(error).__name__))
    sys.exit(1)
"""


def load_ray() -> Any:
    """Import Ray. Raises `ConfigError` if it is not installed.

    Once imported, it would print to our output whenever a process or node is lost.
    """
    kept = os.environ.get(SKIP_VARIABLE)
    os.environ.setdefault(SKIP_VARIABLE, ".")
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is not installed: pip install 'tessera-fl[ray]'") from error
    finally:
        if kept is None:
            del os.environ[SKIP_VARIABLE]


@contextmanager
def connected(
    address: str | None, *, workers: int, data_bytes: int, timeout_s: float
) -> Iterator[Any]:
    """Connect to a cluster, and give Ray's module.

    `address` None starts a cluster here, with so many `workers` and room for so much data, unless
    this program has connected to one by itself: then that one is used and left alone. Raises
    `ConfigError` and `CoordinatorError`.
    """
    ray = load_ray()
    with _silence():
        if ray.is_initialized():
            if address is not None:
                raise ConfigError(
                    "this program is connected to Ray already: leave the address out to use that"
                )
            yield ray
        elif address is None:
            with _own_cluster(ray, workers, data_bytes):
                yield ray
        else:
            _try(address, timeout_s)
            with _start(ray, address):
                yield ray


@contextmanager
def _own_cluster(ray: Any, workers: int, data_bytes: int) -> Iterator[None]:
    base = tempfile.gettempdir()
    if len(base) > LONGEST_FOLDER:
        base = "/tmp"  # noqa: S108
    folder = tempfile.mkdtemp(prefix="tessera-ray-", dir=base)
    try:
        with (
            _terminable(),
            _start(
                ray,
                "local",
                num_cpus=workers,
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=data_bytes + STORE_BYTES,
                _temp_dir=folder,
            ),
        ):
            yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _start(ray: Any, address: str, **more: Any) -> Iterator[None]:
    """Connect until the context is left; with more settings, to a cluster that is started here."""
    own = bool(more)
    try:
        with uninterrupted(), _same_handler(), _environment(own), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ray.init(address, log_to_driver=False, configure_logging=False, **more)
            except Exception as error:  # Ray raises plain ones too
                where = "Ray does not start here" if own else f"no connection to Ray at {address}"
                raise CoordinatorError(f"{where}: {_first_line(error)}") from error
        yield
    finally:
        with uninterrupted():
            ray.shutdown(wait_for_processes=own)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end what we started too, where it would end this process at once."""
    with _same_handler():
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        yield


@contextmanager
def _same_handler() -> Iterator[None]:
    """Put back the handler of SIGTERM at the end; Ray has its own."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _environment(own: bool) -> Iterator[None]:
    """Set the variables that a cluster of our own is started with, and those that Ray sets."""
    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if own:
        limit_threads(os.environ)
        os.environ.setdefault("RAY_AUTH_TOKEN", _token())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def _token() -> str:
    """Return this process's secret: Ray would write one to the user's home."""
    return secrets.token_hex(32)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep Ray's log out of ours."""
    log = logging.getLogger("ray")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


def _try(address: str, timeout_s: float) -> None:
    """Check that a cluster answers. Raises `ConfigError` and `CoordinatorError`."""
    if address != "auto":
        _reach(address, timeout_s)
    try:
        tried = run_child([sys.executable, "-c", _TRIAL, address], timeout_s=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise CoordinatorError(
            f"no Ray cluster answered at {address} in {timeout_s:g} s: start one (ray start "
            "--head), or leave the address out for a cluster of this machine"
        ) from error
    if tried.returncode and "not find any running Ray" in tried.stdout:
        raise CoordinatorError(
            "no Ray cluster was found on this machine: start one (ray start --head), set "
            "RAY_ADDRESS, or leave the address out"
        )
    if tried.returncode:
        said = tried.stdout.strip() or next(reversed(tried.stderr.strip().splitlines()), "it ended")
        raise CoordinatorError(
            f"no connection to a Ray cluster at {address}: {said} (this machine must be one of the "
            "cluster's nodes)"
        )


def _reach(address: str, timeout_s: float) -> None:
    try:
        socket.create_connection(split_address(address), timeout_s).close()
    except OSError as error:
        raise CoordinatorError(
            f"nothing answers at {address} ({error.strerror or error}): check that the head node "
            "runs (ray start --head) and that a firewall lets this through"
        ) from error


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a cluster's head node. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"the address of a Ray cluster is auto or HOST:PORT of its head node, not {address!r}"
        )
    return host.strip("[]"), int(port)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
