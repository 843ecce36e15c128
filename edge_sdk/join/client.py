"""The two requests of a device that joins, over HTTPS.

1. `GET /v1/authority` fetches the authority's certificate. Nobody is trusted yet and nothing is
   sent; the certificate counts only if it has the fingerprint in the code.
2. `POST /v1/join` goes to a server whose certificate that authority signed, for the host in the
   code. Somebody in between has neither, and learns nothing.
"""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass
from http.client import HTTPException, HTTPSConnection
from typing import Any

from edge_sdk.join.code import (
    AUTHORITY_PATH,
    JOIN_PATH,
    MAC_HEADER,
    MAX_ANSWER_BYTES,
    JoinCode,
    JoinError,
)

TIMEOUT_S = 20.0
VERSION = 1

_NOT_YET_VALID, _EXPIRED = 9, 10  # X509_V_ERR_CERT_NOT_YET_VALID, …_HAS_EXPIRED


@dataclass(frozen=True, slots=True)
class Welcome:
    """First answer of a coordinator: its authority, checked, and whether it signs certificates."""

    ca: str
    """Certificate of the authority, in PEM format."""
    certificates: bool
    """True if the device needs a key and certificates; False: a password is enough."""


def fetch_welcome(code: JoinCode) -> Welcome:
    """Ask for the authority, and check that it is the one in the code. Raises `JoinError`."""
    answer = _ask(code, _unchecked(), "GET", AUTHORITY_PATH)
    ca = _text(answer, "ca")
    try:
        certificate = ssl.PEM_cert_to_DER_cert(ca)
    except ValueError as error:
        raise JoinError(_stranger(code)) from error
    if not code.matches(certificate):
        raise JoinError(_stranger(code))
    return Welcome(ssl.DER_cert_to_PEM_cert(certificate), answer.get("certificates") is not False)


def send_request(code: JoinCode, welcome: Welcome, name: str, request: str | None) -> Any:
    """Ask to join under a name; return the answer. `request`: PEM, None: without certificates.

    Raises `JoinError` with the coordinator's reason if it refuses.
    """
    content = {"v": VERSION, "code": code.id, "task": code.task, "name": name, "request": request}
    body = json.dumps(content).encode()
    context = ssl.create_default_context(cadata=welcome.ca)
    return _ask(code, context, "POST", JOIN_PATH, body)


def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the fingerprint is checked instead
    return context


def _ask(
    code: JoinCode, context: ssl.SSLContext, method: str, path: str, body: bytes | None = None
) -> dict[str, Any]:
    headers = {} if body is None else {MAC_HEADER: code.mac(body)}
    connection = HTTPSConnection(code.host, code.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request(method, path, body, {**headers, "Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, HTTPException) as error:
        raise JoinError(_failure(code, error)) from error
    finally:
        connection.close()
    try:
        answer = json.loads(data)
        if len(data) > MAX_ANSWER_BYTES or not isinstance(answer, dict):
            raise ValueError
    except ValueError as error:
        raise JoinError(
            f"something else than a coordinator answers at {code.address}: is the code current?"
        ) from error
    if response.status != 200:
        raise JoinError(f"the coordinator refuses: {_text(answer, 'error')}")
    return answer


def _text(answer: dict[str, Any], key: str) -> str:
    value = answer.get(key)
    if not isinstance(value, str):
        raise JoinError(f"the coordinator's answer has no {key}: is its version the same as ours?")
    return value


def _stranger(code: JoinCode) -> str:
    return (
        f"whoever answers at {code.address} is not the coordinator that made this code: its "
        "authority has another fingerprint. Nothing was sent. Somebody may be in between, or the "
        "coordinator has a new authority: ask for a new code"
    )


def _failure(code: JoinCode, error: Exception) -> str:
    where = f"the coordinator at {code.address} cannot be reached"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            return (
                f"the certificate of {code.address} is not valid now: is this device's clock "
                f"right? ({error.verify_message})"
            )
        return (
            f"whoever answers at {code.address} is not the coordinator that made this code "
            f"({error.verify_message}). Nothing was sent. Somebody may be in between: ask the "
            "operator"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"{where}: nothing listens there; is serve running, is the code current?"
    if isinstance(error, socket.gaierror):
        return f"{where}: the name {code.host!r} was not found; is this the right network?"
    if isinstance(error, TimeoutError):
        return f"{where}: no answer; is this the right network, does a firewall drop the port?"
    if isinstance(error, ssl.SSLError):
        return f"{where}: no TLS there ({error.reason}); is the code current?"
    words = error.strerror if isinstance(error, OSError) else None
    return f"{where}: {words or error or type(error).__name__}"
