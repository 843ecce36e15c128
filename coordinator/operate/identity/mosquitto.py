"""Mosquitto's files: a listener with TLS, its certificate, access rules, the revocation list.

The rules are patterns over the name in the certificate (`%u`), so enrolling a device changes
nothing at the broker. Only coordinators are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from coordinator.operate.broker.embedded import MAX_PACKET_BYTES
from coordinator.operate.identity.authority import CA, CRL, Authority
from coordinator.operate.identity.files import File
from edge_sdk.protocol.messages.topics import BULK, COORDINATOR, ROOT
from edge_sdk.transport.settings import is_loopback

CONFIG, ACL = "mosquitto.conf", "acl"


def mosquitto_files(
    authority: Authority, *, hosts: list[str], port: int, at: Path, user: str | None
) -> dict[str, File]:
    """Return the broker's files, by name, made for the folder `at`.

    `user`: the account Mosquitto switches to when root starts it; None: its own choice.
    """
    return {CONFIG: File(_config(hosts, port, at, user).encode()), **broker_files(authority, hosts)}


def broker_files(authority: Authority, hosts: list[str]) -> dict[str, File]:
    """Return the files that `tls_listener` names: certificates, access rules, revoked ones."""
    return {
        ACL: File(access_rules(_coordinators(authority)).encode()),
        CA: File(authority.pem),
        CRL: File(authority.crl),
        **authority.broker_certificate(hosts).files(),
    }


def tls_listener(hosts: list[str], port: int, at: Path) -> list[str]:
    """Return the lines of a listener that knows everybody by certificate; its files are in `at`."""
    # A broker for this machine alone listens on loopback only.
    bind = f" {hosts[0]}" if all(map(is_loopback, hosts)) else ""
    return [
        f"listener {port}{bind}",
        f"cafile {at / CA}",
        f"certfile {at / 'broker.pem'}",
        f"keyfile {at / 'broker.key'}",
        f"crlfile {at / CRL}",
        "require_certificate true",
        "# Name and client id come from the certificate: nobody can use another's.",
        "use_identity_as_username true",
        "use_username_as_clientid true",
        "allow_anonymous false",
        f"acl_file {at / ACL}",
    ]


def access_rules(coordinators: Iterable[str]) -> str:
    """Return Mosquitto's ACL file, which says who may read and write which topics."""
    lines = ["# Coordinators, on both connections: everything."]
    for name in coordinators:
        for user in (name, name + BULK):
            lines += [f"user {user}", f"topic readwrite {ROOT}/#"]
    lines += [
        "",
        "# Everybody else: public topics, and topics with the name in their own certificate.",
        f"pattern read {ROOT}/+/pub/#",
        f"pattern read {ROOT}/+/down/%u/#",
        f"pattern write {ROOT}/+/up/%u/#",
        f"pattern readwrite {ROOT}/+/presence/%u",
    ]
    return "\n".join(lines) + "\n"


def _coordinators(authority: Authority) -> list[str]:
    enrolled = (each.name for each in authority.index.enrolments if each.is_coordinator)
    return sorted({COORDINATOR, *enrolled})


def _config(hosts: list[str], port: int, at: Path, user: str | None) -> str:
    lines = [
        "# Written by tessera-coordinator broker-config; start it with mosquitto -c, or include it",
        "# in your own configuration.",
        *tls_listener(hosts, port, at),
        f"max_packet_size {MAX_PACKET_BYTES}",
        "max_inflight_messages 20",
        "max_queued_messages 10000",
        "max_queued_bytes 67108864",
        "set_tcp_nodelay true",
    ]
    if user is not None:
        lines.append(f"user {user}")
    return "\n".join(lines) + "\n"
