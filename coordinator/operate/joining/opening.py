"""The way in for devices: their broker, the port they join at, and the codes."""

from __future__ import annotations

import logging
import signal
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from coordinator.errors import ConfigError
from coordinator.operate.broker.embedded import available, embedded_broker, stable_password
from coordinator.operate.broker.ports import Ports, check_port, claim_local, claim_ports
from coordinator.operate.config import BrokerTable, JoinTable, ServeConfig
from coordinator.operate.identity.access import WrittenRules, reload_later
from coordinator.operate.identity.authority import Authority
from coordinator.operate.identity.commands import AUTHORITY_DAYS
from coordinator.operate.identity.files import write_file
from coordinator.operate.identity.index import BrokerPlace
from coordinator.operate.identity.mosquitto import broker_files, tls_listener
from coordinator.operate.joining.codes import CodeBook, CodeEntry, JoinPlace
from coordinator.operate.joining.desk import Desk
from coordinator.operate.joining.server import JoinServer
from edge_sdk.join.code import fingerprint_of
from edge_sdk.program.control import ControlCommand, ControlError
from edge_sdk.program.files import make_folder
from edge_sdk.program.logs import fact
from edge_sdk.program.processes import ChildProcess
from edge_sdk.transport.settings import BrokerSettings, is_loopback

log = logging.getLogger(__name__)

BUSY_S = 10.0
CERTIFICATE, KEY = "broker.pem", "broker.key"

_ELSEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737)."""


class EntranceConfig(Protocol):
    """Settings of a broker and of joining: those of a run, or of a process with many."""

    @property
    def broker(self) -> BrokerTable:
        """The broker, and how to reach it."""

    @property
    def join(self) -> JoinTable:
        """How devices join."""

    @property
    def can_join(self) -> bool:
        """True if devices can join with codes."""

    @property
    def authority(self) -> Path:
        """Folder of the authority."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where devices come in: a socket that listens, and the broker as devices reach it."""

    host: str
    port: int
    listener: socket.socket
    broker: BrokerSettings
    files: Path
    """Folder of the server's certificate and key."""
    ca: bytes
    """Certificate of the authority, in PEM format."""
    mosquitto: ChildProcess | None = None
    """The embedded broker, if it is Mosquitto."""

    def reload(self) -> None:
        """Let the embedded broker read its files again. Raises `ControlError`."""
        if self.mosquitto is None:
            raise ControlError("the broker of this run is not ours: reload it yourself")
        self.mosquitto.signal(signal.SIGHUP)


def local_address() -> str:
    """Return this machine's address in its network; loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def check_wanted(config: EntranceConfig) -> None:
    """Raise `PortError` if a port that the configuration names is in use, `ConfigError` as later.

    For a run that is not there yet: one that is may wait for its own ports.
    """
    broker, embedded = config.broker, config.broker.embedded
    if embedded and broker.port:
        check_port(broker.port, "local")
    if not config.can_join:
        return
    if embedded and broker.tls_port:
        check_port(broker.tls_port, "devices")
    if config.join.port:
        host = _host(config, everywhere=not embedded or "mosquitto" in available())
        check_port(config.join.port, "join", _bind(host))


@contextmanager
def open_embedded(
    config: EntranceConfig, folder: Path
) -> Iterator[tuple[BrokerSettings, Entrance | None]]:
    """Run an embedded broker with its files in `folder`; gives our own settings, and the entrance.

    None: devices cannot join. Raises `ConfigError`, `CoordinatorError`.
    """
    broker = config.broker
    wanted = Ports(local=broker.port, devices=broker.tls_port, join=config.join.port)
    make_folder(folder, mode=0o700)
    password = broker.password or stable_password(folder)
    if not config.can_join:
        port = claim_local(folder, wanted)
        with embedded_broker(folder, port=port, password=password) as own:
            yield own, None
        return
    tls = "mosquitto" in available()
    host = _host(config, everywhere=tls)
    ports, listener = claim_ports(folder, wanted, _bind(host), embedded=True)
    with listener:
        hosts, running = _names(host), list[ChildProcess]()
        place = BrokerPlace(host, ports.devices, folder.absolute(), by_task=True)
        ca = _write_files(config.authority, folder, hosts, place)
        with embedded_broker(
            folder,
            port=ports.local,
            password=password,
            more=tls_listener(hosts, ports.devices, folder) if tls else (),
            hold=running.append,
        ) as own:
            for_devices = BrokerSettings(host=host, port=ports.devices, tls=True) if tls else own
            process = running[-1] if running else None
            yield own, Entrance(host, ports.join, listener, for_devices, folder, ca, process)


@contextmanager
def open_entrance(config: EntranceConfig, folder: Path) -> Iterator[Entrance]:
    """Open the entrance of a run whose broker is not embedded. Raises as `open_embedded`."""
    broker, host = config.broker, _host(config, everywhere=True)
    if is_loopback(broker.host):  # for us; devices may be elsewhere
        broker = replace(broker, host=host)
    wanted = Ports(local=0, devices=0, join=config.join.port)
    make_folder(folder, mode=0o700)
    ports, listener = claim_ports(folder, wanted, _bind(host), embedded=False)
    with listener:
        ca = _write_files(config.authority, folder, _names(host), None)
        yield Entrance(host, ports.join, listener, broker, folder, ca)


class Joining:
    """The code book of a run that lets devices join; its server runs meanwhile."""

    def __init__(self, book: CodeBook, config: ServeConfig, *, shared: bool = False) -> None:
        """`shared`: the book is for many runs, and codes for this one have to name its task."""
        self._book = book
        self._task = config.task.name
        self._hours = config.join.hours
        self._devices = config.join.devices or config.round.min_devices
        self.shared = shared

    def current(self) -> CodeEntry | None:
        """Return the code to print: a usable one, or a new one while devices are missing.

        None: as many devices as the first code was for have joined.
        """
        if usable := self._book.usable:
            return usable[-1]
        joined = {guest.name for each in self._book.entries for guest in each.guests}
        missing = self._devices - len(joined)
        return self._book.create(devices=missing, hours=self._hours) if missing > 0 else None

    def commands(self) -> dict[str, ControlCommand]:
        """Return the commands of the run's control socket that are about codes."""
        return book_commands(self._book, self._task)


