"""Reasons for a missing connection, in words for the person who has to change something.

A `Denial` is also a reason: the broker answered, but refuses *us*. Trying again helps only if
somebody changes something, here or there.
"""

from __future__ import annotations

import socket
import ssl
from datetime import datetime, timezone

from edge_sdk.transport.mqtt.certificates import read_certificate
from edge_sdk.transport.settings import BrokerSettings


class Denial(str):
    """A reason: the broker refused our name, password or certificate."""

    __slots__ = ()


OTHER_VERSION = "Unsupported protocol version"
"""MQTT's name for a refusal of the version that we speak."""

_REFUSALS = {
    "Bad user name or password": "the broker refused the user name or password",
    "Not authorized": "the broker does not let this user connect: user name or password are wrong, "
    "or its access rules forbid it",
    "Client identifier not valid": "the broker does not accept the client id; some brokers bind it "
    "to the user or certificate",
    "Server unavailable": "the broker is up but not ready; it may be starting or overloaded",
    OTHER_VERSION: "the server there does not speak MQTT 3.1.1",
}
_DENIALS = ("Bad user name or password", "Not authorized", "Client identifier not valid")

NO_RETAINED = "the broker keeps no retained messages"
TURN_ON = (
    "turn retained messages on (retain_available true in Mosquitto's configuration), or use "
    "another broker"
)

_WHOSE = "{whose}"
_EXPIRED = "CERTIFICATE_EXPIRED"
_OURS = {
    "CERTIFICATE_REQUIRED": "the broker asks for a client certificate; set certificate and key",
    "UNKNOWN_CA": "the broker does not know the authority of our certificate{whose}; was it made "
    "for another broker?",
    "CERTIFICATE_REVOKED": "our certificate{whose} was revoked; ask the operator for a new one",
    _EXPIRED: "our certificate{whose} has expired; ask the operator for a new one",
    "UNSUPPORTED_CERTIFICATE": "our certificate{whose} cannot be used to connect; use the one "
    "made for this device",
    "BAD_CERTIFICATE": "the broker does not accept our certificate{whose}",
    "CERTIFICATE_UNKNOWN": "the broker does not accept our certificate{whose}",
    "ACCESS_DENIED": "the broker does not let our certificate{whose} connect",
    "HANDSHAKE_FAILURE": "the broker broke off the TLS handshake; it may ask for a client "
    "certificate (set certificate and key)",
}
"""The broker's objections to our certificate, by the name of the TLS alert."""

_OTHERS = {
    "WRONG_VERSION_NUMBER": "the broker does not speak TLS on this port; check port and tls",
    "RECORD_LAYER_FAILURE": "the broker does not speak TLS on this port; check port and tls",
}


def connect_failure(settings: BrokerSettings, error: Exception) -> str:
    """Explain why the socket, or TLS on it, failed."""
    where = settings.address
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{where}: the broker's certificate was not accepted: {error.verify_message}; "
            f"checked for {settings.host!r} against {settings.ca or 'the CAs of this machine'}"
        )
    if isinstance(error, ssl.SSLError):
        return _alert(settings, str(error)) or f"{where}: TLS failed: {error}"
    if isinstance(error, socket.gaierror):
        return f"{where}: the name {settings.host!r} was not found; check host, or the network"
    if isinstance(error, UnicodeError):
        return f"{where}: {settings.host!r} cannot be a host name"
    if isinstance(error, ConnectionRefusedError):
        return f"{where}: nothing listens there; is the broker running, is the port right?"
    if isinstance(error, TimeoutError):
        return f"{where}: no answer; is the host right, does a firewall drop the connection?"
    if settings.tls and isinstance(error, ConnectionError):
        return f"{where}: closed during the TLS handshake; does it speak TLS on this port?"
    words = error.strerror if isinstance(error, OSError) else None
    return f"{where}: {words or error}"


def refusal(settings: BrokerSettings, code: str) -> str:
    """Explain why the broker refused us; `code` is MQTT's name for the reason."""
    if code == "Retain not supported":  # MQTT 5; in 3.1.1 a broker just closes
        return will_refused(settings)
    words = _REFUSALS.get(code, f"the broker refused the connection: {code}")
    if settings.username:
        words += f" (user {settings.username!r})"
    elif settings.certificate is None:
        words += " (no user name is set)"
    else:
        words += _whose(settings)
    reason = f"{settings.address}: {words}"
    return Denial(reason) if code in _DENIALS else reason


def will_refused(settings: BrokerSettings) -> Denial:
    """Explain why the broker welcomes us only without a will that it is to retain."""
    return Denial(f"{settings.address}: {NO_RETAINED}, which every run needs; {TURN_ON}")


def lost(settings: BrokerSettings, *, welcomed: bool, silent: bool, detail: str) -> str:
    """Explain why a connection ended.

    `welcomed`: the broker had accepted it; `silent`: the broker sent nothing. `detail` is the last
    message of the network, or empty.
    """
    where = settings.address
    if alert := _alert(settings, detail):
        return alert
    if silent and not welcomed:
        return f"{where}: something accepts connections there but does not answer like a broker"
    if silent:
        return f"{where}: no sign of life from the broker; the network or the broker hangs"
    if not welcomed and settings.tls:
        # Under TLS 1.3 a broker judges our certificate after the handshake, and its verdict can be
        # lost with the connection.
        return (
            f"{where}: closed after the TLS handshake, before the broker answered; it probably "
            "needs a client certificate that it trusts (set certificate and key)"
        )
    if not welcomed:
        return f"{where}: closed before the broker answered; does it expect TLS on this port?"
    shared = settings.certificate is not None and settings.bulk_certificate is None
    return (
        f"{where}: the broker closed the connection; it may have stopped, or another connection "
        + (
            "uses the same name or certificate (is bulk_certificate missing?)"
            if shared
            else "uses the same name"
        )
    )


def _alert(settings: BrokerSettings, detail: str) -> str | None:
    """Explain a TLS alert; None if it is not one we know."""
    text = detail.upper().replace(" ", "_")
    for key, words in _OURS.items():
        if key in text:
            words = _outlived(settings) if key == _EXPIRED else words
            return Denial(f"{settings.address}: {words.replace(_WHOSE, _whose(settings))}")
    for key, words in _OTHERS.items():
        if key in text:
            return f"{settings.address}: {words}"
    return None


def _outlived(settings: BrokerSettings) -> str:
    """Explain a certificate that the broker calls expired; it says the same of an expired
    revocation list."""
    own = settings.certificate and read_certificate(settings.certificate)
    if not own:
        return _OURS[_EXPIRED]
    if own.until > datetime.now(timezone.utc):
        return (
            f"the broker considers our certificate{_WHOSE} expired, but it lasts until "
            f"{own.until:%Y-%m-%d}: a clock is wrong, or the broker's list of revoked certificates "
            "is out of date; tell the operator"
        )
    return _OURS[_EXPIRED].replace("has expired", f"expired on {own.until:%Y-%m-%d}")


def _whose(settings: BrokerSettings) -> str:
    if settings.certificate is None:
        return ""
    own = read_certificate(settings.certificate)
    return f" ({settings.certificate}{f', for {own.name!r}' if own and own.name else ''})"
