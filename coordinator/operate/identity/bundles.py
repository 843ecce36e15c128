"""A participant's files: its certificates and keys, and a configuration that uses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coordinator.operate.identity.authority import CA, Authority, Issued
from coordinator.operate.identity.errors import IdentityError
from coordinator.operate.identity.files import File
from coordinator.operate.identity.index import BrokerPlace
from edge_sdk.join.files import DEVICE_FILE, certificate_files, render_broker, render_device
from edge_sdk.transport.settings import BrokerSettings, LinkError

PORT = 8_883
"""Usual port of MQTT over TLS."""

_PLACE = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F]*:[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?"
)


def parse_place(text: str) -> BrokerPlace:
    """Parse a broker's `host` or `host:port`. Raises `IdentityError`."""
    parts = _PLACE.fullmatch(text)
    if parts is None:
        raise IdentityError(f"--broker {text!r}: give host:port, such as broker.example.org:{PORT}")
    return make_place(parts["six"] or parts["host"], int(parts["port"] or PORT))


def make_place(host: str, port: int) -> BrokerPlace:
    """Make a broker's address, checked. Raises `IdentityError`."""
    try:
        BrokerSettings(host=host, port=port, tls=True)
    except LinkError as error:
        raise IdentityError(str(error)) from error
    return BrokerPlace(host, port)


def device_bundle(
    authority: Authority, pair: tuple[Issued, Issued], broker: BrokerPlace, tasks: Sequence[str]
) -> dict[str, File]:
    """Return the files of a device's bundle, by name. `tasks`: the most important first;
    none: left to the owner."""
    text = render_device(pair[0].name, tasks, None, broker_table(pair, broker))
    return {DEVICE_FILE: File(text.encode()), **_identity(authority, pair)}


def coordinator_bundle(
    authority: Authority, pair: tuple[Issued, Issued], broker: BrokerPlace, folder: str
) -> dict[str, File]:
    """Return a coordinator's files; the table is for a run.toml beside the folder `folder`."""
    text = (
        f"# The [broker] table for a run.toml beside the folder {folder}/:\n"
        "# put it in place of the one there.\n\n" + broker_table(pair, broker, f"{folder}/")
    )
    return {"broker.toml": File(text.encode()), **_identity(authority, pair)}


def viewer_bundle(authority: Authority, pair: tuple[Issued, Issued]) -> dict[str, File]:
    """Return a viewer's files: its certificate and key, and the authority's certificate."""
    return {CA: File(authority.pem), **pair[0].files()}


def broker_table(pair: tuple[Issued, Issued], broker: BrokerPlace, prefix: str = "") -> str:
    """Return the `[broker]` table of a configuration; `prefix` precedes file names."""
    control, bulk = (each.name for each in pair)
    files = certificate_files(control, bulk, bulk, prefix)
    return render_broker({"host": broker.host, "port": broker.port, "tls": True, **files})


def _identity(authority: Authority, pair: tuple[Issued, Issued]) -> dict[str, File]:
    return {CA: File(authority.pem), **pair[0].files(), **pair[1].files()}
