"""Opens the page of a process: its port, its tokens, its server; and says where it is."""

from __future__ import annotations

import errno
import json
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import ConfigError
from coordinator.operate.broker.ports import PortError
from coordinator.operate.config import HttpTable
from coordinator.operate.http.access.door import Door
from coordinator.operate.http.access.sessions import Sessions
from coordinator.operate.http.access.tokens import (
    FOLDER,
    Holder,
    Role,
    Tokens,
    make_tokens,
    read_tokens,
)
from coordinator.operate.http.viewed import ViewedRuns
from edge_sdk.program.control import ControlCommand
from edge_sdk.program.files import make_folder, write_whole

FIRST_PORT, PORTS = 8_080, 100
BACKLOG = 64
PORT_FILE = "port.json"
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  only compared


@dataclass(frozen=True, slots=True)
class OpenPage:
    """A page that is served."""

    address: str
    """Its URL, without a path."""
    tokens: Tokens
    folder: Path
    """That of the run."""

    def link(self, role: Role = Role.OPERATE) -> str:
        """Return a new link that signs in once."""
        holder = Holder(role, {Role.OPERATE: "operator", Role.READ: "reader"}[role])
        return f"{self.address}/#token={self.tokens.issue(holder)}"

    def commands(self) -> dict[str, ControlCommand]:
        """Return the command of a control socket that makes a link."""

        def link(role: str = Role.OPERATE.value) -> dict[str, Any]:
            if role not in list(Role):
                raise ConfigError(f"role {role!r}: must be read or operate")
            return {"address": self.address, "link": self.link(Role(role)), "role": role}

        return {"page": link}

    def report(self, *, links: bool) -> Iterator[str]:
        """Say, for people, where the page is. `links`: give a link that signs in."""
        more = f"tessera-coordinator page {shlex.quote(str(self.folder))}"
        if links:
            yield f"page       {self.link()}"
            yield f"{'':10} signs in once, within 24 hours; for more: {more}"
        else:
            yield f"page       {self.address}; for a link that signs in: {more}"


def load_page() -> None:
    """Load what a page needs, in any thread: it takes long, and `open_http` then does not.

    What is missing is for `open_http` to say.
    """
    with suppress(ImportError):
        import coordinator.operate.http.app
        import coordinator.operate.http.server  # noqa: F401
        from coordinator.operate.http.pages import read_page

        read_page()


@contextmanager
def open_http(config: HttpTable, runs: ViewedRuns, folder: Path) -> Iterator[OpenPage | None]:
    """Serve the page of these runs for the duration of the context; None: it is off.

    `folder` keeps its port and its tokens. Raises `ConfigError`, and `PortError` if a port that
    the configuration names cannot be had.
    """
    if not config.enabled:
        yield None
        return
    # Needs starlette, uvicorn and prometheus-client, which a run without a page does not.
    from coordinator.operate.http.app import App
    from coordinator.operate.http.pages import read_page
    from coordinator.operate.http.server import HttpServer

    make_folder(folder / FOLDER, mode=0o700)
    if config.tokens is None:
        tokens = Tokens(make_tokens(folder))
    else:
        tokens = Tokens(read_tokens(config.tokens))
    listener = claim_port(config, folder / FOLDER / PORT_FILE)
    try:
        port = int(listener.getsockname()[1])
        secure = config.certificate is not None
        door = Door(
            tokens,
            Sessions(config.session_hours * 3600),
            f"{'__Host-' if secure else ''}tessera-{port}",
        )
        app = App(
            runs,
            door,
            names=[config.host, *config.names],
            files=read_page(),
            alive_s=config.alive_s,
            open_metrics=config.open_metrics,
            device_metrics=config.device_metrics,
        )
        tls = (config.certificate, config.key) if config.certificate and config.key else None
        server = HttpServer(app.asgi, listener, tls=tls, ending=app.streams.end)
    except BaseException:
        listener.close()
        raise
    server.start()
    try:
        scheme = "https" if secure else "http"
        yield OpenPage(f"{scheme}://{_place(config)}:{port}", tokens, folder)
    finally:
        server.close()
        app.calls.close()


def _place(config: HttpTable) -> str:
    """Return the host in the page's address, as a browser can reach it."""
    from coordinator.operate.joining.opening import local_address

    if config.names:
        return config.names[0]
    host = local_address() if config.host in EVERYWHERE else config.host
    return f"[{host}]" if ":" in host else host


def claim_port(config: HttpTable, path: Path) -> socket.socket:
    """Return a socket that listens on the port that is configured, or on a free one.

    `path` remembers a free one, and it is taken again if it is still free. Raises `PortError`.
    """
    if config.port:
        return _listen(config.host, config.port)
    before = _remembered(path)
    usual = range(FIRST_PORT, FIRST_PORT + PORTS)
    for port in [*([before] if before else []), *usual]:
        try:
            listener = _listen(config.host, port)
        except PortError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.EADDRINUSE, errno.EACCES):
                failure = error
                continue
            raise
        if port != before:
            write_whole(path, json.dumps({"port": port}).encode())
        return listener
    raise failure


def _remembered(path: Path) -> int:
    try:
        port = json.loads(path.read_bytes())["port"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return port if isinstance(port, int) and 0 < port < 65_536 else 0


def _listen(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise PortError(_explain(host, port, error)) from error
    return listener


def _explain(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"http.host = {host!r} is not known on this machine: {error.strerror}"
    if error.errno == errno.EACCES:
        return f"port {port} needs rights that this account does not have: set http.port above 1023"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} is in use by another program: stop it (ss -ltnp shows which it is), or "
            "set http.port to another one, or to 0 for a free one"
        )
    return f"{host}:{port} cannot be listened on ({error.strerror}): check http.host and http.port"