def book_commands(book: CodeBook, task: str | None = None) -> dict[str, ControlCommand]:
    """Return what can be asked of an open code book, by command.

    `task`: the codes of this task alone are listed, and new ones are for it unless tasks are named.
    """

    def create(devices: int, hours: float, tasks: Sequence[str] = ()) -> dict[str, Any]:
        wanted = tasks or (() if task is None else (task,))
        return book.create(devices=devices, hours=hours, tasks=wanted).facts(book.now)

    def listing() -> list[dict[str, Any]]:
        shown = (each for each in book.entries if task is None or task in each.tasks)
        return [each.facts(book.now) for each in shown]

    def revoke(id: str) -> dict[str, Any]:
        return book.revoke(id).facts(book.now)

    return {"codes.create": create, "codes.list": listing, "codes.revoke": revoke}


@contextmanager
def open_joining(config: ServeConfig, run: Path, entrance: Entrance) -> Iterator[Joining]:
    """Let devices join a run for the duration of the context."""
    with open_desk(config, run, entrance, config.task.name) as book:
        yield Joining(book, config)


@contextmanager
def open_desk(
    config: EntranceConfig, folder: Path, entrance: Entrance, task: str | None
) -> Iterator[CodeBook]:
    """Open the code book in a folder, and serve devices that join for the duration of the context.

    `task`: that of codes which name none; None: they must.
    """
    der = ssl.PEM_cert_to_DER_cert(entrance.ca.decode())
    place = JoinPlace(entrance.host, entrance.port, task, fingerprint_of(der))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(entrance.files / CERTIFICATE, entrance.files / KEY)
    with ExitStack() as stack:
        book = stack.enter_context(CodeBook(folder, place))
        admitted = partial(_admitted, entrance)
        desk = Desk(book, entrance.broker, config.authority, entrance.ca, admitted)
        server = JoinServer(entrance.listener, context, desk)
        server.start()
        stack.callback(server.close)
        yield book


def _admitted(entrance: Entrance, written: WrittenRules) -> None:
    """Let brokers read the rules for a device that is just joining; our own before it connects."""
    for folder, reason in written.failures:
        log.error("%s: the access rules cannot be written: %s", folder, reason)
    own = entrance.files.absolute()
    if entrance.mosquitto is not None:
        entrance.reload()
    elif written.own is not None and entrance.broker.tls:
        log.warning(
            "a device has joined, and the broker has to read its access rules before it is let in "
            "anywhere: reload it (docs/deploy.md has a unit that does so)",
            extra=fact("reload_broker"),
        )
    reload_later(folder for folder in written.folders if folder.absolute() != own)


def _host(config: EntranceConfig, *, everywhere: bool) -> str:
    """Return the name under which devices reach this machine. Raises `ConfigError`."""
    given = config.join.host
    if everywhere:
        return given or local_address()
    if given is not None and not is_loopback(given):
        raise ConfigError(
            f"join.host = {given!r}: this run's broker serves this machine only; install mosquitto "
            "(apt install mosquitto), or name a broker with TLS"
        )
    return given or "127.0.0.1"


def _bind(host: str) -> str:
    """Return the address to listen on: loopback for a host on loopback, otherwise all."""
    if ":" in host:
        return host if is_loopback(host) else "::"
    return "127.0.0.1" if is_loopback(host) else ""


def _names(host: str) -> list[str]:
    """Return the names for the server's certificate, the one that devices use first."""
    return [host] if is_loopback(host) else list(dict.fromkeys([host, local_address()]))


def _write_files(
    authority_folder: Path, folder: Path, hosts: list[str], place: BrokerPlace | None
) -> bytes:
    """Write the broker's files, and return the authority's certificate (PEM)."""
    with Authority(authority_folder, create_days=AUTHORITY_DAYS, wait_s=BUSY_S) as authority:
        for name, file in broker_files(authority, hosts).items():
            write_file(folder / name, file)
        if place is not None:
            authority.remember_run(place)
        return authority.pem
