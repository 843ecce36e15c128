"""A broker for demos, tests and small trials: on this machine only, stopped with its context.

Mosquitto in its own process if installed, otherwise amqtt in a thread of this process, which needs
5 to 15 times the CPU. Both listen on loopback, know one user, and keep nothing on disk.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from coordinator.errors import CoordinatorError
from edge_sdk.program.files import make_folder, write_whole
from edge_sdk.program.processes import ChildProcess, Children
from edge_sdk.transport.link import Connected, Disconnected, LinkEvent
from edge_sdk.transport.opening import open_link
from edge_sdk.transport.settings import BrokerSettings

Kind = Literal["mosquitto", "amqtt"]

HOST = "127.0.0.1"
USER = "tessera"
PASSWORD = "password"  # noqa: S105  the name of a file
START_S = 30.0
STOP_S = 5.0
PORT_TRIES = 5
MAX_PACKET_BYTES = 327_680
"""Room for the largest chunk or control message, and its header."""

_HASH_ROUNDS = 101


class BrokerStartError(CoordinatorError):
    """The embedded broker could not be started; the text says why and what to do."""


def find_mosquitto() -> str | None:
    """Path of the program, from PATH or where Debian keeps it; None if not installed."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")


def available() -> tuple[Kind, ...]:
    """Return the kinds that can be started here, best first."""
    kinds: list[Kind] = []
    if find_mosquitto() is not None:
        kinds.append("mosquitto")
    if find_spec("amqtt") is not None:
        kinds.append("amqtt")
    return tuple(kinds)


@contextmanager
def embedded_broker(
    folder: Path,
    *,
    kind: Kind | None = None,
    port: int | None = None,
    password: str | None = None,
    more: Sequence[str] = (),
    hold: Callable[[ChildProcess], object] = lambda _: None,
) -> Iterator[BrokerSettings]:
    """Run a broker for the duration of the context; yields its settings once it is reachable.

    `folder` gets Mosquitto's configuration and log. None means the best kind available, a free
    port, a random password. The user is `tessera`. `more`: lines of a further listener, for
    Mosquitto only; `hold` gets its process. On Linux it ends with this thread at the latest.
    Raises BrokerStartError.
    """
    kinds = available()
    if kind is None and not kinds:
        raise BrokerStartError(
            "no broker is installed: install mosquitto (apt install mosquitto, brew install "
            "mosquitto) or pip install 'tessera-fl[broker]', or name a running broker in the "
            "configuration"
        )
    kind = kind or kinds[0]
    if kind not in kinds:
        raise BrokerStartError(f"{kind} is not installed")
    make_folder(folder)
    password = password or secrets.token_urlsafe(24)
    with ExitStack() as stack:
        yield _start(stack, folder, kind, port, password, more, hold)


def stable_password(folder: Path) -> str:
    """Return the password kept in a folder, made if there is none: devices have written it down."""
    path = folder / PASSWORD
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(24).encode(), mode=0o600)
    return path.read_text().strip()


def _start(
    stack: ExitStack,
    folder: Path,
    kind: Kind,
    port: int | None,
    password: str,
    more: Sequence[str],
    hold: Callable[[ChildProcess], object],
) -> BrokerSettings:
    start = partial(_mosquitto, more=more, hold=hold) if kind == "mosquitto" else _amqtt
    for _ in range(1 if port else PORT_TRIES):
        settings = BrokerSettings(
            host=HOST, port=port or _free_port(), username=USER, password=password
        )
        try:
            stack.enter_context(start(folder, settings))
        except BrokerStartError as error:
            # Another program may take the free port before the broker does.
            failure = error
        else:
            return settings
    raise failure


@contextmanager
def _mosquitto(
    folder: Path,
    settings: BrokerSettings,
    more: Sequence[str],
    hold: Callable[[ChildProcess], object],
) -> Iterator[None]:
    program = find_mosquitto()
    if program is None:
        raise BrokerStartError("mosquitto is not installed")
    users, config, log = folder / "users", folder / "mosquitto.conf", folder / "mosquitto.log"
    password = f"{settings.username}:{_password_hash(settings.password or '')}\n"
    write_whole(users, password.encode(), mode=0o600)
    config.write_text(mosquitto_config(settings, users, more))
    with Children() as children:
        broker = children.start("mosquitto", [program, "-c", str(config)], log)
        try:
            _wait_until_ready(settings, lambda: broker.is_running, lambda: _listens(settings))
        except _NotReadyError as error:
            raise BrokerStartError(
                f"mosquitto did not start: {_last_lines(log) or error}"
            ) from error
        hold(broker)
        yield


def mosquitto_config(settings: BrokerSettings, users: Path, more: Sequence[str] = ()) -> str:
    """Return Mosquitto's configuration for an embedded broker; `more`: a further listener."""
    lines = [
        "per_listener_settings true",
        f"listener {settings.port} {settings.host}",
        "allow_anonymous false",
        f"password_file {users}",
        *more,
        "persistence false",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
        "connection_messages false",
        "sys_interval 0",
        "set_tcp_nodelay true",
        f"max_packet_size {MAX_PACKET_BYTES}",
        "max_inflight_messages 20",
        # A slow reader loses messages beyond these limits; receipts and credits make up for it.
        "max_queued_messages 10000",
        "max_queued_bytes 67108864",
    ]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Started by root, it would switch to another user, who may not read the folder.
        lines.append("user root")
    return "\n".join(lines) + "\n"


def _password_hash(password: str) -> str:
    """Hash a password as mosquitto_passwd does for its file: PBKDF2 with SHA-512."""
    salt = secrets.token_bytes(12)
    key = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _HASH_ROUNDS)
    return f"$7${_HASH_ROUNDS}${base64.b64encode(salt).decode()}${base64.b64encode(key).decode()}"


@contextmanager
def _amqtt(_folder: Path, settings: BrokerSettings) -> Iterator[None]:
    # amqtt is optional and slow to import.
    from coordinator.operate.broker.amqtt import AmqttThread

    thread = AmqttThread(settings)
    thread.start()
    try:
        _wait_until_ready(settings, thread.is_alive, thread.listens.is_set)
        yield
    except _NotReadyError as error:
        raise BrokerStartError(f"amqtt did not start: {thread.failure or error}") from error
    finally:
        thread.stop(STOP_S)


class _NotReadyError(Exception):
    """The broker ended, or does not accept us."""


def _wait_until_ready(
    settings: BrokerSettings, is_alive: Callable[[], bool], listens: Callable[[], bool]
) -> None:
    """Connect as a client would: that tests the port, the protocol and the password at once."""
    by = time.monotonic() + START_S
    while not listens():
        if not is_alive() or time.monotonic() >= by:
            raise _NotReadyError("nothing listens on its port")
        time.sleep(0.02)
    connected = threading.Event()
    reasons: list[str] = []

    def note(event: LinkEvent) -> None:
        if isinstance(event, Connected):
            connected.set()
        elif isinstance(event, Disconnected):
            reasons.append(event.reason)

    link = open_link(settings, name="ready", deliver=note)
    try:
        while is_alive() and time.monotonic() < by:
            if connected.wait(0.1):
                return
    finally:
        link.close()
    raise _NotReadyError(reasons[-1] if reasons else "no answer")


def _listens(settings: BrokerSettings) -> bool:
    try:
        socket.create_connection((settings.host, settings.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return " | ".join(lines[-3:])
