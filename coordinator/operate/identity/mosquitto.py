"""Mosquitto's files: a listener with TLS, its certificate, access rules, the revocation list.

The access rules name every device with the tasks that it may take part in, so they are written
again when somebody is enrolled, gets a task or is revoked, and the broker is told to read them. A
broker that cannot be told gets patterns over the name in the certificate (`%u`) instead: then
enrolling a device changes nothing there, and every device may take part in every task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from coordinator.operate.broker.embedded import MAX_PACKET_BYTES
from coordinator.operate.identity.authority import CA, CRL, Authority
from coordinator.operate.identity.files import File
from coordinator.operate.identity.index import AllowedTasks
from edge_sdk.protocol.messages.topics import BULK, COORDINATOR, ROOT
from edge_sdk.transport.settings import is_loopback

CONFIG, ACL = "mosquitto.conf", "acl"
ANY_TASK = ("+",)
EMPTY: Mapping[str, AllowedTasks] = MappingProxyType({})


def mosquitto_files(
    authority: Authority,
    *,
    hosts: list[str],
    port: int,
    at: Path,
    user: str | None,
    by_task: bool = True,
) -> dict[str, File]:
    """Return the broker's files, by name, made for the folder `at`.

    `user`: the account Mosquitto switches to when root starts it; None: its own choice. `by_task`:
    see `BrokerPlace`.
    """
    return {
        CONFIG: File(_config(hosts, port, at, user).encode()),
        **broker_files(authority, hosts, by_task=by_task),
    }


def broker_files(
    authority: Authority, hosts: list[str], *, by_task: bool = True
) -> dict[str, File]:
    """Return the files that `tls_listener` names: certificates, access rules, revoked ones."""
    return {
        ACL: rules_file(authority, by_task=by_task),
        CA: File(authority.pem),
        CRL: File(authority.crl),
        **authority.broker_certificate(hosts).files(),
    }


def rules_file(authority: Authority, *, by_task: bool) -> File:
    """Return the file of access rules for everybody whom the authority has enrolled."""
    index, now = authority.index, authority.now
    coordinators = {each.name for each in index.enrolments if each.is_coordinator}
    names = sorted({COORDINATOR, *coordinators})
    viewers = viewer_rules(index.viewers(now))
    if not by_task:
        return File((open_rules(names) + viewers).encode())
    rules = access_rules(names, index.allowed(now), index.leaving(now))
    return File((rules + viewers).encode())


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


def access_rules(
    coordinators: Iterable[str],
    devices: Mapping[str, AllowedTasks],
    leaving: Mapping[str, AllowedTasks] = EMPTY,
) -> str:
    """Return Mosquitto's ACL file, which says who may read and write which topics.

    `leaving`: devices that were revoked. A connection that they still have may do nothing but end:
    its will tells the coordinator that they are gone.
    """
    lines = _coordinator_rules(coordinators)
    lines += ["", "# Devices: public topics of their tasks, and topics there with their own name."]
    for name, tasks in sorted(devices.items()):
        places = [f"{ROOT}/{task}" for task in (ANY_TASK if tasks is None else tasks)]
        if not places:
            continue
        for user in (name, name + BULK):
            lines.append(f"user {user}")
            for place in places:
                lines += [
                    f"topic read {place}/pub/#",
                    f"topic read {place}/down/{user}/#",
                    f"topic write {place}/up/{user}/#",
                ]
                if user == name:
                    lines.append(f"topic readwrite {place}/presence/{user}")
    lines += ["", "# Revoked: what their broken connections say, and nothing else."]
    for name, tasks in sorted(leaving.items()):
        places = [f"{ROOT}/{task}" for task in (ANY_TASK if tasks is None else tasks)]
        if places:
            lines += [f"user {name}", *(f"topic write {place}/presence/{name}" for place in places)]
    return "\n".join(lines) + "\n"


def open_rules(coordinators: Iterable[str]) -> str:
    """Return an ACL file that lets every enrolled device into every task."""
    lines = [
        *_coordinator_rules(coordinators),
        "",
        "# Everybody else: public topics, and topics with the name in their own certificate.",
        f"pattern read {ROOT}/+/pub/#",
        f"pattern read {ROOT}/+/down/%u/#",
        f"pattern write {ROOT}/+/up/%u/#",
        f"pattern readwrite {ROOT}/+/presence/%u",
    ]
    return "\n".join(lines) + "\n"


def viewer_rules(viewers: Mapping[str, AllowedTasks]) -> str:
    """Return the rules of those who may read what runs tell dashboards; empty without any."""
    if not viewers:
        return ""
    lines = ["", "# Viewers: what their runs tell dashboards."]
    for name, tasks in sorted(viewers.items()):
        lines.append(f"user {name}")
        lines += [
            f"topic read {ROOT}/{task}/view/#" for task in (ANY_TASK if tasks is None else tasks)
        ]
    return "\n".join(lines) + "\n"


def _coordinator_rules(names: Iterable[str]) -> list[str]:
    lines = ["# Coordinators, on both connections: everything."]
    for name in names:
        for user in (name, name + BULK):
            lines += [f"user {user}", f"topic readwrite {ROOT}/#"]
    return lines


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
