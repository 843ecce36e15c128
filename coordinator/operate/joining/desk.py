"""The desk: checks a request to join, and gives the device what it needs.

Requests and answers are JSON objects (docs/protocol.md). The device is entered in the code book
before its certificates are made, so a crash in between costs nobody a place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from coordinator.errors import CoordinatorError
from coordinator.operate.identity.access import WrittenRules, write_rules
from coordinator.operate.identity.authority import Authority, PublicKey, device_name, read_request
from coordinator.operate.joining.codes import CodeBook, CodeError
from edge_sdk.program.logs import fact
from edge_sdk.transport.settings import BrokerSettings

log = logging.getLogger(__name__)

VERSION = 1
DAYS = 365
"""Days that certificates of devices that join are valid."""
BUSY_S = 5.0
"""Seconds to wait for an authority that another process has open."""


class RequestError(CoordinatorError):
    """A request that cannot be read; the text says why."""


class Desk:
    """Answers requests to join, one at a time. Refusals are `CoordinatorError`."""

    def __init__(
        self,
        book: CodeBook,
        broker: BrokerSettings,
        authority: Path,
        ca: bytes,
        admitted: Callable[[WrittenRules], object] = lambda _: None,
    ) -> None:
        """`broker`: as devices reach it. With TLS they get certificates of the `authority` (its
        folder), whose own is `ca` (PEM); else they get the broker's password. `admitted`: called
        before a device gets its certificates, when brokers have new access rules to read."""
        self._book, self._broker, self._admitted = book, broker, admitted
        self._authority, self._ca = authority, ca.decode()

    def welcome(self) -> dict[str, Any]:
        """Tell anybody who the authority is."""
        return {"v": VERSION, "ca": self._ca, "certificates": self._broker.tls}

    def admit(self, body: bytes, mac: str, address: str) -> dict[str, Any]:
        """Let a device in, and return what it needs. Raises `CoordinatorError`."""
        request = _read(body)
        entry = self._book.authenticate(request["code"], mac, body)
        tasks = entry.tasks
        if request["task"] not in tasks:
            words = ", ".join(map(repr, tasks))
            raise RequestError(f"this code is for {words}, not for {request['task']!r}")
        name = device_name(request["name"])
        answer = {"v": VERSION, "name": name, "task": tasks[0], "broker": self._place()}
        answer["tasks"] = list(tasks)
        if not self._broker.tls:
            self._book.enter(entry, name, "", lambda _before: None)
        else:
            key = read_request((request["request"] or "").encode())
            # Open all the while, so that nobody is revoked in between.
            with Authority(self._authority, wait_s=BUSY_S) as authority:
                self._book.enter(
                    entry, name, _digest(key), lambda before: _check(authority, name, before)
                )
                # Who asks again gets what was granted since, not what was withdrawn.
                given = () if authority.valid(name) else tasks
                certificate, bulk = authority.certify(name, key, days=DAYS, tasks=given)
                written = write_rules(authority)
            self._admitted(written)
            answer |= {"certificate": certificate.decode(), "bulk_certificate": bulk.decode()}
        log.info(
            "%s joined with code %s, from %s",
            name,
            entry.code.id,
            address,
            extra=fact("enrolled", device=name, code=entry.code.id, tasks=list(tasks)),
        )
        return answer

    def _place(self) -> dict[str, Any]:
        broker = self._broker
        return {
            "host": broker.host,
            "port": broker.port,
            "tls": broker.tls,
            "username": None if broker.tls else broker.username,
            "password": None if broker.tls else broker.password,
            "allow_plaintext": broker.allow_plaintext,
        }


def _check(authority: Authority, name: str, before: datetime | None) -> None:
    """Raise `CodeError` if a device may not have certificates; `before`: it was let in then."""
    if before is None:
        if authority.valid(name):
            raise CodeError(
                f"a device called {name!r} has joined already: choose another name (--name); have "
                f"it revoked first (tessera-coordinator revoke {name}); or, if it is to train a "
                f"further task, have that granted (tessera-coordinator grant {name} --task NAME)"
            )
    elif any(each.revoked and each.revoked >= before for each in authority.index.of(name)):
        raise CodeError(
            f"{name!r} was revoked: to come back, it needs a new code (tessera-coordinator codes "
            "create)"
        )


def _digest(key: PublicKey) -> str:
    data = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(data).hexdigest()


def _read(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except ValueError as error:
        raise RequestError("the request is not JSON") from error
    if not isinstance(request, dict) or request.get("v") != VERSION:
        raise RequestError(f"this coordinator reads requests of version {VERSION}")
    for name in ("code", "task", "name"):
        if not isinstance(request.get(name), str):
            raise RequestError(f"the request has no {name}")
    if not isinstance(request.get("request"), str | None):
        raise RequestError("the signing request is not text")
    return request
