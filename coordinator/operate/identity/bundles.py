"""A participant's files: its certificates and keys, and a configuration that uses them."""

from __future__ import annotations

import json
import re

from coordinator.operate.identity.authority import CA, Authority, Issued
from coordinator.operate.identity.errors import IdentityError
from coordinator.operate.identity.files import File
from coordinator.operate.identity.index import BrokerPlace
from edge_sdk.transport.settings import BrokerSettings, LinkError

PORT = 8_883
"""Usual port of MQTT over TLS."""

_PLACE = re.compile(
    r"(?:\[(?P<six>[0-9a-fA-F]*:[0-9a-fA-F:.]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?"
)

DEVICE = """\
# {name}: ready to run once you have completed the lines marked FILL IN:
#   tessera-device run --config device.toml
# Paths are relative to this file. `tessera-device init` writes a file with every key explained.
# The .key files are this device's identity. Keep them secret; there is no other copy.

name = "{name}"

# Name of the task to train, as the coordinator has it.
{task}

# FILL IN: this device's own data, which never leaves it: a folder of .npz files with x and y, or
# a function that returns them, as "file.py:function".
data = "data"

# State that must survive a restart.
state_dir = "state"

"""


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
    authority: Authority, pair: tuple[Issued, Issued], broker: BrokerPlace, task: str | None
) -> dict[str, File]:
    """Return the files of a device's bundle, by name. `task` None: left to the owner."""
    filled = f"task = {_toml(task)}" if task else '# FILL IN:\n# task = "…"'
    text = DEVICE.format(name=pair[0].name, task=filled) + broker_table(pair, broker)
    return {"device.toml": File(text.encode()), **_identity(authority, pair)}


def coordinator_bundle(
    authority: Authority, pair: tuple[Issued, Issued], broker: BrokerPlace, folder: str
) -> dict[str, File]:
    """Return a coordinator's files; the table is for a run.toml beside the folder `folder`."""
    text = (
        f"# The [broker] table for a run.toml beside the folder {folder}/:\n"
        "# put it in place of the one there.\n\n" + broker_table(pair, broker, f"{folder}/")
    )
    return {"broker.toml": File(text.encode()), **_identity(authority, pair)}


def broker_table(pair: tuple[Issued, Issued], broker: BrokerPlace, prefix: str = "") -> str:
    """Return the `[broker]` table of a configuration; `prefix` precedes file names."""
    control, bulk = (each.name for each in pair)
    files = {
        "ca": CA,
        "certificate": f"{control}.pem",
        "key": f"{control}.key",
        "bulk_certificate": f"{bulk}.pem",
        "bulk_key": f"{bulk}.key",
    }
    lines = [
        "[broker]",
        f"host = {_toml(broker.host)}",
        f"port = {broker.port}",
        "tls = true",
        *(f"{key} = {_toml(prefix + file)}" for key, file in files.items()),
    ]
    return "\n".join(lines) + "\n"


def _identity(authority: Authority, pair: tuple[Issued, Issued]) -> dict[str, File]:
    return {CA: File(authority.pem), **pair[0].files(), **pair[1].files()}


def _toml(text: str) -> str:
    # JSON strings are TOML strings, as long as nothing beyond the first 65,536 characters is
    # escaped.
    return json.dumps(text, ensure_ascii=False)
