"""Ports that stay the same for a run: devices and people write them down.

A run takes the first set of usual ports that is free as a whole, and keeps it from then on:

    1883  8883  8884      broker on this machine, broker for devices, joining
    1884  8885  8886      for the next run, or where another broker has 1883
    …

The port for joining is listened on as soon as it is chosen, so two runs that start at the same time
take different sets. The broker of a killed coordinator may keep the run's ports for a moment, so a
run waits for its own.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.errors import CoordinatorError
from edge_sdk.program.files import make_folder, write_whole

FILE = "ports.json"
SETS = 50
BACKLOG = 64
LOCAL, DEVICES, JOIN = 1_883, 8_883, 8_884
PATIENCE_S = 10.0
"""Seconds to wait for ports that the run had before."""

T = TypeVar("T")


class PortError(CoordinatorError):
    """A port that cannot be had; the text says which, and how to choose another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The ports of a run."""

    local: int
    """The embedded broker's, for this machine."""
    devices: int
    """The embedded broker's, for devices with certificates."""
    join: int
    """Where devices join."""


def claim_ports(
    folder: Path, wanted: Ports, host: str, *, embedded: bool
) -> tuple[Ports, socket.socket]:
    """Return the ports of a run, as chosen before or now, and a socket that listens on `join`.

    `folder` remembers them. `wanted`: those that the configuration names; 0 means any. `host`: the
    address to listen on. Not `embedded`: only `join` is needed. Raises `PortError` when one that
    is named, or that devices know already, is in use.
    """
    known = _read(folder / FILE)
    if known is None:
        ports, listener = _free_set(wanted, host, embedded=embedded)
    else:
        ports = _merged(wanted, known)
        if embedded:
            _patiently(lambda: check_port(ports.local, "local"))
            _patiently(lambda: check_port(ports.devices, "devices"))
        listener = _patiently(lambda: _listen(ports.join, host))
    try:
        if ports != known:
            make_folder(folder)
            write_whole(folder / FILE, json.dumps(asdict(ports)).encode())
    except BaseException:
        listener.close()
        raise
    return ports, listener


def claim_local(folder: Path, wanted: Ports) -> int:
    """Return the port of an embedded broker that nobody joins, as chosen before or now.

    Otherwise as `claim_ports`.
    """
    known = _read(folder / FILE)
    failure: PortError | None = None
    for usual in _sets() if known is None else [known]:
        ports = _merged(wanted, usual)
        try:
            if ports == known:
                _patiently(lambda: check_port(known.local, "local"))
            else:
                check_port(ports.local, "local")
        except PortError as error:
            failure = error
            continue
        if ports != known:
            make_folder(folder)
            write_whole(folder / FILE, json.dumps(asdict(ports)).encode())
        return ports.local
    assert failure is not None  # noqa: S101  there is at least one set
    raise failure


def check_port(port: int, name: str, host: str = "") -> None:
    """Raise `PortError` if a port cannot be listened on; `name` is its field in `Ports`."""
    try:
        _bound(port, host).close()
    except OSError as error:
        raise PortError(_explain(port, name, error)) from error


def _patiently(take: Callable[[], T]) -> T:
    """Try to take a port of this run until it is free; raises as `take` when it stays in use."""
    by = time.monotonic() + PATIENCE_S
    while True:
        try:
            return take()
        except PortError as error:
            cause = error.__cause__
            in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
            if not in_use or time.monotonic() >= by:
                raise
        time.sleep(0.05)


def _free_set(wanted: Ports, host: str, *, embedded: bool) -> tuple[Ports, socket.socket]:
    for usual in _sets():
        ports = _merged(wanted, usual)
        try:
            if embedded:
                check_port(ports.local, "local")
                check_port(ports.devices, "devices")
            return ports, _listen(ports.join, host)
        except PortError as error:
            failure = error  # of a port that the configuration names, it stays
    raise failure


def _sets() -> Iterator[Ports]:
    for number in range(SETS):
        yield Ports(local=LOCAL + number, devices=DEVICES + 2 * number, join=JOIN + 2 * number)


def _listen(port: int, host: str) -> socket.socket:
    try:
        listener = _bound(port, host)
        listener.listen(BACKLOG)
    except OSError as error:
        raise PortError(_explain(port, "join", error)) from error
    return listener


def _bound(port: int, host: str) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def _explain(port: int, name: str, error: OSError) -> str:
    key = {"local": "broker.port", "devices": "broker.tls_port", "join": "join.port"}[name]
    if error.errno == errno.EACCES:
        return (
            f"port {port} needs rights that this account does not have: set {key} to one above 1023"
        )
    if error.errno != errno.EADDRINUSE:
        return f"port {port} cannot be listened on ({error.strerror}): check {key} and join.host"
    return (
        f"port {port} is in use by another program: stop it (ss -ltnp shows which it is), or set "
        f"{key} to another port; devices that know the old one then have to join again"
    )


def _merged(wanted: Ports, other: Ports) -> Ports:
    return Ports(
        local=wanted.local or other.local,
        devices=wanted.devices or other.devices,
        join=wanted.join or other.join,
    )


def _read(path: Path) -> Ports | None:
    try:
        content = json.loads(path.read_text())
        return Ports(**{name: int(content[name]) for name in ("local", "devices", "join")})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise PortError(
            f"{path} cannot be read ({error}): remove it, and devices have to join again"
        ) from error
